"""Shard: what the user's loop iterates over. It loads the micro-batches of this worker's lanes, step by step.

A Shard owns the order of the events in a loop. Its Driver (training/loop.py) owns what happens at each event:

    enter_loop
      start_epoch                                              for each epoch, and again after each change of workers
        start_step                                             for each step
          start_micro_batch   <loop body>   end_micro_batch    for each micro-batch of this worker
    loop_ended or loop_abandoned
    leave_loop
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lockstep.data.map_source import MapSource
from lockstep.data.open_source import open_source
from lockstep.data.source import LoaderOptions, MicroBatch
from lockstep.data.stream_source import StreamSource
from lockstep.errors import InvariantError, UsageError
from lockstep.plan.lanes import MicroBatchPlan, cut, plan_micro_batches
from lockstep.plan.samples import MODEL, sample_seed


@dataclass(frozen=True)
class StepPlan:
    """One step of a loop: its position, and the number of samples in each lane of the whole run."""

    epoch: int
    index: int
    """Counted within the epoch."""
    counts: tuple[int, ...]
    ends_epoch: bool


class StepRestarted(Exception):
    """Raised by the driver after a change of workers: the shard loads again from the driver's position, for the new lanes."""


class Driver(Protocol):
    """What a Shard calls at each event of a loop. Every method may raise StepRestarted if it talks to other workers."""

    @property
    def lanes_here(self) -> tuple[int, int]:
        """This worker's lanes, [first, last)."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step in the epoch) of the next step to commit in this loop."""

    @property
    def next_loop_position(self) -> tuple[int, int] | None:
        """The position at which the next loop of the script begins. None if the run has completed that loop already."""

    def enter_loop(self, shard: Shard) -> int | None:
        """A loop over a shard begins.

        Returns the loop's stage (the number of loops over shards that the script has begun before), or None if the run has
        completed this loop already: before this worker joined, or before the run was resumed.
        """

    def empty_epoch(self) -> None:
        """A stream has no sample in the current epoch: move to the next epoch."""

    def start_epoch(self, order: int) -> None:
        """An epoch begins, or continues after a change of workers.

        ``order`` is a fingerprint of the order of the samples, which must be equal on every worker. 0: nothing to compare.
        """

    def start_step(self, step: StepPlan) -> None:
        """A step begins. The first of its micro-batches is loaded already."""

    @property
    def records_samples(self) -> bool:
        """Whether to call ``note_samples``: only if the run writes a ledger."""

    def note_samples(self, lane: int, samples: list[int]) -> None:
        """The dataset indices of the next micro-batch, for the ledger."""

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        """The loop body is about to run. ``is_last``: on this worker's last micro-batch of the step."""

    def end_micro_batch(self) -> None:
        """The loop body has ended."""

    def loop_ended(self) -> None:
        """All epochs are complete, on every worker."""

    def loop_abandoned(self) -> None:
        """The user left the loop, by ``break`` or by an exception in the loop body."""

    def leave_loop(self) -> None:
        """Called last, however the loop ended."""

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the sample count of every lane of the run, from those of this worker's lanes. All workers must call it."""


class Shard:
    """The iterable that ``run.shard`` returns: iterate over it as over a DataLoader.

    One iteration is one micro-batch. ``len(shard)`` is the number of iterations on this worker: one for each of its lanes that has
    samples, in each step. It changes if the workers change. In a resumed run it is the number that remains. A second loop over the
    same shard has a new order.

    Raises:
        UsageError: If the dataset cannot be loaded with these options.
    """

    def __init__(self, driver: Driver, dataset: Any, options: LoaderOptions) -> None:
        self._driver, self._dataset, self._options = driver, dataset, options
        source = open_source(dataset, options)  # reports wrong arguments here, not at the first iteration
        self._map_source = source if isinstance(source, MapSource) else None
        self._yielded = 0
        self._length: int | None = None
        """The number of iterations of the current loop; None if this shard is in no loop."""
        self.settings: dict[str, Any] = {
            "length": source.length if isinstance(source, MapSource) else None,
            "global_batch": options.global_batch,
            "shuffle": options.shuffle,
            "epochs": options.epochs,
            "drop_last": options.drop_last,
        }
        """What must be equal on every worker."""

    def __len__(self) -> int:
        if self._map_source is None:
            raise TypeError("an iterable dataset has no length: its number of steps is known only at its end")
        if self._length is not None:
            return self._length
        position = self._driver.next_loop_position
        return 0 if position is None else self._map_source.micro_batches_from(*position, self._driver.lanes_here)

    def __iter__(self) -> Iterator[Any]:
        stage = self._driver.enter_loop(self)
        if stage is None:
            return
        seed = self._options.seed if stage == 0 else sample_seed(self._options.seed, stage, 0, MODEL)
        source = open_source(self._dataset, replace(self._options, seed=seed))
        try:
            while self._is_incomplete():
                try:
                    for micro_batch, is_last in self._micro_batches(source):
                        self._driver.start_micro_batch(micro_batch.lane, is_last)
                        self._yielded += 1
                        yield micro_batch.batch
                        self._driver.end_micro_batch()
                except StepRestarted:
                    continue
            self._driver.loop_ended()
        except GeneratorExit:
            self._driver.loop_abandoned()
            raise
        finally:
            source.close()
            self._yielded, self._length = 0, None
            self._driver.leave_loop()

    def _is_incomplete(self) -> bool:
        return self._driver.position[0] < self._options.epochs

    def _micro_batches(self, source: MapSource | StreamSource) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield (micro-batch, whether it is this worker's last of the step) from the driver's position to the end of the loop."""
        return self._map_micro_batches(source) if isinstance(source, MapSource) else self._stream_micro_batches(source)

    def _map_micro_batches(self, source: MapSource) -> Iterator[tuple[MicroBatch, bool]]:
        lanes = self._driver.lanes_here
        self._length = self._yielded + source.micro_batches_from(*self._driver.position, lanes)
        source.seek(*self._driver.position, lanes)
        is_first = True
        while self._is_incomplete():
            epoch, index = self._driver.position
            if is_first or index == 0:
                self._driver.start_epoch(source.order_fingerprint(epoch))
            is_first = False
            cuts = cut(source.samples_in_step(index), self._options.lanes)
            plans = plan_micro_batches(lanes, cuts)
            micro_batch = source.take()
            counts = tuple(stop - start for start, stop in cuts)
            self._driver.start_step(StepPlan(epoch, index, counts, index == source.steps_in_epoch - 1))
            for number, plan in enumerate(plans):
                micro_batch = micro_batch if number == 0 else source.take()
                _require_match(micro_batch, epoch, index, plan)
                if self._driver.records_samples:
                    self._driver.note_samples(plan.lane, source.sample_indices(epoch, index, plan))
                yield micro_batch, number == len(plans) - 1

    def _stream_micro_batches(self, source: StreamSource) -> Iterator[tuple[MicroBatch, bool]]:
        lanes = self._driver.lanes_here
        while self._is_incomplete():
            epoch, index = self._driver.position
            self._driver.start_epoch(0)
            source.seek(epoch, index, lanes)
            step, counts = self._next_stream_step(source, lanes)
            if not any(counts):
                self._driver.empty_epoch()
            while any(counts):
                next_step, next_counts = self._next_stream_step(source, lanes)  # needed to know whether this step ends the epoch
                self._driver.start_step(StepPlan(epoch, index, counts, not any(next_counts)))
                micro_batches = [each for each in step if each.count] or step[:1]
                if micro_batches[0].batch is None:
                    raise UsageError(
                        f"lanes {lanes[0]} to {lanes[1] - 1}, which this worker runs, have no samples: dataset.shard() fills fewer "
                        f"shards than there are lanes ({self._options.lanes}). Pass fewer lanes, or a dataset with more shards."
                    )
                for number, micro_batch in enumerate(micro_batches):
                    yield micro_batch, number == len(micro_batches) - 1
                step, counts = next_step, next_counts
                index += 1

    def _next_stream_step(self, source: StreamSource, lanes: tuple[int, int]) -> tuple[list[MicroBatch], tuple[int, ...]]:
        """Load the next step of a stream. Returns this worker's micro-batches and the sample count of every lane of the run."""
        step = [source.take() for _ in range(*lanes)]
        return step, self._driver.gather_counts([micro_batch.count for micro_batch in step])


def _require_match(found: MicroBatch, epoch: int, index: int, plan: MicroBatchPlan) -> None:
    if (found.epoch, found.step, found.lane, found.count) != (epoch, index, plan.lane, plan.stop - plan.start):
        raise InvariantError(f"the source returned {found.epoch, found.step, found.lane} for step {index} of epoch {epoch}, {plan}")
