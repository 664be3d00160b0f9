"""The ends of the logs of a run's workers: ``RUN_DIR/workers/<id>/log.txt``. Reads, and never more than it is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 128 << 10
"""So much is returned at once."""


@dataclass(frozen=True)
class LogPart:
    """A part of a log. ``end``: from where to read on. ``skipped``: whether older text was left out."""

    text: str
    end: int
    skipped: bool


def workers_with_logs(run_dir: Path) -> list[int]:
    """The ids of all workers that have a log."""
    try:
        names = os.listdir(run_dir / "workers")
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and (run_dir / "workers" / name / "log.txt").exists())


def read_log(run_dir: Path, worker: int, start: int = -1, max_bytes: int = MAX_BYTES) -> LogPart | None:
    """Return the log of a worker from byte ``start``, or its last ``max_bytes`` if there is more or if ``start`` is negative.

    None if there is no such log.
    """
    path = run_dir / "workers" / str(worker) / "log.txt"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if start > size:  # the file was replaced
                start = -1
            begin = max(start, size - max_bytes, 0)
            file.seek(begin)
            data = file.read(max_bytes)
    except OSError:
        return None
    if begin > max(start, 0):  # begin with a whole line
        data, begin = _after_newline(data, begin)
        return LogPart(data.decode(errors="replace"), begin + len(data), True)
    whole = _whole_characters(data)
    return LogPart(whole.decode(errors="replace"), begin + len(whole), False)


def _after_newline(data: bytes, begin: int) -> tuple[bytes, int]:
    at = data.find(b"\n") + 1
    return data[at:], begin + at


def _whole_characters(data: bytes) -> bytes:
    """Without a character of UTF-8 at the end that was written in part."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if back < length else data
    return data
