"""Shard: what the user's loop iterates over. Deals this worker's lanes of every step, turn by turn.

Owns the order of events in a loop; what happens at each is the driver's (``Run``'s) business:

    enter  [start_epoch  [start_step  [start_micro_batch  <loop body>  end_micro_batch]... ]... ]... exhausted  leave
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.data.map_source import MapSource
from lockstep.data.source import MicroBatch
from lockstep.data.stream_source import StreamSource
from lockstep.errors import InvariantError, UsageError
from lockstep.plan.lanes import MicroBatchPlan, cut, plan_micro_batches


@dataclass(frozen=True)
class StepPlan:
    """One step of a loop: where it lies, and how many samples each lane of the whole run has."""

    epoch: int
    index: int
    """Within the epoch."""
    counts: tuple[int, ...]
    ends_epoch: bool


class StepRestarted(Exception):
    """Raised by the driver: the world has changed, and with it this worker's lanes. Deal again from the driver's position."""


class Driver(Protocol):
    """Who is told what happens in the loop. ``lanes``: this worker's, [first, last)."""

    @property
    def lanes_here(self) -> tuple[int, int]: ...

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step in it) of the next step to commit in this loop."""

    def enter_loop(self, shard: Shard) -> int | None:
        """A loop begins. Returns the number of this stage; None where the run has passed it already."""

    def empty_epoch(self) -> None:
        """A stream had no sample at all in this epoch."""

    def start_epoch(self, order: int) -> None:
        """``order``: a fingerprint of the order in which samples come, which must be equal on every worker."""

    def start_step(self, step: StepPlan) -> None: ...

    @property
    def records_samples(self) -> bool: ...

    def note_samples(self, lane: int, samples: list[int]) -> None:
        """For the ledger: the next turn's samples, by their numbers."""

    def start_micro_batch(self, lane: int, is_last: bool) -> None: ...

    def end_micro_batch(self) -> None: ...

    def loop_ended(self) -> None:
        """The loop has come to its end, on every worker."""

    def loop_abandoned(self) -> None:
        """The loop was left by ``break``, or by an exception in its body."""

    def leave_loop(self) -> None:
        """The loop is over: at its end, by ``break``, or by an exception."""

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Every lane's count, from those of this worker's lanes. Collective."""


class Shard:
    """Iterate over it as over a DataLoader. ``len()`` is the number of steps; a worker with several lanes has several turns in one.

    ``open_source(stage)`` makes the source; a second loop over the same shard is a new stage with a new order.
    """

    def __init__(
        self,
        driver: Driver,
        open_source: Callable[[int], MapSource | StreamSource],
        lanes: int,
        epochs: int,
        settings: dict[str, Any],
    ) -> None:
        self._driver, self._open, self._lanes, self._epochs = driver, open_source, lanes, epochs
        """What must be equal on every worker."""
        source = open_source(0)  # so that mistakes are told where they are made
        self._steps = source.steps if isinstance(source, MapSource) else None
        self.settings = {"length": source.length if isinstance(source, MapSource) else None, **settings}

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("a stream has no length: how many steps it gives is known at its end")
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        stage = self._driver.enter_loop(self)
        if stage is None:
            return
        source = self._open(stage)
        try:
            while self._driver.position[0] < self._epochs:  # again after each change of the world
                try:
                    for micro, is_last in (
                        self._map_micro_batches(source) if isinstance(source, MapSource) else self._stream_micro_batches(source)
                    ):
                        self._driver.start_micro_batch(micro.lane, is_last)
                        yield micro.batch
                        self._driver.end_micro_batch()
                except StepRestarted:
                    continue
            self._driver.loop_ended()
        except GeneratorExit:
            self._driver.loop_abandoned()
            raise
        finally:
            source.close()
            self._driver.leave_loop()

    def _map_micro_batches(self, source: MapSource) -> Iterator[tuple[MicroBatch, bool]]:
        """From the driver's position on; it moves on when a step commits."""
        lanes = self._driver.lanes_here
        source.seek(*self._driver.position, lanes)
        fresh = True
        while self._driver.position[0] < self._epochs:
            epoch, index = self._driver.position
            if fresh or index == 0:
                self._driver.start_epoch(source.fingerprint(epoch))
            fresh = False
            cuts = cut(source.samples(index), self._lanes)
            turns = plan_micro_batches(lanes, cuts)
            micro = source.take()
            counts = tuple(stop - start for start, stop in cuts)
            self._driver.start_step(StepPlan(epoch, index, counts, index == source.steps_in_epoch - 1))
            for at, turn in enumerate(turns):
                micro = micro if at == 0 else source.take()
                _require_match(micro, epoch, index, turn)
                if self._driver.records_samples:
                    self._driver.note_samples(turn.lane, source.indices(epoch, index, turn))
                yield micro, at == len(turns) - 1

    def _stream_micro_batches(self, source: StreamSource) -> Iterator[tuple[MicroBatch, bool]]:
        lanes = self._driver.lanes_here
        while self._driver.position[0] < self._epochs:
            epoch, index = self._driver.position
            self._driver.start_epoch(0)
            source.seek(epoch, index, lanes)
            micros, counts = self._next_of_stream(source, lanes)
            if not any(counts):
                self._driver.empty_epoch()
            while any(counts):
                following = self._next_of_stream(source, lanes)  # whether this one ends the epoch
                self._driver.start_step(StepPlan(epoch, index, counts, not any(following[1])))
                turns = [micro for micro in micros if micro.count] or micros[:1]
                if turns[0].batch is None:
                    raise UsageError(
                        f"lanes {lanes[0]} to {lanes[1] - 1} of the stream never had a sample: it has fewer parts than there are "
                        f"lanes ({self._lanes}). Pass fewer lanes, or a dataset with more shards."
                    )
                for at, micro in enumerate(turns):
                    yield micro, at == len(turns) - 1
                micros, counts = following
                index += 1

    def _next_of_stream(self, source: StreamSource, lanes: tuple[int, int]) -> tuple[list[MicroBatch], tuple[int, ...]]:
        micros = [source.take() for _ in range(*lanes)]
        return micros, self._driver.gather_counts([micro.count for micro in micros])


def _require_match(micro: MicroBatch, epoch: int, index: int, turn: MicroBatchPlan) -> None:
    if (micro.epoch, micro.step, micro.lane, micro.count) != (epoch, index, turn.lane, turn.stop - turn.start):
        raise InvariantError(f"the source gave {micro.epoch, micro.step, micro.lane} for step {index} of epoch {epoch}, {turn}")
