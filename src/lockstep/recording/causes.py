"""Why a worker takes longer than the others: its loader, its computation, its link, a stop, or something else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.recording.step_rows import StepRow

LOADER = "loader"
"""It waits for its data, or loads it."""
COMPUTE = "compute"
"""Forward, backward, the optimizer, or the rest of the loop body takes longer."""
LINK = "link"
"""Its data needs long to other machines."""
STOP = "stop"
"""Its process is stopped by SIGSTOP, or waits for memory that was swapped out."""
LANES = "lanes"
"""It has more lanes than others."""
OTHER = "other"
"""It is ready to run and gets no core."""
CAUSES = (LOADER, COMPUTE, LINK, STOP, LANES, OTHER)

_MOST = 0.5
"""This part of an excess explains it."""
_MIN_STOPPED = 0.25
"""A worker that is stopped while it waits for others is not later for that: stops explain an excess if they last a part of it."""


@dataclass(frozen=True)
class Stop:
    """A worker was stopped by SIGSTOP. ``at``: when it continued. ``seconds`` is 0 if the stop was too short to be seen."""

    worker: int
    at: float
    seconds: float
    times: int = 1
    """How many stops this is, if they were counted together."""


def cause_of(rows: Sequence[StepRow], rank: int, stops: Sequence[Stop] = ()) -> tuple[str, str]:
    """Return the cause of the excess work of ``rank``, and what people should know besides it."""
    own, data, cpu, queue = _differences(rows, rank)
    stopped = _stops_in(rows, rank, stops)
    times, stopped_s = sum(each.times for each in stopped), sum(each.seconds for each in stopped)
    excess_s = max(own, 1e-9) * len(rows)
    if stopped_s >= _MIN_STOPPED * excess_s or (times and times >= _MOST * _late_steps(rows, rank)):
        return STOP, f"it was stopped {times} time{'' if times == 1 else 's'} in {len(rows)} steps (SIGSTOP)"
    faults = sum(row.ranks[rank].page_faults for row in rows) - max(_sum_of(rows, other) for other in _others(rows, rank))
    if faults >= max(3, len(rows) // 10) and own - cpu - queue >= _MOST * own:
        return STOP, f"its memory is on a disk: it waited for {faults} pages in {len(rows)} steps"
    if queue >= _MOST * own and cpu < (1 - _MOST) * own:
        return OTHER, "other processes use its core"
    meanwhile = (
        "it computes meanwhile" if cpu >= _MOST * own else "it waits meanwhile, for example for a disk, a lock, a GPU or a timer"
    )
    return (LOADER if data >= _MOST * own else COMPUTE), meanwhile


def _differences(rows: Sequence[StepRow], rank: int) -> tuple[float, float, float, float]:
    """Own work, data, CPU time and time without a core: of this rank, beyond the mean of the others. In seconds per step."""
    own = data = cpu = queue = 0.0
    for row in rows:
        mine = row.ranks[rank]
        others = [each for other, each in enumerate(row.ranks) if other != rank]
        scales = [mine.lanes / each.lanes if each.lanes else 1.0 for each in others]
        own += mine.own - sum(each.own_with(mine.lanes) for each in others) / len(others)
        data += mine.data - sum(each.data * scale for each, scale in zip(others, scales)) / len(others)
        cpu += mine.cpu - sum(each.cpu * scale for each, scale in zip(others, scales)) / len(others)
        queue += mine.queue - sum(each.queue * scale for each, scale in zip(others, scales)) / len(others)
    return own / len(rows), data / len(rows), cpu / len(rows), queue / len(rows)


def _stops_in(rows: Sequence[StepRow], rank: int, stops: Sequence[Stop]) -> list[Stop]:
    first, last = rows[0].ranks[rank], rows[-1].ranks[rank]
    return [each for each in stops if each.worker == first.worker and first.at <= each.at <= last.at + last.seconds + 1.0]


def _late_steps(rows: Sequence[StepRow], rank: int) -> int:
    return sum(row.ranks[rank].own >= max(each.own for each in row.ranks) for row in rows)


def _sum_of(rows: Sequence[StepRow], rank: int) -> int:
    return sum(row.ranks[rank].page_faults for row in rows)


def _others(rows: Sequence[StepRow], rank: int) -> list[int]:
    return [other for other in range(len(rows[0].ranks)) if other != rank]
