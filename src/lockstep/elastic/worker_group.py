"""Crew: the workers of a run, generation after generation. Owns the comm, and how one gives way to the next.

With an agent (``lockstep run``) a lost peer is recovered from: the survivors form the next generation, bring
everybody to the greatest committed step, and go on. Without one (a lone process, torchrun, mpirun) there is
nobody to ask, and the ``PeerError`` is raised. Knows the run only as a ``Holder`` of state.

    lost a peer, or a change is due -> give_up -> AgentLink.next -> open comm -> rebind -> align -> go on
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch

from lockstep.comm.base import Comm
from lockstep.comm.open_comm import open_comm
from lockstep.elastic.agent_link import AgentLink, Generation
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.transfer import Progress, align
from lockstep.errors import PeerError
from lockstep.gradients.control_word import CHANGE, STOP
from lockstep.launch import worker
from lockstep.world import AgentEndpoint, World

T = TypeVar("T")


class Holder(Protocol):
    """What a change of workers must carry over."""

    @property
    def committed_steps(self) -> int: ...

    def give_up(self) -> None:
        """The generation is over: what did not commit must leave no trace."""

    def rebind(self, comm: Comm) -> None:
        """Use this comm from now on. Collective."""

    def capture(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def agree(self) -> None:
        """At the very beginning: verify that all hold the same, and take rank 0's. Collective."""


class WorkerGroup:
    """``need_bytes(workers)``: what a worker's buckets will hold among so many; ``most``: how many can be used. All ranks must
    construct it alike.
    """

    def __init__(
        self,
        line: AgentEndpoint | None,
        device: torch.device,
        kind: str | None,
        timeout_s: float,
        need_bytes: Callable[[int], int],
        most: int | None = None,
    ) -> None:
        self._device, self._kind, self._need_bytes = device, kind, need_bytes
        self._timeout_s = timeout_s if line is None else min(timeout_s, line.hang_timeout_s)
        self._most = most or (line.start_size if line is not None else 0)
        self._holder: Holder | None = None
        self._holds_state = False
        self.journal = CollectiveJournal()
        self.generation = 0
        self.link = AgentLink(line, self._abort) if line is not None else None
        if self.link is None:
            self.comm = open_comm(device, timeout_s=timeout_s, kind=kind, need_bytes=need_bytes(World.detect().size))
        else:
            _leave_on_sigterm(self.link)
            self._joined = self._join(self.link)
        self.start_size = self.comm.size if line is None or not line.start_size else line.start_size
        """How many workers the run began with: newcomers must not take today's number for it."""

    @staticmethod
    def of(comm: Comm) -> WorkerGroup:
        """Workers that somebody else brought together: one generation, for ever."""
        workers = WorkerGroup.__new__(WorkerGroup)
        workers.comm, workers.link, workers.generation, workers.start_size = comm, None, 0, comm.size
        workers.journal = CollectiveJournal()
        return workers

    def begin(self, holder: Holder) -> None:
        """``holder`` is complete: share its state, or receive that of a run under way."""
        if self.link is None:
            holder.agree()
            return
        self._holder = holder
        worker.step_now = lambda: holder.committed_steps  # for what is told when the script raises
        try:
            self._enter(self._joined, self.comm)
        except PeerError as error:
            self.recover(error)

    def together(self, action: Callable[[], T]) -> T:
        """A collective action, again after each recovery, unless another worker had completed it: then its result counts.

        The result must be plain data (state.py), the same on every worker.
        """
        while True:
            self.journal.enter()
            site = self.journal.inside
            try:
                result = action()
            except PeerError as error:
                if self.link is None:
                    raise
                self.recover(error)
                if self.journal.passed >= site:
                    return cast(T, self.journal.results[site])
            else:
                self.journal.complete(result)
                return result

    def recover(self, error: PeerError) -> None:
        """A peer is lost: the survivors form the next generation. ``error`` is raised where nobody can help."""
        if self.link is None:
            raise error
        self.link.lost(error)
        self.move()

    def move(self) -> None:
        """Leave this generation and enter the next."""
        link, holder = self.link, self._holder
        assert link is not None
        assert holder is not None
        holder.give_up()
        while True:
            self.comm.close()
            generation = link.next(self._steps())
            try:
                self._enter(generation, link.open(*self._how(generation)))
                return
            except PeerError as error:
                link.lost(error)

    def requests(self) -> int:
        """What the agent has told this worker, for the others to hear (grads/control.py)."""
        link = self.link
        if link is None:
            return 0
        return (CHANGE if link.wants_change else 0) | (STOP if link.stopping else 0)

    def _join(self, link: AgentLink) -> Generation:
        """Be taken into the run, by whichever generation stands."""
        generation = link.join(self._most)
        while True:
            try:
                self.comm = link.open(*self._how(generation))
                return generation
            except PeerError as error:
                link.lost(error)
                generation = link.next(-1)

    def _how(self, generation: Generation) -> tuple[Generation, torch.device, str | None, int, float]:
        return generation, self._device, self._kind, self._need_bytes(generation.size), self._timeout_s

    def _enter(self, generation: Generation, comm: Comm) -> None:
        """Everybody holds the state of the greatest committed step; at the very beginning, rank 0's."""
        holder = self._holder
        assert holder is not None
        self.comm = comm
        holder.rebind(comm)
        mine = Progress(self._steps(), self.journal.passed, self.journal.inside)
        aligned = align(comm, mine, holder.capture, self.journal.results, self._device)
        if aligned.state is not None:
            holder.restore(aligned.state)
            # A newcomer comes to where the others are; one that missed a commit is in the turn of that commit, before all sites.
            self.journal.start_over(aligned.passed if mine.steps < 0 else 0)
        elif not self._holds_state:
            holder.agree()
        if aligned.is_told:
            self.journal.complete(aligned.result)
        self._holds_state = True
        self.generation = generation.number

    def _steps(self) -> int:
        return self._holder.committed_steps if self._holder is not None and self._holds_state else -1

    def _abort(self, why: str) -> None:
        """From the link's thread: somebody of this generation is gone."""
        comm = getattr(self, "comm", None)
        if comm is not None:
            comm.abort(why)


def _leave_on_sigterm(link: AgentLink) -> None:
    """SIGTERM to one worker: it finishes the step and leaves. A handler of the user's own stays."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None if link.stopping else link.leave())
