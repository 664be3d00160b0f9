"""Logs: writes the output of each worker, complete and unprefixed, to a file of its own. Knows files, not ranks.

    workers/<id>/log.txt      the output
    workers/<id>/log.times    when it came: records of 16 bytes, a time (seconds since 1970) and the position in log.txt from which
                              on the output came then or later; at most one record in 50 ms

By log.times, `lockstep logs` puts the output of several workers in the order of time.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.run_folder import RunFolder

TIME_RECORD = struct.Struct("<dQ")
"""Time and position, in log.times."""
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_TIMES_EVERY_S = 0.05


@dataclass
class _LogFile:
    """Two descriptors; ``times`` is -1 if log.times cannot be written. ``size``: of log.txt."""

    log: int
    times: int
    size: int
    noted_at: float = float("-inf")


class Logs:
    """If a file cannot be written (a full disk), output is lost, a person is told once, and training continues."""

    def __init__(self, run_folder: RunFolder, say: Callable[[str], None]) -> None:
        self._run_folder, self._say = run_folder, say
        self._files: dict[int, _LogFile] = {}
        self._tails: dict[int, bytes] = {}
        self._error_shown = False

    def open(self, worker: int) -> None:
        self._tails[worker] = b""
        try:
            self._run_folder.worker(worker).mkdir(mode=0o700, exist_ok=True)
            log = os.open(self._run_folder.log(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._files[worker] = _LogFile(log, _open_times(self._run_folder.log_times(worker)), os.fstat(log).st_size)
        except OSError as error:
            self._show_once(worker, error)

    def write(self, worker: int, stream: int, data: bytes) -> None:
        """``stream``: 1 for stdout, 2 for stderr."""
        if stream == 2:
            self._tails[worker] = (self._tails.get(worker, b"") + data)[-_TAIL_BYTES:]
        file = self._files.get(worker)
        if file is None:
            return
        try:
            _note_time(file)
            rest = memoryview(data)
            while rest:
                written = os.write(file.log, rest)
                file.size += written
                rest = rest[written:]
        except OSError as error:
            self._show_once(worker, error)

    def tail(self, worker: int) -> str:
        """Returns the last lines that the worker wrote to stderr: what a library printed before it crashed."""
        lines = self._tails.get(worker, b"").decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def close(self, worker: int) -> None:
        self._tails.pop(worker, None)
        if worker in self._files:
            file = self._files.pop(worker)
            os.close(file.log)
            if file.times >= 0:
                os.close(file.times)

    def close_all(self) -> None:
        for worker in list(self._files):
            self.close(worker)

    def _show_once(self, worker: int, error: OSError) -> None:
        if not self._error_shown:
            self._error_shown = True
            path = self._run_folder.log(worker)
            self._say(f"{path} cannot be written ({error.strerror}). Output is lost until it can. Training continues.")


def _open_times(path: Path) -> int:
    """Without it the log is complete, but its lines have no time."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return -1


def _note_time(file: _LogFile) -> None:
    now = time.monotonic()
    if file.times < 0 or now - file.noted_at < _TIMES_EVERY_S:
        return
    file.noted_at = now
    try:
        written = os.write(file.times, TIME_RECORD.pack(time.time(), file.size))
    except OSError:
        written = 0
    if written != TIME_RECORD.size:  # a record that is not whole would spoil those behind it
        os.close(file.times)
        file.times = -1
