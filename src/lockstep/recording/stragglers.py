"""Stragglers: which worker the others wait for, why, and how much faster the run would be without that. Pure.

Workers wait for each other in every step, so all of them end it together, and how long each worked says who was last: no common
clock is needed. How a difference is measured and priced: excess.py. How its cause is found: causes.py.

A slow link is no work of a worker, and is looked for if no worker is slow: slow_link.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from lockstep.recording.causes import COMPUTE, LANES, LINK, LOADER, OTHER, STOP, Stop, cause_of
from lockstep.recording.excess import Excess, begin_of, excess_by_lanes, excess_of, most_speedup, slowest_rank
from lockstep.recording.records import StepRecord
from lockstep.recording.slow_link import link_excess, slowest_link, usual_transport
from lockstep.recording.step_rows import RowBuilder, StepRow, rows_of
from lockstep.recording.text import rank_text


@dataclass(frozen=True)
class Straggler:
    """One worker is slower than the others for a while."""

    rank: int
    worker: int
    cause: str
    """One of causes.CAUSES."""
    share: float
    """The part of steps in which it was last."""
    behind_s: float
    """By how much it was last, in the mean of these steps."""
    speedup: float
    """0.11: the run would be 11% faster if this worker were as fast as the slowest of the others."""
    steps: int
    """How many steps were looked at."""
    detail: str = ""
    """What else is known of the cause."""

    def sentence(self) -> str:
        """ "rank 2 is last in 94% of steps, by 31 ms: its loader; the run would be 11% faster without it".

        The worker has its number there too if that is not its rank, as in logs: "rank 2 (worker 5) is last".
        """
        words = {LOADER: "its loader", COMPUTE: "its computation", LINK: "its link to other machines", STOP: self.detail}
        behind = f"{self.behind_s * 1e3:.0f} ms" if self.behind_s >= 0.00095 else f"{self.behind_s * 1e3:.1g} ms"
        without = "with as many lanes on every worker" if self.cause == LANES else "without it"
        cause = words.get(self.cause) or self.detail or "the cause is not known"
        faster = f"the run would be {self.speedup * 100:.0f}% faster {without}"
        return f"{rank_text(self.rank, self.worker)} is last in {self.share * 100:.0f}% of steps, by {behind}: {cause}; {faster}"


class _Evidence(NamedTuple):
    """What a window must show. ``z``: standard errors; ``block``: see excess_of."""

    z: float
    speedup: float
    block: int = 1


_FEW, _SHORT, _MORE, _LONG = 10, 20, 40, 128
"""Windows: a great delay shows in 10 steps, one of 5% of a step in 20. Delays of some steps alone need more."""
_LONG_AT_LEAST = 64
_BEGINS = {
    _FEW: _Evidence(6.0, 0.03),
    _SHORT: _Evidence(3.5, 0.02),
    _MORE: _Evidence(4.0, 0.02),
    _LONG: _Evidence(5.0, 0.02, block=8),
}
_STAYS = {window: _Evidence(1.5, 0.01, needed.block) for window, needed in _BEGINS.items()}
_LEAST = 5
"""The numbers of a verdict are from so many steps at least."""
_SAME_CAUSE = 3
"""A verdict changes its cause if so many looks in a row say so."""
_MAX_STOPS = 512


def diagnose(records: Sequence[StepRecord], stops: Iterable[Stop] = ()) -> Straggler | None:
    """Judge a window of steps of one generation: 10 or more. Returns None if no worker is slower, or if it may be chance."""
    rows = rows_of(records)
    if len(rows) < _FEW:
        return None
    window = _FEW if len(rows) < _SHORT else _SHORT if len(rows) < _LONG_AT_LEAST else _LONG
    plain = _judge(rows, _BEGINS[window]._replace(block=1), list(stops))
    return plain or (_judge(rows, _BEGINS[_LONG], list(stops)) if window == _LONG else None)


class StragglerWatch:
    """Keeps the last steps of a run, and says whose fault it is that they take so long. ``add`` is cheap, ``verdict`` less so."""

    def __init__(self) -> None:
        self._builder = RowBuilder()
        self._rows: deque[StepRow] = deque(maxlen=_LONG)
        self._stops: deque[Stop] = deque(maxlen=_MAX_STOPS)
        self._verdict: Straggler | None = None
        self._window = 0  # in which the verdict was found
        self._since = 0  # the steps that have shown it
        self._new = 0
        self._other_cause = 0
        self._usual_s: float | None = None  # the transport before the verdict

    def add(self, record: StepRecord) -> None:
        """A record has arrived. Records of a new generation end the verdict."""
        row = self._builder.add(record)
        if self._rows and self._builder.generation != self._rows[-1].generation:
            self._forget()
        if row is not None:
            self._rows.append(row)
            self._new += 1
            self._since += 1

    def add_stop(self, stop: Stop) -> None:
        """A worker was stopped, and has continued."""
        self._stops.append(stop)

    @property
    def has_new_steps(self) -> bool:
        """Whether a step was completed since the last look."""
        return self._new > 0

    def verdict(self) -> Straggler | None:
        """Return what holds now. It stays the same, but for its numbers, until there is evidence of something else."""
        if self._new:
            self._new = 0
            self._look()
        return self._verdict

    def _look(self) -> None:
        rows, stops = list(self._rows), list(self._stops)
        if not rows or len(rows[-1].ranks) < 2:
            return
        found, window = self._begins(rows, stops)
        if self._verdict is None:
            if found is not None:
                self._begin(found, window, rows)
            return
        if found is not None and found.rank != self._verdict.rank:
            self._begin(found, window, rows)
            return
        rank, cause = self._verdict.rank, self._verdict.cause
        still = _judge(rows[-self._window :], _STAYS[self._window], stops, rank, cause, usual_s=self._usual_s)
        if still is None:
            self._forget()
            return
        self._keep(still, rows, stops)

    def _begin(self, found: Straggler, window: int, rows: list[StepRow]) -> None:
        """The numbers are those of the steps since the delay began, which may be in the middle of the window."""
        self._verdict, self._window, self._other_cause = found, window, 0
        self._usual_s = usual_transport(rows[:-window])
        self._since = window
        if window != _LONG and found.cause not in (LINK, LANES):
            self._since = max(_LEAST, window - begin_of(rows[-window:], found.rank))
        elif found.cause == LINK:
            self._since = window // 2
        self._verdict = self._numbers(found, rows) or found

    def _keep(self, still: Straggler, rows: list[StepRow], stops: list[Stop]) -> None:
        """The verdict holds: take its numbers from all steps since it was found."""
        assert self._verdict is not None
        self._other_cause = self._other_cause + 1 if still.cause != self._verdict.cause else 0
        if self._other_cause >= _SAME_CAUSE:
            self._verdict, self._since, self._other_cause = still, self._window, 0
            return
        numbers = self._numbers(self._verdict, rows) or still
        detail = still.detail if still.cause == self._verdict.cause else self._verdict.detail
        self._verdict = replace(numbers, cause=self._verdict.cause, detail=detail)

    def _numbers(self, verdict: Straggler, rows: list[StepRow]) -> Straggler | None:
        needed = _Evidence(0.0, 0.0, _STAYS[self._window].block)
        found = _judge(rows[-self._since :], needed, [], verdict.rank, verdict.cause, usual_s=self._usual_s)
        return None if found is None else replace(found, cause=verdict.cause, detail=verdict.detail)

    # Other processes come and go: they make a verdict only if they stay for 40 steps.
    def _begins(self, rows: list[StepRow], stops: list[Stop]) -> tuple[Straggler | None, int]:
        for window in (_FEW, _SHORT, _MORE):
            if len(rows) >= window:
                found = _judge(rows[-window:], _BEGINS[window], stops, before=rows[:-window])
                if found is not None and (found.cause != OTHER or window >= _MORE):
                    return found, window
        if len(rows) >= _LONG_AT_LEAST and self._verdict is None:
            found, half = _judge(rows, _BEGINS[_LONG], stops), len(rows) // 2
            halves = (rows[:half], rows[half:])
            if found is not None and all(_saves(part, found, _BEGINS[_LONG].speedup / 2) for part in halves):
                return found, _LONG
        return None, 0

    def _forget(self) -> None:
        self._verdict, self._window, self._since, self._other_cause = None, 0, 0, 0
        newest = self._rows[-1] if self._rows and self._rows[-1].generation == self._builder.generation else None
        self._rows.clear()
        if newest is not None:
            self._rows.append(newest)


def _saves(rows: Sequence[StepRow], verdict: Straggler, at_least: float) -> bool:
    """Whether a part of a window shows the same: something that was once is no straggler."""
    if verdict.cause == LANES:
        return True
    excess = link_excess(rows, verdict.rank) if verdict.cause == LINK else excess_of(rows, verdict.rank)
    return excess is not None and excess.speedup >= at_least


def _judge(
    rows: Sequence[StepRow],
    needed: _Evidence,
    stops: list[Stop],
    rank: int | None = None,
    cause: str | None = None,
    before: Sequence[StepRow] = (),
    usual_s: float | None = None,
) -> Straggler | None:
    """The verdict over these steps, about ``rank`` or, if it is None, about the worker to which the steps point."""
    if len(rows) < 4 or len(rows[0].ranks) < 2:
        return None
    found = None if cause == LINK else _own_work(rows, needed, stops, slowest_rank(rows) if rank is None else rank, before)
    if found is not None or (cause is not None and cause != LINK) or needed.block > 1:
        return found  # a link is not slow in every tenth step alone
    if not any(each.link for row in rows for each in row.ranks):
        return None  # one machine
    slow = slowest_link(rows) if rank is None else rank
    link = link_excess(rows, slow, usual_transport(before) if usual_s is None else usual_s)
    if link is None or link.z < needed.z or link.speedup < needed.speedup:
        return None
    return _verdict(rows, slow, LINK, "its data needs long to other machines", link)


def _own_work(
    rows: Sequence[StepRow], needed: _Evidence, stops: list[Stop], rank: int, before: Sequence[StepRow]
) -> Straggler | None:
    if most_speedup(rows, rank) >= needed.speedup:  # else it need not be measured
        excess = excess_of(rows, rank, block=needed.block, before=before)
        if excess.z >= needed.z and excess.speedup >= needed.speedup and not _is_hidden(rows, rank, excess):
            return _verdict(rows, rank, *cause_of(rows, rank, stops), excess)
    lanes = [each.lanes for each in rows[0].ranks]
    if lanes[rank] == max(lanes) and lanes.count(lanes[rank]) == 1:
        excess = excess_by_lanes(rows, rank)
        if excess.z >= needed.z and excess.speedup >= needed.speedup:
            others = sorted({each for other, each in enumerate(lanes) if other != rank})
            detail = f"it has {lanes[rank]} lanes, the others have {' or '.join(map(str, others))}"
            return _verdict(rows, rank, LANES, detail, excess)
    return None


def _is_hidden(rows: Sequence[StepRow], rank: int, excess: Excess) -> bool:
    """Whether the excess costs nothing because the worker then waits longer than that for its GPU, which Python runs ahead of."""
    mine = [row.ranks[rank] for row in rows]
    return mine[-1].on_gpu and median(each.transport for each in mine) > excess.saved_s


def _verdict(rows: Sequence[StepRow], rank: int, cause: str, detail: str, excess: Excess) -> Straggler:
    worker = rows[-1].ranks[rank].worker
    return Straggler(rank, worker, cause, excess.share, excess.behind_s, excess.speedup, len(rows), detail)
