"""RunLength: how many steps the whole run has, as far as this is known. For people alone: nothing depends on it."""

from __future__ import annotations

from lockstep.plan.samples import steps_per_epoch
from lockstep.training.progress import Progress


class RunLength:
    """Call ``note_step`` after each committed step, on every worker: any of them may become rank 0.

    A loop over a map-style dataset has its epochs x steps. Inside ``run.epochs(n)``, the run has n times the steps of an epoch: of
    the last complete one, or else those up to the end of the current loop. The length of a stream is not known, and neither are the
    loops that follow a loop outside ``run.epochs``.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._epoch: tuple[int, int] | None = None  # (number of the loop over run.epochs, epoch)
        self._began_at: int | None = None  # how many steps were committed when that epoch began
        self._is_exact = False  # whether this worker was there when it began
        self._last_complete: int | None = None

    def note_step(self) -> None:
        progress = self._progress
        epoch = None if progress.epoch_now is None else (progress.epoch_loops_reached, progress.epoch_now)
        if epoch == self._epoch:
            return
        before, began_at = self._epoch, progress.step - 1
        is_next = epoch is not None and before is not None and epoch == (before[0], before[1] + 1)
        if is_next and self._is_exact and self._began_at is not None:
            self._last_complete = began_at - self._began_at
        elif not is_next:
            self._last_complete = None
        self._is_exact = is_next or began_at == 0
        self._epoch, self._began_at = epoch, began_at if self._is_exact else None

    @property
    def total(self) -> int | None:
        """How many steps the whole run has, with those before it was resumed; None if that is not known."""
        progress = self._progress
        loop = self._steps_of_loop()
        if loop is None:
            return None
        done, steps = loop
        left = steps - done
        if progress.epoch_now is None:
            return progress.step + left if progress.stage == 0 else None
        if progress.epoch_count is None:
            return None
        began_at = progress.step - done if self._began_at is None else self._began_at
        in_epoch = self._last_complete or progress.step - began_at + left
        return max(began_at + in_epoch * (progress.epoch_count - progress.epoch_now), progress.step + left)

    def _steps_of_loop(self) -> tuple[int, int] | None:
        """(steps that are over, all steps) of the current loop over the data; None for a stream, and outside of loops."""
        progress, data = self._progress, self._progress.data
        if progress.loop is None or not data.get("length"):
            return None
        in_epoch = steps_per_epoch(data["length"], data["global_batch"], data["drop_last"])
        epoch, step = progress.position
        return epoch * in_epoch + step, in_epoch * data["epochs"]
