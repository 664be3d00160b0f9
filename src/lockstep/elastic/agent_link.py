"""AgentLink: a worker's connection to its agent. It joins the run, learns of lost workers, and opens each generation's comm.

It performs what plan/membership.py decided and decides nothing. A thread reads the agent's packets, because an abort must
break waits of the main thread at once. AgentLink knows nothing of models, steps or data.
"""

from __future__ import annotations

import json
import math
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm.agent_socket import agent_socket
from lockstep.comm.agent_store import AgentStore
from lockstep.comm.base import Comm
from lockstep.comm.open_comm import open_comm
from lockstep.comm.store import StoreWaitError
from lockstep.errors import PeerError, UsageError
from lockstep.world import AgentEndpoint, World

_PART_CHARS = 1 << 16
"""Of a recorded result, as JSON. A packet must fit into the buffer of a socket, and quotes and backslashes count twice."""


@dataclass(frozen=True)
class Generation:
    """One fixed set of workers: its number, the members' ids in rank order, this worker's rank among them, and their store.

    ``broken`` is set when the agent reports that a member is lost.
    """

    number: int
    members: tuple[int, ...]
    rank: int
    store: AgentStore = field(compare=False)
    broken: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class CommOptions:
    """How each generation's comm is opened.

    ``bucket_bytes(workers)`` is the memory that one worker's buckets need if the run has that many workers. ``place()`` says where
    in the script this worker is, for errors.
    """

    device: torch.device
    kind: str | None
    timeout_s: float
    bucket_bytes: Callable[[int], int]
    place: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class _Prepare:
    """The agent's answer to a newcomer's first request to join: a generation of ``size`` workers exists."""

    size: int


@dataclass(frozen=True)
class _SkipLoop:
    """The agent's answer to a newcomer that waits at loop ``stage``: that loop is over."""

    stage: int


@dataclass(frozen=True)
class _Recalled:
    """A recorded result."""

    index: int
    text: str


@dataclass(frozen=True)
class _LatestEpoch:
    """Where the current epoch of loop ``number`` over ``run.epochs`` began. None: the run has not reported that loop."""

    number: int
    epoch: dict[str, Any] | None


_Answer = Generation | _Prepare | _SkipLoop | _Recalled | _LatestEpoch


class AgentLink:
    """The connection of this worker to its agent.

    A worker that is started while the run is under way is a *newcomer*: ``join`` returns None. It then runs its script without
    being a member. It passes the epochs and loops that are over (``latest_epoch``; ``join_loop`` returns None), and gets the
    results of collectives between loops from the agent (``recall``), until ``join_loop`` returns the comm of a generation that it
    is a member of.
    """

    def __init__(self, endpoint: AgentEndpoint, options: CommOptions) -> None:
        self._endpoint, self._options = endpoint, options
        self._socket = agent_socket(endpoint.fd)
        self.send = self._socket.send
        self._answers: queue.Queue[_Answer | None] = queue.Queue()  # None: dismissed
        self._newest: Generation | None = None
        self._current: Generation | None = None
        self._comm: Comm | None = None
        self._alone_until: dict[int, float] = {}  # members that have announced work -> time.monotonic
        self._parts: list[str] = []
        self.run_size = 0
        """How many members the run has: for a newcomer, when it asked to join; for a member, in its newest generation."""
        self.wants_change = False
        """Whether a worker waits to join or leave: all members should end this generation after the same step."""
        self.stopping = False
        """Whether the agent has asked the whole run to end."""
        _leave_on_sigterm(self)
        self._socket.listen(self._on_packet)

    @property
    def generation(self) -> int:
        return self._current.number if self._current is not None else 0

    def join(self, max_workers: int, gpu: str = "") -> Comm | None:
        """Ask to belong to the run, which can use ``max_workers``. Blocks until a generation includes this worker.

        Args:
            max_workers: The number of lanes.
            gpu: The name of this worker's GPU if no other worker may use it, else empty (comm/open_comm.py: own_gpu).

        Returns:
            The comm of that generation, or of a later one if a member was lost meanwhile. None if this worker is a newcomer: then
            ``run_size`` is the number of members.

        Raises:
            UsageError: A ``Run`` of this process has joined before. The agent has one run, and its workers are its members.
            SystemExit: The agent has dismissed this worker.
        """
        if self._socket.has_joined:
            raise UsageError(
                "this script has constructed a second Run: under `lockstep run` each worker has one, also after run.close(). Train "
                "all models in one Run, or start a script of its own for each Run."
            )
        self._socket.has_joined = True
        self.send(type="join", most=max_workers, stage=-1, gpu=gpu)
        answer = self._await(Generation, _Prepare)
        if isinstance(answer, _Prepare):
            self.run_size = answer.size
            return None
        assert isinstance(answer, Generation)
        return self._open(answer, committed_steps=-1)

    def join_loop(self, stage: int) -> Comm | None:
        """Ask to become a member in loop number ``stage`` of the script. A newcomer calls it at the entry of each loop.

        A spare waits here, without using the CPU, until a member is lost or the members enter their next loop.

        Returns:
            The comm of the first generation that includes this worker; None if the run has passed that loop.

        Raises:
            SystemExit: The agent has dismissed this worker.
        """
        self.send(type="join", stage=stage)
        answer = self._await(Generation, _SkipLoop)
        return self._open(answer, committed_steps=-1) if isinstance(answer, Generation) else None

    def enter_stage(self, stage: int) -> None:
        """Tell the agent that the run enters loop number ``stage``. Rank 0 calls it, also after each change of generation."""
        self.send(type="stage", stage=stage)

    def enter_epoch(self, number: int, epoch: dict[str, Any]) -> None:
        """Tell the agent where the current epoch of loop ``number`` over ``run.epochs`` began. Rank 0 calls it."""
        self.send(type="epoch", number=number, **epoch)

    def latest_epoch(self, number: int) -> dict[str, Any] | None:
        """Return what rank 0 has last given to ``enter_epoch`` for this loop, or None. A newcomer calls it.

        Raises:
            SystemExit: The agent has dismissed this worker.
        """
        self.send(type="latest epoch", number=number)
        while True:
            answer = self._await(_LatestEpoch)
            if isinstance(answer, _LatestEpoch) and answer.number == number:
                return answer.epoch

    def record(self, index: int, text: str) -> None:
        """Let the agent keep result number ``index`` (training/progress.py). Rank 0 calls it."""
        encoded = json.dumps(text)
        parts = [encoded[first : first + _PART_CHARS] for first in range(0, len(encoded), _PART_CHARS)]
        for part, data in enumerate(parts):
            self.send(type="recorded", index=index, part=part, parts=len(parts), data=data)

    def recall(self, index: int) -> str:
        """Return the recorded result number ``index``. A newcomer calls it; blocks until it is there.

        Raises:
            SystemExit: The agent has dismissed this worker.
        """
        self.send(type="recall", index=index)
        while True:
            answer = self._await(_Recalled)
            if isinstance(answer, _Recalled) and answer.index == index:
                return answer.text

    def next(self, committed_steps: int) -> Comm:
        """Leave the current generation and wait for the next one.

        Args:
            committed_steps: How many steps this worker has committed; -1 if it holds no state.

        Returns:
            The comm of the next generation.

        Raises:
            SystemExit: The agent has dismissed this worker.
        """
        return self._open(self._leave_generation(committed_steps), committed_steps)

    def report_lost(self, error: PeerError) -> None:
        """Tell the agent why a wait failed. The agent kills a worker that others blame for a whole timeout without progress."""
        current = self._current
        assert current is not None
        if current.broken.is_set():
            return  # the agent knows already, and knows more
        blamed = [current.members[rank] for rank in error.ranks if rank < current.size]
        self.send(type="lost", generation=current.number, blamed=blamed, hung=error.hung, why=str(error)[:500])

    def begin_alone(self, what: str, limit_s: float) -> None:
        """Announce work of this worker alone. For ``limit_s`` the others wait for it, and the agent does not take it for hung."""
        self.send(type="alone", what=what, limit_s=limit_s)

    def end_alone(self) -> None:
        """The announced work is done: the timeout of the others begins anew."""
        self.send(type="alone ended")

    def request_leave(self) -> None:
        """Tell the agent that this worker wants to leave after the current step."""
        self.send(type="leaving")

    def _open(self, generation: Generation, committed_steps: int) -> Comm:
        """Open the comm of ``generation``, or of a later one if its members do not all arrive."""
        while True:
            try:
                self._comm = comm = self._open_comm(generation)
                weakref.finalize(comm, generation.store.abort, "its comm is closed")  # C++ does not keep the store alive
                self._postpone_timeouts()
                if generation.broken.is_set():  # the abort may have come before there was a comm to abort
                    comm.abort(f"generation {generation.number} has lost a member")
                return comm
            except PeerError as error:
                self.report_lost(error)
                generation = self._leave_generation(committed_steps)

    def _open_comm(self, generation: Generation) -> Comm:
        """Open a comm with the other members. All members must call it.

        Raises:
            PeerError: A member was lost before all had arrived.
        """
        options = self._options
        rank, size = generation.rank, generation.size
        name = f"agent:{generation.number}"
        world = World(
            rank,
            size,
            source="lockstep run",
            rendezvous=name,
            run_id=f"g{generation.number}",
            machine=self._endpoint.machine,
        )
        if size == 1:
            return open_comm(options.device, world=world, timeout_s=options.timeout_s, kind=options.kind)
        try:
            return open_comm(
                options.device,
                world=world,
                timeout_s=options.timeout_s,
                kind=options.kind,
                need_bytes=options.bucket_bytes(size),
                store=generation.store,
                place=options.place,
            )
        except StoreWaitError as error:
            raise PeerError(f"the members of generation {generation.number} did not all arrive: {error}") from error

    def _leave_generation(self, committed_steps: int) -> Generation:
        assert self._current is not None
        self.send(type="ready", generation=self._current.number, step=committed_steps)
        formed = self._await(Generation)
        assert isinstance(formed, Generation)
        return formed

    def _await(self, *kinds: type[_Answer]) -> _Answer:
        """Wait for an answer of one of these kinds; others are out of date. Raises SystemExit if this worker is dismissed."""
        while True:
            answer = self._answers.get()
            if answer is None:
                self._answers.put(None)  # this worker may ask again, from an exit handler for example
                raise SystemExit(0)
            if isinstance(answer, kinds):
                if isinstance(answer, Generation):
                    self._current, self.run_size = answer, answer.size
                return answer

    def _on_packet(self, packet: dict[str, Any]) -> None:
        newest = self._newest
        match packet["type"]:
            case "stored":
                if newest is not None and packet["generation"] == newest.number:
                    newest.store.answer(packet)
            case "generation":
                self._on_generation(packet["number"], tuple(packet["members"]))
            case "abort" if newest is not None and packet["generation"] == newest.number:
                newest.broken.set()
                newest.store.abort(packet["why"])
                if self._comm is not None and self._current is newest:
                    self._comm.abort(packet["why"])
            case "alone":
                self._alone_until[packet["worker"]] = time.monotonic() + packet["for_s"]
                self._postpone_timeouts()
            case "change":
                self.wants_change = True
            case "stop":
                self.stopping = True
            case "dismiss":
                self._answers.put(None)
            case "prepare":
                self._answers.put(_Prepare(packet["size"]))
            case "pass":
                self._answers.put(_SkipLoop(packet["stage"]))
            case "latest epoch":
                self._answers.put(_LatestEpoch(packet["number"], packet["epoch"]))
            case "recalled":
                self._on_part(packet)

    def _on_generation(self, number: int, members: tuple[int, ...]) -> None:
        if self._newest is not None:
            self._newest.store.abort(f"generation {self._newest.number} is over")
        self.wants_change = False
        store = AgentStore(self.send, number, self._options.timeout_s)
        self._newest = Generation(number, members, members.index(self._endpoint.worker), store)
        self._alone_until = {id: until for id, until in self._alone_until.items() if id in members}
        self._answers.put(self._newest)

    def _postpone_timeouts(self) -> None:
        """Let no wait time out while another member works alone."""
        if self._comm is not None:
            self._comm.postpone_timeouts(max(list(self._alone_until.values()), default=-math.inf))

    def _on_part(self, packet: dict[str, Any]) -> None:
        if packet["part"] == 0:
            self._parts = []
        self._parts.append(packet["data"])
        if len(self._parts) == packet["parts"]:
            self._answers.put(_Recalled(packet["index"], json.loads("".join(self._parts))))
            self._parts = []


def _leave_on_sigterm(link: AgentLink) -> None:
    """Let a worker that gets SIGTERM finish its step and leave. A handler that the user has installed stays."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None if link.stopping else link.request_leave())
