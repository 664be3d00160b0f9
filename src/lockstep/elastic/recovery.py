"""Recovery: takes this worker from one generation to the next, with the same state as all others.

With an agent, the survivors of a lost worker form the next generation. If all of them have the averages of the step, they commit
it; otherwise they repeat it. Without an agent (a lone process, torchrun, mpirun) nothing can be recovered: the PeerError is raised.

    a worker is lost, or a change is due
      -> close the comm -> discard the step -> AgentLink.next (the agent names the members)
      -> rebind to the new comm -> align states -> continue
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from lockstep.comm.base import Comm
from lockstep.comm.plain_state import Stateful
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.transfer import WorkerProgress, align
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import LockstepError, PeerError
from lockstep.launcher import worker
from lockstep.recording.recorder import Recorder
from lockstep.recording.records import RECOVERY

T = TypeVar("T")


@dataclass(frozen=True)
class RecoveryCallbacks:
    """What a change of workers asks of the run.

    ``committed_steps()`` is the number of steps that this worker has committed, ``commits()`` the number of their phases: a step of
    a loop over ``run.steps`` may have several, and a phase is what commits on every worker or on none. ``has_averages()`` says
    whether this worker has the averages of the next phase but no confirmation that all others have them. ``confirm_step()`` lets
    it commit that phase; ``discard_step()`` undoes what has not committed. ``rebind(comm)`` lets all parts use the comm of the new
    generation; all workers call it. ``start()`` runs in the first generation, on all workers: it compares their models and gives
    all of them the same initial state. ``aligned(comm)`` is called last, on all workers, when a generation has begun.
    """

    committed_steps: Callable[[], int]
    commits: Callable[[], int]
    has_averages: Callable[[], bool]
    confirm_step: Callable[[], None]
    discard_step: Callable[[], None]
    rebind: Callable[[Comm], None]
    start: Callable[[], None]
    aligned: Callable[[Comm], None]


class Recovery:
    """Changes of the worker group, and collectives that survive them."""

    def __init__(
        self,
        workers: WorkerGroup,
        journal: CollectiveJournal,
        state: Stateful,
        device: torch.device,
        callbacks: RecoveryCallbacks,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder()
        self._workers, self._journal, self._state, self._device, self._callbacks = workers, journal, state, device, callbacks
        self._holds_state = False
        self.is_member = False
        """Whether this worker belongs to the current generation. False while it leaves one, and after it was dismissed."""

    def begin(self) -> None:
        """Share the initial state, or receive the state of a run that others have begun. All workers call it once."""
        if self._workers.link is None:
            self._callbacks.start()
            self.is_member = True
            return
        worker.step_now = self._callbacks.committed_steps  # shown if the script raises
        if not self._workers.is_newcomer:
            self.join(self._workers.comm)

    def join(self, comm: Comm) -> None:
        """Become a member of the generation that ``comm`` connects. A newcomer receives the state."""
        try:
            self._enter(comm)
        except PeerError as error:
            self.recover(error)

    def together(self, collective: Callable[[], T]) -> T:
        """Call ``collective`` on all workers, again after each recovery, until it is complete.

        If another worker had completed it before a worker was lost, this worker returns that worker's result.

        Returns:
            What ``collective`` returned: plain data (comm/plain_state.py), the same on every worker.
        """
        journal = self._journal
        while True:
            journal.enter()
            point = journal.inside
            try:
                result = collective()
            except PeerError as error:
                self.recover(error)
                if journal.passed >= point:
                    return cast(T, journal.results[point])
            else:
                journal.complete(result)
                return result

    def skip(self) -> None:
        """Count a collective point at which no worker has anything to do."""
        self._journal.skip()

    def recover(self, error: PeerError) -> None:
        """Form the next generation with the other survivors.

        Raises:
            PeerError: ``error``, if there is no agent.
        """
        if self._workers.link is None:
            raise error
        self._workers.link.report_lost(error)
        self.change_generation()

    def change_generation(self) -> None:
        """Leave this generation and enter the next. All members call it, after a loss or after the same step."""
        link = self._workers.link
        assert link is not None
        self.is_member = False
        with self._recorder.within(RECOVERY):
            self._workers.comm.close()  # first: if the device has failed it raises a DeviceError, and all other uses torch's error
            if not self._callbacks.has_averages():
                self._callbacks.discard_step()
            while True:
                try:
                    self._enter(link.next(self._steps()))
                    return
                except PeerError as error:
                    link.report_lost(error)
                    self._workers.comm.close()

    def _enter(self, comm: Comm) -> None:
        """Bring this worker to the point where the others are. If no member holds a state yet, all take rank 0's."""
        self._workers.comm = comm
        self._callbacks.rebind(comm)
        journal = self._journal
        commits = self._callbacks.commits() if self._holds_state else -1
        mine = WorkerProgress(commits, journal.passed, journal.inside, self._callbacks.has_averages())
        aligned = align(comm, mine, self._state.capture, journal.results, self._device)
        if aligned.state is not None:
            self._state.restore(aligned.state)
            journal.reset(aligned.passed)
            self._workers.is_newcomer = False
        elif self._workers.is_newcomer:
            raise LockstepError(
                "all workers that held the state of the run are lost. Start the run again: it resumes from a checkpoint."
            )
        elif not self._holds_state:
            self._callbacks.start()
        if aligned.confirmed:
            self._callbacks.confirm_step()
        elif mine.has_averages:
            self._callbacks.discard_step()
        if aligned.has_result:
            journal.complete(aligned.result)
        self._holds_state = True
        self._callbacks.aligned(comm)
        self.is_member = True

    def _steps(self) -> int:
        return self._callbacks.committed_steps() if self._holds_state else -1
