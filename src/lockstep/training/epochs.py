"""EpochLoops: the loops over ``run.epochs(...)``. A worker that replays the script begins such a loop with the current epoch."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.data.seeding import seed_everything
from lockstep.errors import UsageError
from lockstep.plan.samples import MODEL, sample_seed
from lockstep.training.progress import Progress
from lockstep.training.script_replay import ScriptReplay


class EpochLoops:
    """Iterates over epochs. All workers of a run advance alike, without talking to each other."""

    def __init__(self, progress: Progress, replay: ScriptReplay, seed: int) -> None:
        self._progress, self._replay, self._seed = progress, replay, seed

    def iterate(self, count: int) -> Iterator[int]:
        """Yield the epochs from the current one to ``count`` - 1.

        Raises:
            UsageError: The script is in another loop already, or is not the script that the run was begun with.
        """
        progress = self._progress
        if progress.epoch_now is not None:
            raise UsageError(
                "a loop over run.epochs(...) inside another one (or an iterator of one that is still referenced): an epoch belongs "
                "to one loop. Use a plain range for one of them, or run.shard(..., epochs=n) for several passes over the data."
            )
        if progress.loop is not None:
            raise UsageError("a loop over run.epochs(...) inside a loop over the data. Put run.epochs outside: it contains loops.")
        number, progress.epoch_loops_reached = progress.epoch_loops_reached, progress.epoch_loops_reached + 1
        epoch = self._replay.enter_epochs(number, count)
        try:
            while epoch is not None and epoch < count:
                progress.epoch_now, progress.epoch_count = epoch, count
                self._seed_at(number, epoch)
                yield epoch
                epoch = self._replay.next_epoch(number, epoch + 1, count)
        except GeneratorExit:  # by break, or because an exception ends the loop: nothing is sent here
            if progress.loop is None:
                self._replay.leave_epochs(number)
            raise
        finally:
            progress.epoch_now = progress.epoch_count = None
            self._seed_at(number, -1)

    def _seed_at(self, number: int, epoch: int) -> None:
        """Seed all random generators, alike whether this worker has run the epochs before or not. -1: after the loop."""
        seed_everything(sample_seed(self._seed, epoch, -1 - number, MODEL))
