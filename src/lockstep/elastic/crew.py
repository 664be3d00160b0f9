"""Crew: the workers of a run, generation after generation. Owns the comm, and how one gives way to the next.

With an agent (``lockstep run``) a lost peer is recovered from: the survivors form the next generation, bring
everybody to the greatest committed step, and go on. Without one (a lone process, torchrun, mpirun) there is
nobody to ask, and the ``PeerError`` is raised. Knows the run only as a ``Holder`` of state.

    lost a peer, or a change is due -> give_up -> Session.next -> open comm -> rebind -> align -> go on
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch

from lockstep.comm.base import Comm
from lockstep.comm.choose import open_comm
from lockstep.elastic.acts import Acts
from lockstep.elastic.session import Generation, Session
from lockstep.elastic.transfer import Place, align
from lockstep.errors import PeerError
from lockstep.grads.control import CHANGE, STOP
from lockstep.launch import worker
from lockstep.world import Line, World

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


class Crew:
    """``need_bytes(workers)``: what a worker's buckets will hold among so many; ``most``: how many can be used. All ranks must
    construct it alike.
    """

    def __init__(
        self,
        line: Line | None,
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
        self.acts = Acts()
        self.generation = 0
        self.session = Session(line, self._abort) if line is not None else None
        if self.session is None:
            self.comm = open_comm(device, timeout_s=timeout_s, kind=kind, need_bytes=need_bytes(World.detect().size))
        else:
            _leave_on_sigterm(self.session)
            self._joined = self._join(self.session)
        self.start_size = self.comm.size if line is None or not line.start_size else line.start_size
        """How many workers the run began with: newcomers must not take today's number for it."""

    @staticmethod
    def of(comm: Comm) -> Crew:
        """Workers that somebody else brought together: one generation, for ever."""
        crew = Crew.__new__(Crew)
        crew.comm, crew.session, crew.generation, crew.start_size = comm, None, 0, comm.size
        crew.acts = Acts()
        return crew

    def begin(self, holder: Holder) -> None:
        """``holder`` is complete: share its state, or receive that of a run under way."""
        if self.session is None:
            holder.agree()
            return
        self._holder = holder
        worker.step_now = lambda: holder.committed_steps  # for what is told when the script raises
        try:
            self._enter(self._joined, self.comm)
        except PeerError as error:
            self.recover(error)

    def together(self, act: Callable[[], T]) -> T:
        """A collective act, again after each recovery, unless another worker had completed it: then its result counts.

        The result must be plain data (state.py), the same on every worker.
        """
        while True:
            self.acts.enter()
            site = self.acts.inside
            try:
                result = act()
            except PeerError as error:
                if self.session is None:
                    raise
                self.recover(error)
                if self.acts.passed >= site:
                    return cast(T, self.acts.results[site])
            else:
                self.acts.complete(result)
                return result

    def recover(self, error: PeerError) -> None:
        """A peer is lost: the survivors form the next generation. ``error`` is raised where nobody can help."""
        if self.session is None:
            raise error
        self.session.lost(error)
        self.move()

    def move(self) -> None:
        """Leave this generation and enter the next."""
        session, holder = self.session, self._holder
        assert session is not None
        assert holder is not None
        holder.give_up()
        while True:
            self.comm.close()
            generation = session.next(self._steps())
            try:
                self._enter(generation, session.open(*self._how(generation)))
                return
            except PeerError as error:
                session.lost(error)

    def wishes(self) -> int:
        """What the agent has told this worker, for the others to hear (grads/control.py)."""
        session = self.session
        if session is None:
            return 0
        return (CHANGE if session.wants_change else 0) | (STOP if session.stopping else 0)

    def _join(self, session: Session) -> Generation:
        """Be taken into the run, by whichever generation stands."""
        generation = session.join(self._most)
        while True:
            try:
                self.comm = session.open(*self._how(generation))
                return generation
            except PeerError as error:
                session.lost(error)
                generation = session.next(-1)

    def _how(self, generation: Generation) -> tuple[Generation, torch.device, str | None, int, float]:
        return generation, self._device, self._kind, self._need_bytes(generation.size), self._timeout_s

    def _enter(self, generation: Generation, comm: Comm) -> None:
        """Everybody holds the state of the greatest committed step; at the very beginning, rank 0's."""
        holder = self._holder
        assert holder is not None
        self.comm = comm
        holder.rebind(comm)
        mine = Place(self._steps(), self.acts.passed, self.acts.inside)
        aligned = align(comm, mine, holder.capture, self.acts.results, self._device)
        if aligned.state is not None:
            holder.restore(aligned.state)
            # A newcomer comes to where the others are; one that missed a commit is in the turn of that commit, before all sites.
            self.acts.start_over(aligned.passed if mine.steps < 0 else 0)
        elif not self._holds_state:
            holder.agree()
        if aligned.is_told:
            self.acts.complete(aligned.result)
        self._holds_state = True
        self.generation = generation.number

    def _steps(self) -> int:
        return self._holder.committed_steps if self._holder is not None and self._holds_state else -1

    def _abort(self, why: str) -> None:
        """From the session's thread: somebody of this generation is gone."""
        comm = getattr(self, "comm", None)
        if comm is not None:
            comm.abort(why)


def _leave_on_sigterm(session: Session) -> None:
    """SIGTERM to one worker: it finishes the step and leaves. A handler of the user's own stays."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None if session.stopping else session.leave())
