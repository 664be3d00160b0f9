"""Keeping: a run's checkpoints from the outside: resumed from at the beginning, saved between steps, and where it is told.

Wires retention, saver and resume together for ``Run``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lockstep.checkpoint.resume import find_and_read
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saver import Saver, Whole
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.base import Comm
from lockstep.errors import LockstepError, UsageError
from lockstep.observe.notice import print_notice
from lockstep.plan.interval import parse
from lockstep.plan.step_end import StepEnd


class Held(Whole, Protocol):
    """Whose state is saved and taken over."""

    def weights(self) -> dict[str, Tensor]: ...

    def restore(self, state: Any, *, resumes: bool = False) -> None: ...


@dataclass(frozen=True)
class CheckpointCallbacks:
    published: Callable[[int, str], None] = lambda step, where: None
    agreed_at: Callable[[int], int] = lambda step: step
    resumed: Callable[[int], None] = lambda step: None


class Checkpoints:
    """A task between steps (loop.py). ``published(step, where)`` is called on rank 0."""

    def __init__(
        self, url: Any, every: str, keep: int, held: Held, comm: Callable[[], Comm], callbacks: CheckpointCallbacks
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r} is no number of checkpoints. Keep 1 or more.")
        self._held, self._comm = held, comm
        self.retention = Retention(open_storage(url), keep)
        self._saver = Saver(self.retention, parse(every), held, comm, print_notice, callbacks.published)
        self._saver.agreed_at = callbacks.agreed_at
        self._callbacks = callbacks
        self.requests, self.abandon, self.distrust_after = self._saver.requests, self._saver.give_up, self._saver.suspect

    def resume(self) -> bool:
        """Collective. Whether there was a checkpoint to resume from."""
        comm = self._comm()
        found = find_and_read(self.retention, comm, self._held.weights(), self._held.settings, print_notice)
        if found is None:
            return False
        manifest, state = found
        try:
            self._held.restore(state, resumes=True)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, LockstepError):
                raise
            raise UsageError(
                f"the checkpoint of step {manifest.step} in {self.retention.storage.url} does not fit this run "
                f"({type(error).__name__}: {str(error)[:200]}). Pass the objects that were saved, or name another storage."
            ) from error
        self._saver.last_step = manifest.step
        self._callbacks.resumed(manifest.step)
        if comm.rank == 0:
            print_notice(
                f"resumed at step {manifest.step} from {self.retention.storage.url} (saved {manifest.made} by {manifest.workers} "
                f"worker{'s' if manifest.workers > 1 else ''}; {comm.size} now)."
            )
        return True

    def trust(self, agreed_at: Callable[[int], int]) -> None:
        """Who knows at which step replicas were equal last."""
        self._saver.agreed_at = agreed_at

    def is_due(self, now: StepEnd) -> bool:
        self._saver.prepare()
        self._saver.hear(now)
        return self._saver.is_due(now)

    def perform(self, now: StepEnd) -> None:
        self._saver.act(now)

    def done(self, result: Any) -> None:
        self._saver.done()

    def loop_ended(self, step: int) -> None:
        """The end of a loop is worth keeping: a resumed run passes it at once."""
        self._saver.end(step)

    def request_save(self) -> None:
        """One at the end of this turn."""
        self._saver.asked = True

    def save(self, step: int) -> None:
        """One now. Collective."""
        self._saver.save(step)

    def finish(self, step: int) -> None:
        """The run is over."""
        self._saver.finish(step)

    def exit_code(self) -> int:
        """Of a worker that was told to end and has nobody above it who knows: 143, where its state is not saved."""
        return 143 if self._saver.has_failed else 0
