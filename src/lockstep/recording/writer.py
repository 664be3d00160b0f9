"""RecordingWriter: writes the records of a run into files that stay small. Only appends to files and removes whole files.

    every-1-000007.jsonl      all records
    every-16-000001.jsonl     those of the steps whose number is divisible by 16
    every-256-000001.jsonl    ... by 256
    every-4096-000001.jsonl   ... by 4096

The files with the same first number are a row. Of each row the newest four are kept. So a long run keeps its last steps in full,
and older ones the thinner the older they are.
``events.jsonl`` is another file, of which nothing is removed: it has the faults.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.recording.json_lines import JsonLinesFile

STRIDES = (1, 16, 256, 4096)
FILES_KEPT = 4
FILE_BYTES = 4 << 20


class RecordingWriter:
    """Writes to ``folder``, which it makes. ``error``: the first error. Records are lost while files cannot be written."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self.error: OSError | None = None
        self._rows = [_Row(folder, stride, file_bytes) for stride in STRIDES]
        self._folder = folder

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, as plain data (records.py). One system call for each row."""
        lines = [(record.get("step"), json.dumps(record, separators=(",", ":"), default=str)) for record in records]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for row in self._rows:
                row.append([text for step, text in lines if not isinstance(step, int) or step % row.stride == 0])
        except OSError as error:
            self.error = self.error or error

    def close(self) -> None:
        for row in self._rows:
            row.close()


class _Row:
    def __init__(self, folder: Path, stride: int, file_bytes: int) -> None:
        self.stride = stride
        self._folder, self._file_bytes, self._number, self._size = folder, file_bytes, 0, 0
        self._file: JsonLinesFile | None = None

    def append(self, lines: list[str]) -> None:
        if not lines:
            return
        if self._file is None or self._size >= self._file_bytes:
            self._file = self._next_file()
        self._size += self._file.append("\n".join(lines) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self) -> JsonLinesFile:
        file = JsonLinesFile(self._path(self._number + 1))
        self.close()
        self._number, self._size = self._number + 1, 0
        self._path(self._number - FILES_KEPT).unlink(missing_ok=True)
        return file

    def _path(self, number: int) -> Path:
        return self._folder / f"every-{self.stride}-{number:06d}.jsonl"
