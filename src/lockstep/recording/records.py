"""The records of a run: how each step passed on each worker, and what was logged. The format of the files in ``RUN_DIR/recording``.

Every line of those files is one JSON object with a ``kind``:

    step      one step on one worker (``StepRecord``): how long it spent in which phase, and when each bucket was sent and complete
    pause     what a worker did between two loops, or after the last step of a loop: evaluation, a checkpoint, joining (the same
              fields; ``step`` is the last step)
    metrics   the averages of what was logged in one step: {"kind": "metrics", "step": 40, "at": ..., "values": {"loss": 0.53}};
              JSON has no NaN and no infinity, so these are texts: "nan", "inf", "-inf"

Times (``at``) are seconds since 1970 by the clock of the machine that supervises the run, so that records of different workers and
machines can be compared. Spans and buckets count in microseconds from ``at``.

Short steps are not all recorded: every worker records the steps whose number is divisible by ``stride``, a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, NamedTuple

from lockstep.recording.json_lines import number

# Phases of a step on one worker, in the order in which they come. Each moment belongs to one phase.
DATA = "data"
"""The worker waits for its next micro-batch, or loads it."""
LANE = "lane"
"""The lane is prepared, or its gradients are added to the partial sums: seeds, buffers, the fixed order of additions."""
FORWARD = "forward"
"""The loop body before ``backward()``."""
BACKWARD = "backward"
"""``backward()``. Buckets leave meanwhile."""
EXCHANGE = "exchange"
"""After the last backward: the worker waits until the gradients of all workers are averaged."""
CONFIRM = "confirm"
"""The worker waits until every worker has the averages."""
OPTIMIZER = "optimizer"
"""The loop body after ``backward()``, up to the commit: clipping, ``opt.step()``."""
BODY = "body"
"""The loop body after the commit."""
BETWEEN = "between"
"""Values are exchanged: logged values and replicas between two steps, run.gather in the loop body, the counts of a stream."""
CHECKPOINT = "checkpoint"
"""Training waits for a checkpoint."""
EVALUATE = "evaluate"
"""``run.evaluate``."""
RECOVERY = "recovery"
"""The workers change: a worker was lost, joins or leaves."""
OUTSIDE = "outside"
"""The script is outside of its loops over the data."""

PHASES = (
    DATA,
    LANE,
    FORWARD,
    BACKWARD,
    EXCHANGE,
    CONFIRM,
    OPTIMIZER,
    BODY,
    BETWEEN,
    CHECKPOINT,
    EVALUATE,
    RECOVERY,
    OUTSIDE,
)
OWN_WORK = frozenset({DATA, LANE, FORWARD, BACKWARD, OPTIMIZER, BODY})
"""Phases in which a worker does not wait for others: if they take longer on one worker, the others wait for it."""
COMPUTE = frozenset({LANE, FORWARD, BACKWARD, OPTIMIZER, BODY})
WAITS = frozenset({EXCHANGE, CONFIRM, BETWEEN})
"""Phases in which a worker waits for others, or for the transport."""


UNKNOWN = -1
"""As ``BucketTimes.done_us``."""


class Span(NamedTuple):
    """One phase: from ``begin_us`` to ``end_us``, in microseconds after the record's ``at``.

    ``cpu_us``: CPU time of the main thread; ``queue_us``: how long the main thread was ready to run and got no core.
    """

    phase: str
    begin_us: int
    end_us: int
    cpu_us: int = 0
    queue_us: int = 0

    @property
    def us(self) -> int:
        return self.end_us - self.begin_us


class BucketTimes(NamedTuple):
    """One bucket of gradients: when the worker had deposited its part, and when the average was complete on this worker.

    ``done_us`` is UNKNOWN if only the transport knows it: NCCL, and gloo with ``exact=False``.
    """

    bucket: int
    sent_us: int
    done_us: int
    nbytes: int


@dataclass(frozen=True)
class StepRecord:
    """One step on one worker.

    The step takes from the end of the worker's last step to the end of this one, so the records of a worker leave no gaps.
    """

    step: int
    """The number of the step, from 1: ``run.step`` after it was committed."""
    worker: int
    rank: int
    """This and the next three: when the step began. The workers may have changed in the step."""
    size: int
    generation: int
    lanes: tuple[int, int]
    """This worker's lanes, [first, last)."""
    at: float
    """When it began."""
    spans: tuple[Span, ...]
    buckets: tuple[BucketTimes, ...] = ()
    samples: int = 0
    """Of this worker in this step."""
    epoch: int = 0
    committed: bool = True
    """False: a worker was lost, and the step was repeated."""
    stride: int = 1
    """Only steps whose number is divisible by it are recorded."""
    page_faults: int = 0
    """How often the process waited for a page from a disk (it was swapped out), per step since the last record."""
    link_us: int = 0
    """How long the data of this worker was on its way to other machines, added over its connections, per step as well."""
    memory_bytes: int = 0
    """Resident memory of the process."""
    gpu_memory_bytes: int = 0
    gpu_percent: int = -1
    """Utilisation of the GPU; -1 if there is none, or if it is not known."""
    kind: str = "step"

    @property
    def seconds(self) -> float:
        return self.spans[-1].end_us / 1e6 if self.spans else 0.0

    @property
    def lane_count(self) -> int:
        return self.lanes[1] - self.lanes[0]

    def phase_s(self, *phases: str) -> float:
        """Seconds in these phases."""
        return sum(span.us for span in self.spans if span.phase in phases) / 1e6

    def to_json(self) -> dict[str, Any]:
        """As plain data: spans and buckets as short lists, and no field that has its default value."""
        found = {name: value for name in _PLAIN if (value := getattr(self, name)) != _DEFAULTS.get(name)}
        found |= {"kind": self.kind, "at": round(self.at, 6), "lanes": list(self.lanes)}
        found["spans"] = [list(span) for span in self.spans]
        if self.buckets:
            found["buckets"] = [list(bucket) for bucket in self.buckets]
        return found

    @staticmethod
    def from_json(line: Mapping[str, Any]) -> StepRecord:
        """Raises KeyError, TypeError, ValueError or OverflowError if ``line`` is no record of a step."""
        known = {name: _TYPES[name](line[name]) for name in _PLAIN if name in line}
        spans = tuple(Span(str(phase), *map(_whole, times)) for phase, *times in line["spans"])
        buckets = tuple(BucketTimes(*map(_whole, each)) for each in line.get("buckets", ()))
        first, last = map(_whole, line["lanes"])
        found = StepRecord(**known, lanes=(first, last), spans=spans, buckets=buckets)
        if not 0 <= found.rank < found.size or not 0 <= first <= last or found.stride < 1:
            raise ValueError("numbers that contradict each other")
        return found


def _whole(value: Any) -> int:
    """An integer that fits into a float."""
    found = int(value)
    if not -_LARGEST <= found <= _LARGEST:
        raise ValueError("a number is too large")
    return found


def finite(value: Any) -> float:
    """Raises TypeError, ValueError or OverflowError if ``value`` is no finite number."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("a number is not finite")
    return found


_LARGEST = 1 << 53
_DEFAULTS = {name: each.default for name, each in StepRecord.__dataclass_fields__.items() if each.default is not MISSING}
_PLAIN = tuple(name for name in StepRecord.__dataclass_fields__ if name not in ("lanes", "spans", "buckets"))
_TYPES: dict[str, Callable[[Any], Any]] = dict.fromkeys(_PLAIN, _whole) | {"at": finite, "committed": bool, "kind": str}


@dataclass(frozen=True)
class Metrics:
    """The averages of what was logged in one step."""

    step: int
    at: float
    values: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "metrics",
            "step": self.step,
            "at": round(self.at, 6),
            "values": {name: number(each) for name, each in self.values.items()},
        }


def parse(line: Mapping[str, Any]) -> StepRecord | Metrics | None:
    """Return the record of one line; None if it is of another kind, or damaged."""
    try:
        if line["kind"] in ("step", "pause"):
            return StepRecord.from_json(line)
        if line["kind"] == "metrics":
            values = {str(name): float(value) for name, value in line["values"].items()}
            return Metrics(_whole(line["step"]), finite(line["at"]), values)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        pass
    return None
