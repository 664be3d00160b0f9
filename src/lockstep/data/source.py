"""What a loader deals from: the Source protocol and its MicroBatch. Knows nothing of datasets, commits or other workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class MicroBatch:
    """One turn of a worker's loop body: what one lane has in one step. ``step`` counts within the epoch.

    ``count`` is the number of samples that count. 0: ``batch`` is a stand-in, there only for the
    body to run on (``None`` where a stream never gave this worker a sample).
    """

    epoch: int
    step: int
    lane: int
    count: int
    batch: Any


class Source(Protocol):
    """Gives the micro-batches of one worker, in order, from any position. Used by one thread."""

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        """Make the next ``take()`` give the first pass of that step for a worker with lanes [first, last).

        May be called at any time, after a failure above all: what was prefetched for the old
        position is dropped by its tag, and loader processes stay alive. Starts and waits for nothing.
        """

    def take(self) -> MicroBatch:
        """The next micro-batch in order. Waits for the dataset. StopIteration past the last epoch."""

    def close(self) -> None:
        """End the loader processes. May be called twice; nothing else may be called after it."""
