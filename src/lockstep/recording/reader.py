"""RecordingReader: reads the files of a run folder, once or again and again while the run continues. Changes nothing there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import UsageError
from lockstep.recording.event_lines import is_event, is_time
from lockstep.recording.json_lines import JsonLinesTail, object_of
from lockstep.recording.records import Metrics, StepRecord, parse

_CHUNK_BYTES = 1 << 18
_Place = tuple[float, Path, int, int]
"""Where a line is: (its time, file, position, length)."""
_SEEN = 50_000
"""A record comes again soon, if at all: after so many others it is forgotten."""


@dataclass
class NewRecords:
    """What ``poll`` has found since it was called before. ``events`` are the lines of ``events.jsonl`` that are not damaged."""

    steps: list[StepRecord] = field(default_factory=list)
    """Steps and pauses, by the time at which they began. The next call may return some that began earlier, of other workers."""
    metrics: list[Metrics] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    more: bool = False
    """Whether there is more to read now: ``poll`` was called with ``max_bytes``."""


class RecordingReader:
    """The recording of the run in ``run_dir``.

    Raises:
        UsageError: There is no run in that folder.
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / "events.jsonl").exists():
            raise UsageError(
                f"there is no run in {run_dir}: it has no events.jsonl. Name the folder of a run; `lockstep ls` lists them."
            )
        self.run_dir = run_dir
        self._tails: dict[Path, JsonLinesTail] = {}
        self._events = run_dir / "events.jsonl"
        self._seen: set[int] = set()  # hashes: there may be several 100,000
        self._seen_before: set[int] = set()

    def poll(self, max_bytes: int | None = None) -> NewRecords:
        """Return what is new. The first call returns all that is there.

        ``max_bytes``: read about this much of each file, so that a long recording is not in memory at once. If there is ``more``,
        call again.
        """
        events, lines, more = self._poll(max_bytes)
        found = NewRecords(events=events, more=more)
        for record in filter(None, map(parse, lines)):
            (found.steps if isinstance(record, StepRecord) else found.metrics).append(record)  # type: ignore[arg-type]
        found.steps.sort(key=lambda record: (record.at, record.worker))
        found.metrics.sort(key=lambda record: record.step)
        return found

    def poll_lines(self, keep: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        """As ``poll``, as plain data, with lines of any kind, in the order of time. Call one of the two, not both.

        ``keep``: whether to return this line. It is called for all lines, in the order of the files, before this method returns.

        No file is in the order of time: a record has the time at which its step began, and is written when the step is over, with
        those of the same second of that worker. So the files cannot be merged while they are read. This keeps the time and the
        position of each line in memory, sorts those, and reads each line again when it is its turn.
        """
        places: list[_Place] = []
        for path in (self._events, *self._recordings()):
            for position, data in self._new_lines(path):
                line = object_of(data)
                if line is not None and self._is_line(line, path) and keep(line):
                    places.append((line["time" if path == self._events else "at"], path, position, len(data)))
        self._forget_old()
        return _read_again(sorted(places, key=lambda place: place[0]))

    def _new_lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        tail = self._tail(path)
        yield from tail.lines(_CHUNK_BYTES)
        while tail.has_more:
            yield from tail.lines(_CHUNK_BYTES)

    def _is_line(self, line: dict[str, Any], path: Path) -> bool:
        return is_event(line) if path == self._events else is_time(line.get("at")) and self._is_new(line)

    def _poll(self, max_bytes: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        """New lines of events.jsonl, new lines of the recording, and whether there are more."""
        events = list(filter(is_event, self._tail(self._events).read(max_bytes)))
        lines, more = list[dict[str, Any]](), self._tail(self._events).has_more
        for path in self._recordings():
            lines += filter(self._is_new, self._tail(path).read(max_bytes))
            more = more or self._tail(path).has_more
        if not more:
            self._forget_old()
        return events, lines, more

    def _recordings(self) -> list[Path]:
        """The files that there are now. Forgets those that are gone."""
        paths = sorted((self.run_dir / "recording").glob("every-*.jsonl"), key=_oldest_first)
        for gone in self._tails.keys() - {*paths, self._events}:
            del self._tails[gone]
        return paths

    def _tail(self, path: Path) -> JsonLinesTail:
        return self._tails.setdefault(path, JsonLinesTail(path))

    def _is_new(self, line: dict[str, Any]) -> bool:
        """A record is in several files, and after the death of rank 0 its successor may report the metrics of a step again."""
        names = ("kind", "step") if line.get("kind") == "metrics" else ("kind", "worker", "at")
        key = hash(tuple(str(line.get(name)) for name in names))
        if key in self._seen or key in self._seen_before:
            return False
        self._seen.add(key)
        return True

    def _forget_old(self) -> None:
        if len(self._seen) > _SEEN:
            self._seen_before, self._seen = self._seen, set()


def _read_again(places: Sequence[_Place]) -> Iterator[dict[str, Any]]:
    """The lines at these places, without those of files that the run has removed meanwhile."""
    with ExitStack() as opened:
        files: dict[Path, BinaryIO] = {}
        for path in dict.fromkeys(path for _, path, _, _ in places):
            with suppress(OSError):
                files[path] = opened.enter_context(open(path, "rb"))
        for _, path, position, length in places:
            line = object_of(os.pread(files[path].fileno(), length, position)) if path in files else None
            if line is not None:
                yield line


def _oldest_first(path: Path) -> tuple[int, str]:
    """Thin rows first: they reach back farthest."""
    stride = path.name.split("-")[1]
    return (-int(stride) if stride.isdecimal() else 0, path.name)
