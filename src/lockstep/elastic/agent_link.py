"""Session: a worker's line to its agent. Joins, hears of deaths, and is told who belongs to the next generation.

Performs what plan/membership.py decided; decides nothing. A thread reads what the agent says: an
abort must break waits of the main thread at once. Knows nothing of models, steps or data.
"""

from __future__ import annotations

import json
import queue
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
    """One world: its number, its members' ids in rank order, which of them this worker is, and whether it is broken."""

    number: int
    members: tuple[int, ...]
    rank: int
    broken: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def size(self) -> int:
        return len(self.members)


class AgentLink:
    """``on_abort(why)`` is called from the reading thread when the current generation is broken."""

    def __init__(self, line: AgentEndpoint, on_abort: Callable[[str], None]) -> None:
        self.line = line
        self._socket = socket.socket(fileno=line.fd)
        self._on_abort = on_abort
        self._formed: queue.Queue[Generation | None] = queue.Queue()
        self._newest: Generation | None = None
        self._current: Generation | None = None
        self._store: AbortableStore | None = None
        self._changing = False
        self.stopping = False
        """Whether the whole run was told to end."""
        threading.Thread(target=self._listen, name="lockstep-link", daemon=True).start()

    @property
    def wants_change(self) -> bool:
        """Whether somebody waits to join or leave: this generation should end after the same step everywhere."""
        return self._changing

    def join(self, most: int) -> Generation:
        """Ask to belong to the run, which can use ``most`` workers; blocks until a generation is formed with this one."""
        self.say(type="join", most=most)
        return self._await()

    def next(self, step: int) -> Generation:
        """This worker is through with the current generation, having committed ``step`` steps. Blocks until the next is formed."""
        assert self._current is not None
        self.say(type="ready", generation=self._current.number, step=step)
        return self._await()

    def open(self, generation: Generation, device: torch.device, kind: str | None, need_bytes: int, timeout_s: float) -> Comm:
        """The comm of a generation. Collective. ``PeerError`` where a member is gone before all have met."""
        place = f"{self.line.run_dir}/store-{generation.number}"
        rank, size = generation.rank, generation.size
        world = World(rank, size, rank, size, source="lockstep run", rendezvous=f"file://{place}", run_id=f"g{generation.number}")
        try:
            if size == 1:
                return open_comm(device, world=world, timeout_s=timeout_s, kind=kind)
            self._store = AbortableStore(place, size, generation.broken, timeout_s)
            return open_comm(device, world=world, timeout_s=timeout_s, kind=kind, need_bytes=need_bytes, store=self._store)
        except RuntimeError as error:
            if isinstance(error, PeerError) or not isinstance(error, StoreWaitError):
                raise
            raise PeerError(f"the members of generation {generation.number} did not all meet: {error}") from error

    def lost(self, error: PeerError) -> None:
        """Tell why a wait broke; whoever stood still for the whole timeout will be looked at, and killed."""
        current = self._current
        assert current is not None
        if current.broken.is_set():
            return  # the agent knows more than we do
        blamed = [current.members[rank] for rank in error.ranks if rank < current.size]
        self.say(type="lost", generation=current.number, blamed=blamed, hung=error.hung, why=str(error)[:500])

    def leave(self) -> None:
        """This worker wants to go, after the step it is in."""
        self.say(type="leaving")

    def say(self, **packet: object) -> None:
        """Any thread. An agent that is gone takes us with it; until then there is nobody to tell."""
        try:
            self._socket.send(json.dumps(packet).encode())
        except OSError:
            pass

    def _await(self) -> Generation:
        formed = self._formed.get()
        if formed is None:
            raise SystemExit(0)  # dismissed
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
                self._changing = False
                self._newest = Generation(packet["number"], members, members.index(self.line.worker))
                self._formed.put(self._newest)
            elif packet["type"] == "abort" and self._newest is not None and packet["generation"] == self._newest.number:
                self._newest.broken.set()
                self._on_abort(packet["why"])
            elif packet["type"] == "change":
                self._changing = True
            elif packet["type"] == "stop":
                self.stopping = True
            elif packet["type"] == "dismiss":
                self._formed.put(None)
