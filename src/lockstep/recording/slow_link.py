"""Whether the link of one worker makes the exchange of gradients longer, and what that costs. Pure.

A slow link is no work of a worker. It shows in two numbers: how long even the last worker of a step waits for the gradients, which
is the transport alone, and how long the data of each worker was on its way (comm/connections.py).

The second number is an estimate of the kernel, and has outliers. So only the middle half of the steps counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lockstep.recording.excess import Excess, certainty, speedup
from lockstep.recording.step_rows import StepRow

_RATIO = 2.0
"""The data of one worker must be on its way this many times as long as the data of any other worker."""
_RATIO_WITHOUT_HISTORY = 4.0
"""The same, if it is not known how long the transport takes otherwise."""
_HISTORY = 20
_WHOSE = 1.75
"""That the transport takes longer must be certain. Whose link it is may be less certain by this factor: the ratio counts too."""
_MOST = 1.5
"""The kernel's estimate is too small by up to this factor: a link lets the first bytes of a burst pass faster."""
_ENDS = 0.25
"""The part of the steps at each end that does not count."""


def slowest_link(rows: Sequence[StepRow]) -> int:
    """The rank whose data was longest on its way."""
    means = [_mean_link(rows, rank) for rank in range(len(rows[0].ranks))]
    return max(range(len(means)), key=means.__getitem__)


def link_excess(rows: Sequence[StepRow], rank: int, usual_s: float | None = None) -> Excess | None:
    """What the link of ``rank`` costs; None if it is no slower than others.

    Without the excess of the link, the transport would be as long as usual. It would not be shorter by much more than the excess.

    Args:
        rows: The window.
        rank: The rank that is judged.
        usual_s: How long the transport takes otherwise (``usual_transport``); None if that is not known. Then the transport is
            taken to be in proportion to the time that data is on its way.
    """
    count = len(rows)
    mine, other = _waits(rows, rank)
    if mine <= 0 or mine < (_RATIO if usual_s is not None else _RATIO_WITHOUT_HISTORY) * other:
        return None
    transport = median(map(_transport, rows))
    longer = [_transport(row) - (usual_s or 0.0) for row in rows]
    usual_s = transport * other / mine if usual_s is None else usual_s
    saved_s = max(0.0, min(transport - usual_s, _MOST * (mine - other)))
    ahead = [row.ranks[rank].link - max(each.link for r, each in enumerate(row.ranks) if r != rank) for row in rows]
    share = sum(each > 0 for each in ahead) / count
    z = min(certainty(longer, part=_ENDS), _WHOSE * certainty(ahead, part=_ENDS))
    return Excess(z, share, saved_s, saved_s, speedup(rows, saved_s))


def usual_transport(before: Sequence[StepRow]) -> float | None:
    """How long the transport takes in these steps; None if they are too few."""
    return median(map(_transport, before)) if len(before) >= _HISTORY else None


def _transport(row: StepRow) -> float:
    return min(each.transport for each in row.ranks)


def _waits(rows: Sequence[StepRow], rank: int) -> tuple[float, float]:
    """How long in a step the data of ``rank`` is on its way, and that of the slowest other rank."""
    others = [each for each in range(len(rows[0].ranks)) if each != rank]
    return _mean_link(rows, rank), max(_mean_link(rows, each) for each in others)


def _mean_link(rows: Sequence[StepRow], rank: int) -> float:
    waits = sorted(row.ranks[rank].link for row in rows)
    cut = int(_ENDS * len(waits))
    middle = waits[cut : len(waits) - cut]
    return sum(middle) / len(middle)
