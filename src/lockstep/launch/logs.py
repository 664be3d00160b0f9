"""Logs: each worker's output, whole and unprefixed, in its own file. Knows files and a worker's last words, not ranks."""

from __future__ import annotations

import os

from lockstep.launch.console import Console
from lockstep.launch.run_folder import RunFolder

_TAIL_BYTES = 4096
_TAIL_LINES = 12


class Logs:
    """A disk that is full stops the logs, not the run: said once."""

    def __init__(self, run_dir: RunFolder, console: Console) -> None:
        self._run_dir, self._console = run_dir, console
        self._files: dict[int, int] = {}
        self._tails: dict[int, bytes] = {}
        self._complained = False

    def begin(self, worker: int) -> None:
        self._tails[worker] = b""
        try:
            self._run_dir.worker(worker).mkdir(mode=0o700, exist_ok=True)
            self._files[worker] = os.open(self._run_dir.log(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self._complain(worker, error)

    def write(self, worker: int, stream: int, data: bytes) -> None:
        if stream == 2:
            self._tails[worker] = (self._tails.get(worker, b"") + data)[-_TAIL_BYTES:]
        try:
            rest = memoryview(data) if worker in self._files else memoryview(b"")
            while rest:
                rest = rest[os.write(self._files[worker], rest) :]
        except OSError as error:
            self._complain(worker, error)

    def tail(self, worker: int) -> str:
        """The end of what it wrote to stderr: what a library said before it fell."""
        lines = self._tails.get(worker, b"").decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def end(self, worker: int) -> None:
        self._tails.pop(worker, None)
        if worker in self._files:
            os.close(self._files.pop(worker))

    def close(self) -> None:
        for worker in list(self._files):
            self.end(worker)

    def _complain(self, worker: int, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            where = self._run_dir.log(worker)
            self._console.say(f"{where} cannot be written ({error.strerror}): output is lost until it can. Training goes on.")
