"""StepLoader: loads the micro-batches of this worker's lanes, step by step, for loops over ``run.shard`` and ``run.steps``.

Knows nothing of gradients or commits. The position in the data belongs to its driver, and moves when a step is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@dataclass(frozen=True)
class LoadedStep:
    """A step, and an iterator over (micro-batch, whether it is the last) of this worker's lanes. The first is loaded already."""

    plan: StepPlan
    micro_batches: Iterator[tuple[MicroBatch, bool]]


class StepRestarted(Exception):
    """Raised by the driver: the step is loaded again from the driver's position, for the lanes that this worker has then."""


class LoaderDriver(Protocol):
    """What a StepLoader asks and tells. Every method that talks to other workers may raise StepRestarted."""

    @property
    def lanes_here(self) -> tuple[int, int]:
        """This worker's lanes, [first, last)."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step in the epoch) of the next step to commit in this loop."""

    def empty_epoch(self) -> None:
        """A stream has no sample in the current epoch: move to the next epoch."""

    def start_epoch(self, order: int) -> None:
        """An epoch begins, or continues after a change of workers.

        ``order`` is a fingerprint of the order of the samples, which must be equal on every worker. 0: nothing to compare.
        """

    def skip_lane(self, lane: int) -> None:
        """A lane of this worker counts for nothing in this step: ``collate_fn`` returned None. Not called for ``run.steps``."""

    @property
    def records_samples(self) -> bool:
        """Whether to call ``note_samples``: only if the run writes a ledger."""

    def note_samples(self, lane: int, samples: list[int]) -> None:
        """The dataset indices of the next micro-batch, for the ledger."""

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the sample count of every lane of the run, from those of this worker's lanes. All workers must call it."""


class StepLoader:
    """Loads ``dataset`` with ``options``.

    ``needs_a_batch``: if ``collate_fn`` returns None for every lane of this worker, an earlier batch is loaded again as a
    placeholder, because the loop body must run at least once. ``settings`` holds what must be equal on every worker.

    Raises:
        UsageError: If the dataset cannot be loaded with these options.
    """

    def __init__(self, driver: LoaderDriver, dataset: Any, options: LoaderOptions, *, needs_a_batch: bool) -> None:
        self._driver, self._dataset, self._options, self._needs_a_batch = driver, dataset, options, needs_a_batch
        source = open_source(dataset, options)  # reports wrong arguments here, not at the first iteration
        self._source: MapSource | StreamSource | None = None
        self._map_source = source if isinstance(source, MapSource) else None
        self._last_batch: Any = None
        self.settings: dict[str, Any] = {
            "length": source.length if isinstance(source, MapSource) else None,
            "global_batch": options.global_batch,
            "shuffle": options.shuffle,
            "epochs": options.epochs,
            "drop_last": options.drop_last,
        }

    def __len__(self) -> int:
        """The number of steps in all epochs."""
        return self._require_length().steps

    @property
    def has_length(self) -> bool:
        return self._map_source is not None

    def micro_batches_from(self, position: tuple[int, int] | None) -> int:
        """Return how many micro-batches this worker has from there to the end of the last epoch. None: the loop is complete."""
        source = self._require_length()
        return 0 if position is None else source.micro_batches_from(*position, self._driver.lanes_here)

    def _require_length(self) -> MapSource:
        if self._map_source is None:
            raise TypeError("an iterable dataset has no length: its number of steps is known only at its end")
        return self._map_source

    @contextmanager
    def opened(self, stage: int) -> Iterator[None]:
        """Open the dataset for the loop with this stage, which has an order of its own. Close it at the end."""
        seed = self._options.seed if stage == 0 else sample_seed(self._options.seed, stage, 0, MODEL)
        source = self._source = open_source(self._dataset, replace(self._options, seed=seed))
        try:
            yield
        finally:
            source.close()
            self._source = None

    @property
    def is_incomplete(self) -> bool:
        return self._driver.position[0] < self._options.epochs

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps from the driver's position to the end of the loop. A new call drops what the last one has prefetched."""
        assert self._source is not None
        return self._map_steps(self._source) if isinstance(self._source, MapSource) else self._stream_steps(self._source)

    def _map_steps(self, source: MapSource) -> Iterator[LoadedStep]:
        lanes = self._driver.lanes_here
        source.seek(*self._driver.position, lanes)
        is_first = True
        while self.is_incomplete:
            epoch, index = self._driver.position
            if is_first or index == 0:
                self._driver.start_epoch(source.order_fingerprint(epoch))
            is_first = False
            cuts = cut(source.samples_in_step(index), self._options.lanes)
            plans = plan_micro_batches(lanes, cuts)
            counts = tuple(stop - start for start, stop in cuts)
            loaded = self._map_micro_batches(source, source.take(), epoch, index, plans)
            yield LoadedStep(StepPlan(epoch, index, counts, index == source.steps_in_epoch - 1), self._choose(loaded, len(plans)))

    def _map_micro_batches(
        self, source: MapSource, first: MicroBatch, epoch: int, index: int, plans: Sequence[MicroBatchPlan]
    ) -> Iterator[MicroBatch]:
        for number, plan in enumerate(plans):
            micro_batch = first if number == 0 else source.take()
            _require_match(micro_batch, epoch, index, plan)
            if self._driver.records_samples:
                self._driver.note_samples(plan.lane, source.sample_indices(epoch, index, plan))
            yield micro_batch

    def _stream_steps(self, source: StreamSource) -> Iterator[LoadedStep]:
        lanes = self._driver.lanes_here
        while self.is_incomplete:
            epoch, index = self._driver.position
            self._driver.start_epoch(0)
            source.seek(epoch, index, lanes)
            step, counts = self._next_stream_step(source, lanes)
            if not any(counts):
                self._driver.empty_epoch()
            while any(counts):
                next_step, next_counts = self._next_stream_step(source, lanes)  # needed to know whether this step ends the epoch
                micro_batches = [each for each in step if each.count] or step[:1]
                if micro_batches[0].batch is None and not micro_batches[0].count:
                    raise UsageError(
                        f"lanes {lanes[0]} to {lanes[1] - 1}, which this worker runs, have no samples: dataset.shard() fills fewer "
                        f"shards than there are lanes ({self._options.lanes}). Pass fewer lanes, or a dataset with more shards."
                    )
                chosen = self._choose(iter(micro_batches), len(micro_batches))
                yield LoadedStep(StepPlan(epoch, index, counts, not any(next_counts)), chosen)
                step, counts = next_step, next_counts
                index += 1

    def _next_stream_step(self, source: StreamSource, lanes: tuple[int, int]) -> tuple[list[MicroBatch], tuple[int, ...]]:
        """Load the next step of a stream. Returns this worker's micro-batches and the sample count of every lane of the run."""
        step = [source.take() for _ in range(*lanes)]
        return step, self._driver.gather_counts([micro_batch.count for micro_batch in step])

    # -- batches that collate_fn returned as None ----------------------------------------------

    def _choose(self, micro_batches: Iterator[MicroBatch], count: int) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the micro-batches that the loop body runs on, and whether each is the last. Lanes without a batch are skipped."""
        if self._options.collate_fn is None:
            for number, micro_batch in enumerate(micro_batches):
                yield micro_batch, number == count - 1
            return
        chosen, skipped = None, None
        for micro_batch in micro_batches:
            if micro_batch.batch is None:
                if self._needs_a_batch:
                    self._driver.skip_lane(micro_batch.lane)
                skipped = micro_batch
                continue
            if chosen is not None:
                yield chosen, False
            chosen, self._last_batch = micro_batch, micro_batch.batch
        if chosen is None and self._needs_a_batch:
            assert skipped is not None
            chosen = self._placeholder(skipped)
        if chosen is not None:
            yield chosen, True

    def _placeholder(self, skipped: MicroBatch) -> MicroBatch:
        if self._last_batch is None:
            raise UsageError(
                "collate_fn returned None for every batch of this worker so far, so the loop body has nothing to run on. "
                "Use the loop over run.steps(...), in which a step may have no batch, or drop the empty samples from the dataset."
            )
        return replace(skipped, batch=self._last_batch)


def _require_match(found: MicroBatch, epoch: int, index: int, plan: MicroBatchPlan) -> None:
    if (found.epoch, found.step, found.lane, found.count) != (epoch, index, plan.lane, plan.stop - plan.start):
        raise InvariantError(f"the source returned {found.epoch, found.step, found.lane} for step {index} of epoch {epoch}, {plan}")
