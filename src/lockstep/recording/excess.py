"""How much longer one worker takes than the others, what that costs, and whether it is more than noise. Pure.

In every step the work of a worker is compared with the work of the others in the same step, so no common clock is needed, and
what slows all workers down is no difference.

Note: the price
---------------
A step takes as long as the work of its slowest worker, and some more. The price of a worker is how much shorter the steps would be
if this worker were as fast as the others. It would then have the noise of the others: its times in the window, sorted, are
replaced by those of the others at the same places of their distribution. If it is as fast as the others already, nothing changes,
and the price is 0 whatever the noise. If it were simply left out, the price of any worker would be some percent, because the
slowest of three workers that differ by chance is faster than the slowest of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from lockstep.recording.step_rows import StepRow

_LEVEL_STEPS = 2
"""What is usual at a step is the median over this many steps before it and after it."""
_NOISE_STEPS = 5
_MAX_ALIKE = 0.8


@dataclass(frozen=True)
class Excess:
    """One rank over a window. ``z``: how certain it is that the rank is slower, in standard errors of its mean difference.

    ``share``: the part of steps in which it was last; ``behind_s``: by how much, in the mean of these steps. ``saved_s``: how much
    shorter a step would be without its excess; ``speedup``: how much faster the run would be.
    """

    z: float
    share: float
    behind_s: float
    saved_s: float
    speedup: float


def slowest_rank(rows: Sequence[StepRow]) -> int:
    """The rank with the most work of its own over the window."""
    totals = [0.0] * len(rows[0].ranks)
    for row in rows:
        for rank, each in enumerate(row.ranks):
            totals[rank] += each.per_lane + each.fixed
    return max(range(len(totals)), key=totals.__getitem__)


def excess_of(rows: Sequence[StepRow], rank: int, *, block: int = 1, before: Sequence[StepRow] = ()) -> Excess:
    """How much slower ``rank`` is than others with as many lanes.

    Args:
        rows: The window.
        rank: The rank that is judged.
        block: Differences are averaged over so many steps first (``certainty``).
        before: The steps before the window, which tell how large the noise is.
    """
    mine = [row.ranks[rank].own for row in rows]
    lanes = rows[0].ranks[rank].lanes
    others = [[each.own_with(lanes) for other, each in enumerate(row.ranks) if other != rank] for row in rows]
    means = [sum(each) / len(each) for each in others]
    level = [max(1e-9, median(means[max(0, i - _LEVEL_STEPS) : i + _LEVEL_STEPS + 1])) for i in range(len(rows))]
    pooled = sorted(value / usual for values, usual in zip(others, level) for value in values)
    order = sorted(range(len(rows)), key=lambda i: mine[i] / level[i])
    saved = 0.0
    for place, i in enumerate(order):
        usual_s = pooled[min(len(pooled) - 1, int((place + 0.5) / len(order) * len(pooled)))] * level[i]
        slowest = _slowest_other(rows[i], rank)
        saved += max(mine[i], slowest) - max(usual_s, slowest)
    saved_s = saved / len(rows)
    earlier = [_difference(row, rank) for row in before]
    z = certainty([_difference(row, rank) for row in rows], block, earlier)
    share, behind_s = _last(rows, rank)
    return Excess(z, share, behind_s, saved_s, speedup(rows, saved_s))


def begin_of(rows: Sequence[StepRow], rank: int) -> int:
    """Return at which place of a window the delay of ``rank`` began: where the differences change most from low to high."""
    differences = [_difference(row, rank) for row in rows]
    half = median(differences[-5:]) / 2
    lowest = total = 0.0
    place = 0
    for number, each in enumerate(differences):
        total += each - half
        if total < lowest:
            lowest, place = total, number + 1
    return min(place, len(rows) - 1)


def most_speedup(rows: Sequence[StepRow], rank: int) -> float:
    """What the run could gain at most if ``rank`` were faster: then its steps would wait for the slowest of the others."""
    share, behind_s = _last(rows, rank)
    return speedup(rows, share * behind_s)


def _difference(row: StepRow, rank: int) -> float:
    """The work of ``rank`` against the mean of the others with as many lanes: 0.05 is 5% more."""
    lanes = row.ranks[rank].lanes
    usual = sum(each.own_with(lanes) for other, each in enumerate(row.ranks) if other != rank) / (len(row.ranks) - 1)
    return row.ranks[rank].own / max(usual, 1e-9) - 1


def excess_by_lanes(rows: Sequence[StepRow], rank: int) -> Excess:
    """What it costs that ``rank`` has more lanes than others, compared with lanes that are equal on all workers."""
    size = len(rows[0].ranks)
    mean_lanes = sum(each.lanes for each in rows[0].ranks) / size
    saved, differences = 0.0, []
    for row in rows:
        now = max(each.own for each in row.ranks)
        equal = max(each.per_lane * mean_lanes / each.lanes + each.fixed if each.lanes else each.own for each in row.ranks)
        saved += now - equal
        differences.append(row.ranks[rank].own / max(1e-9, _slowest_other(row, rank)) - 1)
    share, behind_s = _last(rows, rank)
    saved_s = saved / len(rows)
    return Excess(certainty(differences, 1), share, behind_s, saved_s, speedup(rows, saved_s))


def speedup(rows: Sequence[StepRow], saved_s: float) -> float:
    """0.11: the run would be 11% faster if a step were ``saved_s`` shorter."""
    now_s = sum(row.seconds for row in rows) / len(rows)
    return now_s / max(now_s - saved_s, now_s / 100, 1e-9) - 1 if now_s > 0 else 0.0


def certainty(differences: Sequence[float], block: int = 1, before: Sequence[float] = (), part: float = 0.1) -> float:
    """Return the mean of the differences in units of its standard error. 0 if there are too few.

    With ``block`` > 1 they are means over so many steps. Otherwise outliers are no evidence: the greatest and the least tenth
    (``part``) are left out of the mean (Yuen's trimmed mean).

    The noise is measured by how much differences change within 5 steps, in the window and before it, because a delay that begins
    in these steps is no noise. Noise that lasts for some steps is less evidence: it is measured by how much less they change from
    one step to the next.
    """
    if block > 1:
        starts = range(0, len(differences) - block + 1, block)
        differences, before = [sum(differences[start : start + block]) / block for start in starts], ()
    count = len(differences)
    cut = int(part * count) if block == 1 else 0
    if count < 4:
        return 0.0
    kept = sorted(differences)[cut : count - cut]
    mean = sum(kept) / len(kept)
    lag = _NOISE_STEPS if count + len(before) >= 3 * _NOISE_STEPS else 1
    values = [*_limited(before, part), *_limited(differences, part)]
    variance = _change(values, lag)
    if variance <= 0:
        return 0.0 if mean == 0 else 99.0 if mean > 0 else -99.0
    alike = min(_MAX_ALIKE, max(0.0, 1 - _change(values, 1) / variance))
    return mean / (sqrt(variance / count * (1 + alike) / (1 - alike)) / (1 - 2 * cut / count))


def _limited(values: Sequence[float], part: float) -> list[float]:
    """The greatest and the least values become the next ones."""
    if not values:
        return []
    cut, ordered = int(part * len(values)), sorted(values)
    low, high = ordered[cut], ordered[-1 - cut]
    return [min(max(value, low), high) for value in values]


def _change(values: Sequence[float], lag: int) -> float:
    """Half the mean squared change within ``lag`` values: the variance of values that do not depend on each other."""
    return sum((b - a) ** 2 for a, b in zip(values, values[lag:])) / (2 * max(1, len(values) - lag))


def _slowest_other(row: StepRow, rank: int) -> float:
    return max(each.per_lane + each.fixed for other, each in enumerate(row.ranks) if other != rank)


def _last(rows: Sequence[StepRow], rank: int) -> tuple[float, float]:
    behind = [row.ranks[rank].own - _slowest_other(row, rank) for row in rows]
    last = [seconds for seconds in behind if seconds > 0]
    return len(last) / len(rows), sum(last) / len(last) if last else 0.0
