"""Tables, sizes and times as plain text. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.launcher.failure_text import first_line
from lockstep.recording.text import printable

_UNITS = ((86400.0, "day", "days"), (3600.0, "h", "h"), (60.0, "min", "min"), (1.0, "s", "s"))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two spaces between them. A column whose cells are all numbers is aligned to the right."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    is_number = [all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    shown = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, is_number))
        for line in lines
    ]
    return "".join(line.rstrip() + "\n" for line in shown)


def size_text(nbytes: float) -> str:
    """Three digits: "812 B", "1.21 MB", "3.40 GB"."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit * 0.9995:
            value = nbytes / limit
            return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
    return f"{nbytes:.0f} B"


def age_text(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits: "12 s", "3 min", "2 days". A length: text.duration."""
    for length, one, many in _UNITS:
        if seconds >= length:
            number = int(seconds / length)
            return f"{number} {one if number == 1 else many}"
    return "0 s"


def path_text(path: Path) -> str:
    """Relative to the current directory, if it is below that. Control characters are replaced."""
    try:
        shown = str(path.relative_to(os.getcwd()))
    except (ValueError, FileNotFoundError):
        shown = str(path)
    return printable(shown)


def one_line(text: str) -> str:
    """The first line of what may be the message of an exception. Control characters are replaced."""
    return printable(first_line(text))


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).isdecimal()
