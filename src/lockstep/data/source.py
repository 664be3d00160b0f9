"""The Source protocol, with the LoaderOptions it is made from and the MicroBatch it returns.

Knows nothing of datasets, commits or other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.errors import UsageError

PLACEHOLDER_SAMPLES = 2
"""The number of samples in a placeholder batch, if the dataset has that many. Batch normalisation fails on a single sample."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a dataset is loaded: the arguments of ``run.shard``, the number of lanes and the seed.

    Raises:
        UsageError: If a number is out of range, on construction.
    """

    lanes: int
    global_batch: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[int] | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise UsageError(f"lanes={self.lanes}: a run needs at least one lane. Pass lanes>=1.")
        if self.global_batch < 1:
            raise UsageError(f"global_batch={self.global_batch}: a step needs at least 1 sample. Pass global_batch>={self.lanes}.")
        if self.global_batch < self.lanes:
            raise UsageError(
                f"global_batch={self.global_batch} is smaller than lanes={self.lanes}: every lane needs at least one sample of a "
                f"full batch. Pass global_batch>={self.lanes} or fewer lanes."
            )
        if self.epochs < 1:
            raise UsageError(f"epochs={self.epochs}: the loop would have no step. Pass epochs>=1.")
        if self.num_workers < 0:
            raise UsageError(
                f"num_workers={self.num_workers}: the number of loader processes cannot be negative. Pass 0 to load in the "
                "training process."
            )


@dataclass(frozen=True)
class MicroBatch:
    """What one lane has in one step: the loop body of a worker runs once for each.

    If ``count`` is 0, ``batch`` is a placeholder batch that does not count: a worker without samples runs the loop body on it, to
    take part in the step (``run.stands_in`` is then True). ``batch`` is None if a stream has given this worker no sample yet.
    """

    epoch: int
    step: int
    """Counted within the epoch."""
    lane: int
    count: int
    """The number of samples in ``batch`` that count."""
    batch: Any


class Source(Protocol):
    """Loads the micro-batches of one worker, in order, from any position. Used by one thread."""

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        """Make the next ``take()`` return the first micro-batch of that step, for a worker with lanes [first, last).

        May be called at any time, and is called after a failure: batches that were prefetched for the old position are dropped,
        and loader processes stay alive. Starts nothing and waits for nothing.
        """

    def take(self) -> MicroBatch:
        """Return the next micro-batch. Waits for the dataset.

        Raises:
            StopIteration: After the last micro-batch of the last epoch.
        """

    def close(self) -> None:
        """End the loader processes. May be called twice. No other method may be called after it."""
