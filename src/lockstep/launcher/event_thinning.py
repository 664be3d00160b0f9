"""EventThinning: keeps events.jsonl small in a run of weeks, in which some lines come again and again without any fault. Pure.

A fault, a decision that changes the workers, the begin and the end of a run are written at once and never left out. The other lines
are thinned for each kind alone, as ``Spacing`` says. A line that comes too early waits until it is time, or until a newer one of
its kind takes its place: so the newest is known in the end, and says in ``left_out`` how many lines are missing before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

_KINDS = frozenset({"saved", "verdict", "unknown packet", "refused", "let go"})
"""Each checkpoint, each few seconds, each message, each connection may make such a line."""
_EVENTS = frozenset({"StageEntered", "AloneBegan", "AloneEnded", "JoinRequested", "RankRead"})
"""The same for lines of the kind "event": each loop of the script or each checkpoint makes some."""
_WITHOUT_CHANGE = frozenset({"Report", "SkipLoop", "PostponeTimeouts"})
"""Actions after which the run has the same workers as before."""
_LONGEST_S = 256.0
_IN_FULL = 1000
"""How many lines of a kind are written before the first is left out."""


class Spacing:
    """How many seconds must pass between two lines of one kind: 0 before the first 1000, then 1; twice as many after each 1000, up
    to 256. So a run of a year writes at most about 130,000 lines of a kind.
    """

    def __init__(self) -> None:
        self._lines = 0

    def count(self, lines: int = 1) -> None:
        """Note that ``lines`` more lines were written."""
        self._lines += lines

    @property
    def seconds(self) -> float:
        return 0.0 if self._lines < _IN_FULL else min(_LONGEST_S, 2.0 ** (self._lines // _IN_FULL - 1))


@dataclass
class _Row:
    """The lines of one kind. ``waiting``: the newest, if it is not written yet."""

    spacing: Spacing = field(default_factory=Spacing)
    next_at: float = float("-inf")
    waiting: Line | None = None
    left_out: int = 0


class EventThinning:
    """Give it each line (``add``), and write what it returns. ``now`` is by any clock that does not go back."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def add(self, line: Line, now: float) -> list[Line]:
        """Returns what to write now: lines that have waited, and ``line``, unless it has to wait."""
        name = _name(line)
        if not name:
            return [*(self.rest() if line.get("kind") == "end" else self.due(now)), line]
        row = self._rows.setdefault(name, _Row())
        row.left_out += row.waiting is not None
        row.waiting = line
        return self.due(now)

    def due(self, now: float) -> list[Line]:
        """Returns the lines that have waited long enough."""
        return _in_order(self._take(row, now) for row in self._rows.values() if row.waiting is not None and now >= row.next_at)

    def rest(self) -> list[Line]:
        """Returns all lines that wait: the run is over."""
        return _in_order(self._take(row, float("-inf")) for row in self._rows.values() if row.waiting is not None)

    def _take(self, row: _Row, now: float) -> Line:
        assert row.waiting is not None
        found = {**row.waiting, "left_out": row.left_out} if row.left_out else row.waiting
        row.spacing.count()
        row.waiting, row.left_out, row.next_at = None, 0, now + row.spacing.seconds
        return found


def _in_order(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line["time"])


def _name(line: Line) -> str:
    """The kind of lines that this one is thinned with; empty if it is always written."""
    if line.get("kind") in _KINDS:
        return str(line["kind"])
    if line.get("kind") != "event":
        return ""
    event = next(iter(line["event"]), "")
    is_routine = event in _EVENTS and all(name in _WITHOUT_CHANGE for action in line["actions"] for name in action)
    return f"event {event}" if is_routine else ""
