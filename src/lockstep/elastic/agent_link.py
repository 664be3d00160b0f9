"""AgentLink: a worker's connection to its agent. It joins the run, learns of lost workers, and opens each generation's comm.

It performs what plan/membership.py decided and decides nothing. A thread reads the agent's packets, because an abort must
break waits of the main thread at once. AgentLink knows nothing of models, steps or data.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lockstep.comm.base import Comm
from lockstep.comm.open_comm import open_comm
from lockstep.comm.store import AbortableStore, StoreWaitError
from lockstep.errors import PeerError
from lockstep.world import AgentEndpoint, World


@dataclass(frozen=True)
class Generation:
    """One fixed set of workers: its number, the members' ids in rank order, and this worker's rank among them.

    ``broken`` is set when the agent reports that a member is lost.
    """

    number: int
    members: tuple[int, ...]
    rank: int
    broken: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class CommOptions:
    """How each generation's comm is opened.

    ``bucket_bytes(workers)`` is the memory that one worker's buckets need if the run has that many workers.
    """

    device: torch.device
    kind: str | None
    timeout_s: float
    bucket_bytes: Callable[[int], int]


class AgentLink:
    """The connection of this worker to its agent."""

    def __init__(self, endpoint: AgentEndpoint, options: CommOptions) -> None:
        self._endpoint, self._options = endpoint, options
        self._socket = socket.socket(fileno=endpoint.fd)
        self._formed: queue.Queue[Generation | None] = queue.Queue()
        self._newest: Generation | None = None
        self._current: Generation | None = None
        self._comm: Comm | None = None
        self._store: AbortableStore | None = None
        self.wants_change = False
        """Whether a worker waits to join or leave: all members should end this generation after the same step."""
        self.stopping = False
        """Whether the agent has asked the whole run to end."""
        _leave_on_sigterm(self)
        threading.Thread(target=self._listen, name="lockstep-agent-link", daemon=True).start()

    @property
    def generation(self) -> int:
        return self._current.number if self._current is not None else 0

    def join(self, max_workers: int) -> Comm:
        """Ask to belong to the run, which can use ``max_workers``. Blocks until a generation includes this worker.

        Returns:
            The comm of that generation, or of a later one if a member was lost meanwhile.
        """
        self.send(type="join", most=max_workers)
        return self._open(self._await(), committed_steps=-1)

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

    def request_leave(self) -> None:
        """Tell the agent that this worker wants to leave after the current step."""
        self.send(type="leaving")

    def send(self, **packet: object) -> None:
        """Send a packet to the agent. Any thread may call it. If the agent is gone, this worker is about to end too."""
        try:
            self._socket.send(json.dumps(packet).encode())
        except OSError:
            pass

    def _open(self, generation: Generation, committed_steps: int) -> Comm:
        """Open the comm of ``generation``, or of a later one if its members do not all arrive."""
        while True:
            try:
                self._comm = comm = self._open_comm(generation)
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
        path = f"{self._endpoint.run_dir}/store-{generation.number}"
        rank, size = generation.rank, generation.size
        world = World(rank, size, rank, size, source="lockstep run", rendezvous=f"file://{path}", run_id=f"g{generation.number}")
        if size == 1:
            return open_comm(options.device, world=world, timeout_s=options.timeout_s, kind=options.kind)
        try:
            self._store = AbortableStore(path, size, generation.broken, options.timeout_s)
            return open_comm(
                options.device,
                world=world,
                timeout_s=options.timeout_s,
                kind=options.kind,
                need_bytes=options.bucket_bytes(size),
                store=self._store,
            )
        except StoreWaitError as error:
            raise PeerError(f"the members of generation {generation.number} did not all arrive: {error}") from error

    def _leave_generation(self, committed_steps: int) -> Generation:
        assert self._current is not None
        self.send(type="ready", generation=self._current.number, step=committed_steps)
        return self._await()

    def _await(self) -> Generation:
        formed = self._formed.get()
        if formed is None:
            raise SystemExit(0)  # the agent has dismissed this worker
        self._current = formed
        return formed

    def _listen(self) -> None:
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except OSError:
                return
            if not data:
                return
            packet = json.loads(data)
            if packet["type"] == "generation":
                members = tuple(packet["members"])
                self.wants_change = False
                self._newest = Generation(packet["number"], members, members.index(self._endpoint.worker))
                self._formed.put(self._newest)
            elif packet["type"] == "abort" and self._newest is not None and packet["generation"] == self._newest.number:
                self._newest.broken.set()
                if self._comm is not None and self._current is self._newest:
                    self._comm.abort(packet["why"])
            elif packet["type"] == "change":
                self.wants_change = True
            elif packet["type"] == "stop":
                self.stopping = True
            elif packet["type"] == "dismiss":
                self._formed.put(None)


def _leave_on_sigterm(link: AgentLink) -> None:
    """Let a worker that gets SIGTERM finish its step and leave. A handler that the user has installed stays."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None if link.stopping else link.request_leave())
