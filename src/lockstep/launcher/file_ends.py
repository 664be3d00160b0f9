"""The first and the last lines of a file that may be large, without reading the rest."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lockstep.recording.event_lines import is_event
from lockstep.recording.json_lines import LONGEST_LINE, objects

_BYTES = 1 << 18


def first_objects(path: Path, max_bytes: int = _BYTES) -> list[dict[str, Any]]:
    """Returns the JSON objects of the lines that begin in the first ``max_bytes``: each is read whole, up to LONGEST_LINE.

    Lines that are no JSON objects are left out. Returns an empty list if there is no such file.
    """
    lines: list[bytes] = []
    try:
        with open(path, "rb") as file:
            while file.tell() < max_bytes and 0 < len(line := file.readline(LONGEST_LINE)) < LONGEST_LINE:
                lines.append(line)
    except OSError:
        pass
    return objects(lines)


def last_objects(path: Path, max_bytes: int = _BYTES, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """As ``first_objects``, of the last lines. ``kinds``: only lines of these kinds, and the very last line."""
    try:
        begin = max(0, path.stat().st_size - max_bytes)
    except OSError:
        return []
    data = _read(path, begin, max_bytes)
    lines = (data if begin == 0 else data[data.find(b"\n") + 1 :]).splitlines()
    if kinds is not None:
        marks = [f'"kind": "{kind}"'.encode() for kind in kinds]  # parsing all lines would take long
        lines = [line for line in lines[:-1] if any(mark in line for mark in marks)] + lines[-1:]
    return objects(lines)


def first_events(run_dir: Path, max_bytes: int) -> list[dict[str, Any]]:
    """The first lines of events.jsonl: as ``first_objects``, without those that are damaged."""
    return list(filter(is_event, first_objects(run_dir / "events.jsonl", max_bytes)))


def last_events(run_dir: Path, max_bytes: int, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The last lines of events.jsonl: as ``last_objects``, without those that are damaged."""
    return list(filter(is_event, last_objects(run_dir / "events.jsonl", max_bytes, kinds)))


def _read(path: Path, begin: int, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(begin, os.SEEK_SET)
            return file.read(max_bytes)
    except OSError:
        return b""
