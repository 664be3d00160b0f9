"""Csv: one line for each step, one column for each name."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from lockstep.observe.tracker_files import claim, free_name

_STEP = "step"


class Csv:
    """Writes logged values to a CSV file: ``step`` and one column for each name. A name that comes later becomes a new column.

    Numbers are written so that they have the same bits when they are read again.

    Args:
        path: The file. Default: ``metrics.csv`` in the folder of the run's curves.

    Example:
        >>> run = lockstep.Run(model, opt, track=[lockstep.track.Csv("metrics.csv")])
    """

    name = "csv"
    is_local = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else Path(path).absolute()
        self._path = Path()
        self._file = self._claim = -1
        self._columns: list[str] = []
        self._last = 0
        self._pending: list[str] = []

    @property
    def place(self) -> str | None:
        """Where it writes, to compare trackers. None: the default."""
        return None if self._given is None else os.path.realpath(self._given)

    def open(self, run_id: str, folder: Path) -> None:
        self.close()
        self._path = self._given or folder / "metrics.csv"
        if self._path.is_dir():
            raise IsADirectoryError(f"{self._path} is a folder; pass the path of a file")
        self._claim = claim(self._path.with_name(f".{self._path.name}.run"), run_id, self._put_aside, self._path.name)
        self._pending = []
        if not self._path.exists() or not self._repair():
            self._replace([[_STEP]])
        self._columns, *rows = self._rows()
        self._last = int(rows[-1][0]) if rows else 0
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: dict[str, float]) -> None:
        named = {_column(name): value for name, value in values.items()}
        new = [name for name in named if name not in self._columns]
        if new:
            self._add_columns(new)
        cells = [str(step), *(repr(named[name]) if name in named else "" for name in self._columns[1:])]
        self._pending.append(",".join(cells) + "\n")

    def flush(self) -> None:
        data = "".join(self._pending).encode()
        self._pending = []
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        for file in (self._file, self._claim):
            if file >= 0:
                os.close(file)
        self._file = self._claim = -1

    def _put_aside(self) -> None:
        if self._path.exists():
            self._path.rename(free_name(self._path))

    def _repair(self) -> bool:
        """Cut off all from the first line on that is damaged. Returns whether a line is left.

        The last line was written in part if a worker was killed. If a machine has lost power, the end may be filled with zeros.
        Only the header can contain a quoted line end.
        """
        content = self._path.read_bytes()
        whole = content.partition(b"\0")[0]
        end = whole.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(self._path, end)
        return end > 0

    def _rows(self) -> list[list[str]]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def _add_columns(self, names: list[str]) -> None:
        """Write the file anew, with longer lines. The rename replaces it at once: a reader finds the old file or the new one."""
        self.flush()
        self._columns = [*self._columns, *names]
        _, *rows = self._rows()
        self._replace([self._columns, *(row + [""] * (len(self._columns) - len(row)) for row in rows)])
        os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _replace(self, rows: list[list[str]]) -> None:
        text = "".join(",".join(map(_quoted, row)) + "\n" for row in rows)
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.write_bytes(text.encode())
        temporary.replace(self._path)


def _column(name: str) -> str:
    """Return the column of a logged name. A surrogate has no place in UTF-8, and a zero byte is damage."""
    return f"logged {name}" if name == _STEP else name.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def _quoted(cell: str) -> str:
    """Unlike those of the module csv, also cells with a carriage return are quoted."""
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\r\n') else cell
