"""RecordingReader: reads the files of a run folder, once or again and again while the run continues. Changes nothing there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.recording.event_lines import is_event
from lockstep.recording.json_lines import JsonLinesTail
from lockstep.recording.records import Metrics, StepRecord, parse

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
        self._seen: set[tuple[Any, ...]] = set()
        self._seen_before: set[tuple[Any, ...]] = set()

    def poll(self, max_bytes: int | None = None) -> NewRecords:
        """Return what is new. The first call returns all that is there.

        ``max_bytes``: read at most this much of each file, so that a long recording is not in memory at once. If there is ``more``,
        call again.
        """
        events, lines, more = self._poll(max_bytes)
        found = NewRecords(events=events, more=more)
        for record in filter(None, map(parse, lines)):
            (found.steps if isinstance(record, StepRecord) else found.metrics).append(record)  # type: ignore[arg-type]
        found.steps.sort(key=lambda record: (record.at, record.worker))
        found.metrics.sort(key=lambda record: record.step)
        return found

    def poll_lines(self) -> list[dict[str, Any]]:
        """As ``poll``, as plain data and with lines of any kind. Call one of the two, not both."""
        events, lines, _ = self._poll(None)
        return events + lines

    def _poll(self, max_bytes: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        """New lines of events.jsonl, new lines of the recording, and whether there are more."""
        events = list(filter(is_event, self._tail(self.run_dir / "events.jsonl").read()))
        lines, more = list[dict[str, Any]](), False
        paths = sorted((self.run_dir / "recording").glob("every-*.jsonl"), key=_oldest_first)
        for gone in self._tails.keys() - {*paths, self.run_dir / "events.jsonl"}:
            del self._tails[gone]
        for path in paths:
            lines += filter(self._is_new, self._tail(path).read(max_bytes))
            more = more or self._tail(path).has_more
        if not more and len(self._seen) > _SEEN:
            self._seen_before, self._seen = self._seen, set()
        return events, lines, more

    def _tail(self, path: Path) -> JsonLinesTail:
        return self._tails.setdefault(path, JsonLinesTail(path))

    def _is_new(self, line: dict[str, Any]) -> bool:
        """A record is in several files, and after the death of rank 0 its successor may report the metrics of a step again."""
        names = ("kind", "step") if line.get("kind") == "metrics" else ("kind", "worker", "at")
        key = tuple(str(line.get(name)) for name in names)
        if key in self._seen or key in self._seen_before:
            return False
        self._seen.add(key)
        return True


def _oldest_first(path: Path) -> tuple[int, str]:
    """Thin rows first: they reach back farthest."""
    stride = path.name.split("-")[1]
    return (-int(stride) if stride.isdecimal() else 0, path.name)
