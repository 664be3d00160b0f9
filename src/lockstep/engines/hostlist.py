"""Slurm's hostlists: `gpu[003-005,9],login1` names gpu003, gpu004, gpu005, gpu9 and login1."""

from __future__ import annotations

import re
from itertools import product

from lockstep.errors import UsageError

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[\d,-]+\])+")
_MAX_HOSTS = 1 << 16


def expand(text: str) -> list[str]:
    """Returns the names, in order. Raises UsageError if ``text`` is not a hostlist."""
    entries = _ENTRY.findall(text)
    if not entries or ",".join(entries) != text:
        raise UsageError(f"{text!r} is not a list of hosts as Slurm writes it. Correct it: node[01-03,7],login1.")
    return [name for entry in entries for name in _expand_entry(entry, text)]


def _expand_entry(entry: str, text: str) -> list[str]:
    """One entry with any number of brackets: r[1-2]n[01-03]."""
    parts = [_numbers(part[1:-1], text) if part.startswith("[") else [part] for part in re.split(r"(\[[^\]]*\])", entry) if part]
    return ["".join(name) for name in product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first) or int(last) - int(first) > _MAX_HOSTS:
            raise UsageError(
                f"{text!r} is not a list of hosts as Slurm writes it: [{ranges}] is no range. Correct it: node[01-03,7]."
            )
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
