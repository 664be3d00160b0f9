"""Checkpoints: the checkpoints of one run. Resumes from the newest one, and saves new ones between steps.

At most one checkpoint is in flight, and every worker sees it in the same state:

    IDLE -> WRITING     a checkpoint is due: all workers copy their part of the state, while training waits
    WRITING             each worker writes its part in the background
      -> PUBLISHING       every worker has said WROTE, and the workers gather what each has written
      -> IDLE             a part could not be written; or the checkpoint is abandoned
    PUBLISHING          rank 0 writes the manifest in the background, and removes old checkpoints
      -> IDLE             rank 0 has said PUBLISHED; or the checkpoint is abandoned

The workers say WROTE and PUBLISHED in the control word of a step (gradients/control_word.py), so training does not wait for a slow
disk. Training waits if the next checkpoint is due while one is in flight. If the workers change, the checkpoint in flight is
abandoned, because a worker that writes or publishes it may be gone, and another checkpoint is due.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.common_place import require_common_place
from lockstep.checkpoint.hyperparameters import read_hyperparameters
from lockstep.checkpoint.in_flight import CheckpointInFlight
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.ownership import Ownership, RunIdentity
from lockstep.checkpoint.resumed import ResumedCheckpoint
from lockstep.checkpoint.resumption import Resumption
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.schedule import Schedule
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.state_layout import lay_out_state
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import Stateful
from lockstep.errors import InvariantError, LockstepError, UsageError
from lockstep.gradients.control_word import PUBLISHED, SAVE, STOP, WROTE
from lockstep.observe.notice import print_notice
from lockstep.plan.interval import Interval
from lockstep.plan.step_end import StepEnd
from lockstep.recording.records import CHECKPOINT

_POLL_S = 1.0
"""While a worker waits for others it sends a message this often, so that a long write is not taken for a hang."""


class State(Enum):
    """The state of the checkpoint in flight: see the table above."""

    IDLE = auto()
    WRITING = auto()
    PUBLISHING = auto()


_TRANSITIONS = {
    State.IDLE: {State.WRITING},
    State.WRITING: {State.PUBLISHING, State.IDLE},
    State.PUBLISHING: {State.IDLE},
}


class SaveError(LockstepError, OSError):
    """``run.save()`` could not write the checkpoint. The message says why."""


@dataclass(frozen=True)
class CheckpointCallbacks:
    """What ``Checkpoints`` calls."""

    published: Callable[[int, str], None] = lambda step, where: None
    """A checkpoint of this step was published. Called on rank 0, in a background thread."""
    agreed_at: Callable[[int], int] = lambda step: step
    """Returns the last step, up to this one, at which replicas were known to be equal. Called on rank 0, in a background thread."""
    resumed: Callable[[int], None] = lambda step: None
    """A checkpoint of this step was loaded. Called on every rank."""
    complete_state: Callable[[], None] = lambda: None
    """Exchanges what only some workers know of the state. A collective, called on every rank before the state is captured."""


class Checkpoints:
    """A ``BetweenStepsTask`` (training/between_steps.py). ``Run`` calls its methods at the same points on every worker."""

    phase = CHECKPOINT

    def __init__(
        self,
        url: str | os.PathLike[str],
        every: str,
        keep: int,
        state: Stateful,
        comm: Callable[[], Comm],
        callbacks: CheckpointCallbacks,
        *,
        resume: str | os.PathLike[str] = "auto",
        override: Sequence[str] = (),
    ) -> None:
        """``comm`` returns the comm of the current generation. The other arguments are those of ``Run``:

        ``resume`` is "auto" (the newest checkpoint, if there is one), "must" (a ``UsageError`` if there is none), "never" (begin
        anew, next to the checkpoints that are there) or the folder of one checkpoint. ``override`` names the hyperparameters of
        optimizers for which the script's value is used, not the checkpoint's.
        """
        if not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r} is not a number of checkpoints. Use 1 or more.")
        self._retention = Retention(open_storage(url), keep)
        self._schedule = Schedule(Interval.parse(every))
        self._run_state, self._comm, self._callbacks = state, comm, callbacks
        script = read_hyperparameters(state.replicated().get("objects", {}))
        self._resumption = Resumption(resume, override, script)
        self._ownership = Ownership(self._retention.storage, comm, script)
        self._resumed_from: ResumedCheckpoint | None = None
        """The checkpoint that was loaded, until ``restore_if_changed`` or the first step."""
        self.is_branch = False
        """Whether the run was resumed from a checkpoint in another place than its own: another run has been there."""
        self._snapshot = Snapshot()
        self._state = State.IDLE
        self._latest: CheckpointInFlight | None = None
        """The checkpoint in flight, or the last one that was. Its background work ends before the next one is begun."""
        self._distrusted_after: int | None = None
        """Checkpoints after this step may hold wrong bits. They are removed when the next checkpoint is published."""

    def resume(self) -> bool:
        """Load the checkpoint that ``Run(resume=...)`` asks for, before the first step. Returns whether there was one.

        All workers must call it. ``UsageError`` if another run uses the folder, or if the checkpoint does not fit this run.
        """
        comm = self._comm()
        identity = self._ownership.acquire()
        require_common_place(self._retention.storage, comm)
        found = self._resumption.read(self._retention, comm, self._run_state)
        if found is None:
            return False
        manifest = found.manifest
        self._resumption.override(found.state)
        self._resumed_from = ResumedCheckpoint(found)
        self.is_branch = os.path.realpath(found.retention.storage.url) != os.path.realpath(self._retention.storage.url)
        self._load(found.state, manifest, resumes=True)
        kept = self._resumption.hyperparameters(manifest, print_notice if comm.rank == 0 else lambda line: None)
        self._ownership.resumed(RunIdentity(identity.launch, manifest.run or identity.run, kept))
        self._schedule.last_step = manifest.step
        self._callbacks.resumed(manifest.step)
        if comm.rank == 0:
            workers = f"{manifest.workers} worker{'s' if manifest.workers > 1 else ''}"
            url = found.retention.storage.url
            print_notice(f"resumed at step {manifest.step} from {url} (saved {manifest.made} by {workers}; {comm.size} now).")
        return True

    def restore_if_changed(self) -> bool:
        """Load the checkpoint again, if the script has changed the state since ``resume``. Returns whether it had.

        Every worker calls it once, alone, when its script has reached the place at which the checkpoint was made. Until then, or
        until the first step, the checkpoint is not removed. ``UsageError`` if the checkpoint cannot be read any more.
        """
        resumed, self._resumed_from = self._resumed_from, None
        if resumed is None or not resumed.differs_from(self._run_state):
            return False
        state = resumed.read(self._run_state)
        self._resumption.override(state)
        self._load(state, resumed.manifest)
        return True

    def _load(self, state: dict[str, Any], manifest: Manifest, *, resumes: bool = False) -> None:
        try:
            self._run_state.restore(state, resumes=resumes)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, LockstepError):
                raise
            raise UsageError(
                f"the checkpoint of step {manifest.step} in {self._retention.storage.url} does not fit this run "
                f"({type(error).__name__}: {str(error)[:200]}). Pass the objects that were saved to Run, or another folder as "
                "checkpoint=..."
            ) from error

    def new_generation(self) -> None:
        """The workers have changed. All workers of the new generation must call it."""
        self.abandon()
        self._ownership.new_generation()

    def close(self) -> None:
        """The run has ended: let other runs use the folder. Does not wait; may be called twice."""
        self.abandon()
        if self._latest is not None and self._latest.is_publishing:
            BackgroundTask(self._release, "release", finish_at_exit=True)
        else:
            self._release()

    def _release(self) -> None:
        if self._latest is not None:
            self._latest.wait_for_publication()
        self._ownership.release()

    # -- between steps -------------------------------------------------------------------------

    def requests(self) -> int:
        """Return the bits that this worker sends in the control word of the next step."""
        save = SAVE if self._schedule.wants_save(self._comm().rank) else 0
        if self._latest is None or self._state is State.IDLE:
            return save
        if self._state is State.WRITING:
            return WROTE if self._latest.is_written else 0
        return save | (PUBLISHED if self._latest.has_publication_ended else 0)

    def is_due(self, now: StepEnd) -> bool:
        """Return whether the workers must call ``perform`` at the end of this step. Called after every step."""
        self._resumed_from = None
        if not self._snapshot.is_prepared:  # after the first step optimizers have their state: mistakes in it are found now
            comm = self._comm()
            self._snapshot.prepare(lay_out_state(self._run_state.capture(), self._run_state.persistent(), comm.size), comm.rank)
        if self._state is State.PUBLISHING and any(request & PUBLISHED for request in now.requests):
            self._confirm()
        return self._have_all_written(now) or self._schedule.is_due(now) or _must_stop(now)

    def perform(self, now: StepEnd) -> None:
        if self._have_all_written(now):
            self._conclude()
        if self._schedule.is_due(now):
            self.begin(now.step)
        if _must_stop(now):
            self.wait_until_idle()

    def done(self, result: Any) -> None:
        self._schedule.is_requested = False

    def loop_ended(self, step: int) -> None:
        """Save the end of a loop, so that a resumed run skips the loop, unless that was done with its last step.

        It is done again if replicas were compared meanwhile and differed: what was saved of this step may hold the wrong bits.
        """
        # Rank 0 decides: a worker that has joined does not know the last checkpoint.
        is_due = self._schedule.last_step != step or self._schedule.is_requested
        texts = gather_bytes(self._comm(), b"1" if is_due else b"0", "whether the end of the loop must be saved")
        if texts[0] == b"1":
            self.begin(step)
            self._schedule.is_requested = False
        self.wait_until_idle()

    # -- on request ----------------------------------------------------------------------------

    def request_save(self) -> None:
        """Save at the end of this step."""
        self._schedule.is_requested = True

    def save(self, step: int) -> None:
        """Save now, and return when the checkpoint is published. Raises ``SaveError`` on every worker if it cannot be written."""
        checkpoint = self.begin(step)
        self.wait_until_idle()
        self._schedule.is_requested = False
        error = gather_bytes(self._comm(), checkpoint.error.encode(), "whether the checkpoint was written")[0].decode()
        if error:
            raise SaveError(error)

    def finish(self, step: int) -> None:
        """The run ends after ``step``: save what was requested, and wait for the checkpoint in flight."""
        if self._schedule.is_requested:
            self.begin(step)
            self._schedule.is_requested = False
        if self._state is State.WRITING:
            self.wait_until_idle()
        elif self._latest is not None:
            self._latest.wait_for_publication()

    def abandon(self) -> None:
        """The workers have changed, or the run has ended: nobody will publish the checkpoint in flight. Does not wait."""
        if self._latest is not None and self._state is not State.IDLE:  # while PUBLISHING rank 0 may have died before it was done
            self._latest.cancel()
            self._enter(State.IDLE)
            self._schedule.abandoned()

    def distrust_after(self, step: int) -> None:
        """Replicas differed at some step after ``step``, and were repaired: save again, then remove the checkpoints in between."""
        self.abandon()
        self._distrusted_after = step if self._distrusted_after is None else min(step, self._distrusted_after)
        self.request_save()

    def exit_code(self) -> int:
        """Return the exit code of a worker without an agent that was stopped by SIGTERM: 143 if its state was not saved."""
        return 143 if self._latest is not None and self._latest.error else 0

    # -- one checkpoint ------------------------------------------------------------------------

    def begin(self, step: int) -> CheckpointInFlight:
        """Copy the state of ``step``, and start to write it. Waits for the checkpoint before it."""
        self.wait_until_idle()
        if self._resumed_from is not None and self._resumed_from.manifest.step < step:
            self._resumed_from = None
        identity = self._ownership.identity or self._ownership.agree()
        self._callbacks.complete_state()
        self._latest = CheckpointInFlight(step, identity, self._run_state, self._comm(), self._snapshot, self._retention)
        self._enter(State.WRITING)
        self._schedule.begun(step)
        return self._latest

    def wait_until_idle(self) -> None:
        """Wait until no worker has background work any more."""
        if self._state is State.WRITING:
            self._wait_for_all_workers()
            self._conclude()
        self._wait_for_all_workers()  # for rank 0's publication, and for writes that were abandoned
        if self._state is State.PUBLISHING:
            self._confirm()

    def _wait_for_all_workers(self) -> None:
        while True:
            mine = b"1" if self._latest is None or self._latest.wait(_POLL_S) else b"0"
            if all(text == b"1" for text in gather_bytes(self._comm(), mine, "whether all workers have written")):
                return

    def _conclude(self) -> None:
        """All parts are written, or have failed."""
        checkpoint, distrusted_after = self._latest, self._distrusted_after
        assert checkpoint is not None
        if checkpoint.conclude(lambda manifest: self._publish(checkpoint, manifest, distrusted_after)):
            self._enter(State.PUBLISHING)
        else:
            self._enter(State.IDLE)
            self._schedule.failed()

    def _publish(self, checkpoint: CheckpointInFlight, manifest: Manifest, distrusted_after: int | None) -> None:
        """Runs on rank 0 in a background thread."""
        storage = self._retention.storage
        in_use = self._resumed_from.folder if self._resumed_from is not None else None
        try:
            data = manifest.to_json()
            self._ownership.require()
            missing = [name for name in manifest.files if not storage.exists(checkpoint.folder, name)]
            if missing:
                raise OSError(f"{missing[0]}, which another worker has written, is not there. Do all machines share {storage.url}?")
            storage.publish(checkpoint.folder, data)
        except Exception as error:  # noqa: BLE001 - a storage may raise anything
            checkpoint.fail(f"rank 0: {type(error).__name__}: {error}")
            return
        self._callbacks.published(manifest.step, f"{storage.url}/{checkpoint.folder}")
        try:
            agreed_at = self._callbacks.agreed_at(manifest.step)
            self._retention.remove_old(checkpoint.folder, manifest.run, agreed_at, distrusted_after, in_use)
        except Exception as error:  # noqa: BLE001
            print_notice(f"older checkpoints in {storage.url} could not be removed ({error}). The next checkpoint tries again.")

    def _confirm(self) -> None:
        """Rank 0 has ended its publication, by success or by failure."""
        self._enter(State.IDLE)
        if self._latest is not None and not self._latest.error:
            self._distrusted_after = None

    def _have_all_written(self, now: StepEnd) -> bool:
        return self._state is State.WRITING and bool(now.requests) and all(request & WROTE for request in now.requests)

    def _enter(self, state: State) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise InvariantError(f"a checkpoint cannot go from {self._state.name} to {state.name}")
        self._state = state


def _must_stop(now: StepEnd) -> bool:
    return any(request & STOP for request in now.requests)
