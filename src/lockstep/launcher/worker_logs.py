"""WorkerLogs: reads what the workers of a run have printed, in the order of time, once or as it grows. Changes nothing.

log_files.py says where the files are.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.log_files import log_files
from lockstep.launcher.logs import TIME_RECORD

_BLOCK = 1 << 16


@dataclass(frozen=True)
class LogLine:
    """``time`` is in seconds since 1970, 0 if it is not known. ``text`` is as the worker has written it, without the line end."""

    time: float
    worker: int
    text: bytes


class WorkerLogs:
    """``is_wanted(worker)``: whether to read the log of this worker."""

    def __init__(self, run_dir: Path, is_wanted: Callable[[int], bool]) -> None:
        self._run_dir, self._is_wanted = run_dir, is_wanted
        self._logs: dict[Path, _WorkerLog] = {}

    def workers(self) -> list[int]:
        """Returns the workers of which there is a log here, wanted or not."""
        return sorted({worker for worker, _ in log_files(self._run_dir)})

    def read(self, *, to_end: bool) -> Iterator[LogLine]:
        """Yield the lines that were not read yet. ``to_end``: also a last line without a line end."""
        self._find_new()
        return heapq.merge(*(log.read(to_end=to_end) for log in self._logs.values()), key=lambda line: line.time)

    def read_last(self, count: int, *, to_end: bool) -> list[LogLine]:
        """Return the last ``count`` lines of all logs together. Large files are read from their end."""
        self._find_new()
        for log in self._logs.values():
            log.skip_to_last(count)
        return list(deque(self.read(to_end=to_end), maxlen=count))

    def _find_new(self) -> None:
        for worker, path in log_files(self._run_dir):
            if path not in self._logs and self._is_wanted(worker):
                self._logs[path] = _WorkerLog(path, worker)


class _WorkerLog:
    def __init__(self, path: Path, worker: int) -> None:
        self._path, self._worker, self._offset = path, worker, 0
        self._times = _Times(path.with_name("log.times"))

    def skip_to_last(self, count: int) -> None:
        """The next read begins with the last ``count`` lines."""
        try:
            with open(self._path, "rb") as file:
                self._offset = _last_lines_begin(file.fileno(), count)
        except OSError:
            return

    def read(self, *, to_end: bool) -> Iterator[LogLine]:
        while True:
            block = self._block()
            end = block.rfind(b"\n") + 1
            if (len(block) < _BLOCK and to_end) or (len(block) == _BLOCK and not end):
                end = len(block)  # the last line, or a part of one that is very long
            if not end:
                return
            lines = block[:end].removesuffix(b"\n").split(b"\n")
            for text in lines:
                yield LogLine(self._times.at(self._offset), self._worker, text)
                self._offset += len(text) + 1
            self._offset -= not block[:end].endswith(b"\n")

    def _block(self) -> bytes:
        """The file is opened for each block: there may be more workers than this process may open files."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # somebody has emptied it
                    self._offset = 0
                return os.pread(file.fileno(), _BLOCK, self._offset)
        except OSError:
            return b""


class _Times:
    """Finds the time of a position in a log, by its log.times."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, -1
        self._time, self._begin, self._end = 0.0, 0, 0  # the record that was found last, and where the next one begins; -1: nowhere

    def at(self, offset: int) -> float:
        """Returns 0 if it is not known."""
        is_behind_last = self._end < 0 and self._begin <= offset
        if not (self._begin <= offset < self._end or (is_behind_last and self._size() == self._count)):
            self._find(offset)
        return self._time

    def _size(self) -> int:
        try:
            return self._path.stat().st_size // TIME_RECORD.size
        except OSError:
            return 0

    def _find(self, offset: int) -> None:
        self._count, self._begin, self._end = self._size(), 0, -1
        try:
            with open(self._path, "rb", buffering=0) as file:
                low, high = 0, self._count  # low: how many records are known to be before the offset, or at it
                while low < high:
                    middle = (low + high) // 2
                    if _record(file.fileno(), middle)[1] <= offset:
                        low = middle + 1
                    else:
                        high = middle
                if low:
                    self._time, self._begin = _record(file.fileno(), low - 1)
                if low < self._count:
                    self._end = _record(file.fileno(), low)[1]
        except OSError:
            return


def _record(file: int, number: int) -> tuple[float, int]:
    time, offset = TIME_RECORD.unpack(os.pread(file, TIME_RECORD.size, number * TIME_RECORD.size))
    return time, offset


def _last_lines_begin(file: int, count: int) -> int:
    """Returns the position at which the last ``count`` lines begin."""
    position = size = os.fstat(file).st_size
    missing = count
    while position > 0 and missing > 0:
        begin = max(0, position - _BLOCK)
        block = os.pread(file, position - begin, begin)
        at = len(block) - (position == size and block.endswith(b"\n"))
        while missing and (at := block.rfind(b"\n", 0, at)) >= 0:
            missing -= 1
            if not missing:
                return begin + at + 1
        position = begin
    return size if count == 0 else 0
