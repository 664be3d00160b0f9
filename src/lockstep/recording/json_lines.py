"""Files with one JSON object per line: appended to by one process, read by others meanwhile, also on a disk that becomes full."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 20
"""A longer line is damaged: no line that Lockstep writes is that long."""


class JsonLinesFile:
    """Appends lines to the file ``path``, which it makes. Every call is one system call: a killed process loses no line.

    A line that was written in part ends before the next one, so that it takes no other line along.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._is_torn = False
        """The last line was written in part."""

    def append(self, text: str) -> int:
        """Append lines, each with its end. Returns how many bytes were written.

        Raises:
            OSError: The lines could not be written, or only a part of them.
        """
        data = (b"\n" if self._is_torn else b"") + text.encode()
        written = 0
        try:
            while written < len(data):  # the second time it writes the rest, or raises the error that left no room for it
                written += os.write(self._file, data[written:])
        finally:
            if written:
                self._is_torn = data[written - 1 : written] != b"\n"
        return written

    def close(self) -> None:
        """Close the file. It may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JsonLinesTail:
    """Reads the complete lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.has_more = False
        """Whether the last call of ``read`` left something because of ``max_bytes``."""

    def read(self, max_bytes: int | None = None) -> list[dict[str, Any]]:
        """Returns the new lines. ``max_bytes``: about so much of the file, or one line that is longer."""
        return objects(line for _, line in self.lines(max_bytes))

    def lines(self, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
        """As ``read``, as bytes, each with its position in the file. The next call begins behind all of them."""
        self.has_more = False
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # another run has taken the folder
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(-1 if max_bytes is None else max_bytes)
                if max_bytes is not None and len(data) == max_bytes:
                    self.has_more = True
                    if b"\n" not in data:
                        data += file.readline(LONGEST_LINE)
        except OSError:
            return iter(())
        begin, end = self._offset, data.rfind(b"\n") + 1
        if end == 0 and len(data) > LONGEST_LINE:  # no line is that long: a damaged file
            self._offset += len(data)
            return iter(())
        self.has_more = self.has_more and end > 0
        self._offset += end
        return _with_positions(begin, data[:end])


def _with_positions(begin: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    for line in data.splitlines(keepends=True):
        yield begin, line
        begin += len(line)


def objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of these lines. What is no object was written in part: no part of a JSON object is a JSON object."""
    return [found for found in map(object_of, lines) if found is not None]


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of this line; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def number(value: float) -> float | str:
    """What JSON has for a number: NaN and infinity are text there, which ``float`` reads."""
    return value if math.isfinite(value) else str(value)
