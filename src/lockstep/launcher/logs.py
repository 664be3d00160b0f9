"""Logs: writes the output of each worker, complete and unprefixed, to a file of its own. Knows files, not ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

from lockstep.launcher.run_folder import RunFolder

_TAIL_BYTES = 4096
_TAIL_LINES = 12


class Logs:
    """If a file cannot be written (a full disk), output is lost, a person is told once, and training continues."""

    def __init__(self, run_folder: RunFolder, say: Callable[[str], None]) -> None:
        self._run_folder, self._say = run_folder, say
        self._files: dict[int, int] = {}
        self._tails: dict[int, bytes] = {}
        self._error_shown = False

    def open(self, worker: int) -> None:
        self._tails[worker] = b""
        try:
            self._run_folder.worker(worker).mkdir(mode=0o700, exist_ok=True)
            self._files[worker] = os.open(self._run_folder.log(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self._show_once(worker, error)

    def write(self, worker: int, stream: int, data: bytes) -> None:
        """``stream``: 1 for stdout, 2 for stderr."""
        if stream == 2:
            self._tails[worker] = (self._tails.get(worker, b"") + data)[-_TAIL_BYTES:]
        try:
            rest = memoryview(data) if worker in self._files else memoryview(b"")
            while rest:
                rest = rest[os.write(self._files[worker], rest) :]
        except OSError as error:
            self._show_once(worker, error)

    def tail(self, worker: int) -> str:
        """Returns the last lines that the worker wrote to stderr: what a library printed before it crashed."""
        lines = self._tails.get(worker, b"").decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def close(self, worker: int) -> None:
        self._tails.pop(worker, None)
        if worker in self._files:
            os.close(self._files.pop(worker))

    def close_all(self) -> None:
        for worker in list(self._files):
            self.close(worker)

    def _show_once(self, worker: int, error: OSError) -> None:
        if not self._error_shown:
            self._error_shown = True
            path = self._run_folder.log(worker)
            self._say(f"{path} cannot be written ({error.strerror}). Output is lost until it can. Training continues.")
