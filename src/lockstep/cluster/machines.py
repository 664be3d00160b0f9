"""RemoteMachines: the machines of a run as its head sees them: who has room for which worker, and a connection to each agent.

Sends what the supervisor asks for to the right agents. Decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lockstep.cluster.channel import Channel
from lockstep.cluster.messages import Message
from lockstep.cluster.protocol import Registration, spawn_message
from lockstep.cluster.run_memory import KeptPackets
from lockstep.launcher.environment import Placement, RunSettings
from lockstep.launcher.packets import Packet
from lockstep.plan.membership_spares import device_of

_FRESH_S = 2.0
"""An answer to the question how long workers have been idle says nothing about a later time."""


@dataclass(eq=False)
class Machine:
    """A machine whose agent is connected. ``workers``: worker -> its place among the ``room`` of this machine.

    A spare may share its place with another worker.
    """

    given: Registration
    channel: Channel
    heard_at: float
    sent_at: float
    workers: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    is_leaving: bool = False

    @property
    def name(self) -> str:
        return self.given.machine

    @property
    def free(self) -> list[int]:
        """The places that no worker has."""
        return [] if self.is_leaving else [place for place in range(self.given.room) if place not in self.workers.values()]

    def send(self, message: Message, now: float) -> None:
        self.channel.send(message)
        self.sent_at = now


class RemoteMachines:
    def __init__(self) -> None:
        self._machines: dict[Machine, None] = {}  # in the order in which they came
        self._names: set[str] = set()
        self._of: dict[int, Machine] = {}
        self._was_on: dict[int, Machine] = {}
        self._idle_s: dict[int, float] = {}
        self._asked_at = float("-inf")
        self._kept = KeptPackets()
        self._starts = 0
        self.now = 0.0
        """When messages are sent. The head sets it in every iteration of its loop."""

    # -- which machines there are --------------------------------------------------------------------

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self._machines))

    def __len__(self) -> int:
        return len(self._machines)

    def __contains__(self, machine: Machine) -> bool:
        return machine in self._machines

    def has_name(self, name: str) -> bool:
        return name in self._names

    def newest(self, count: int, address: str) -> list[Machine]:
        """The ``count`` machines that have come last and are not at this address."""
        others = (machine for machine in reversed(self._machines) if machine.given.address != address)
        return list(itertools.islice(others, count))

    @property
    def room(self) -> int:
        """How many workers all machines start."""
        return sum(0 if machine.is_leaving else machine.given.room for machine in self._machines)

    @property
    def threads(self) -> int:
        """How many threads each worker has: the same on all machines, because the bits of a result may depend on it."""
        return min((machine.given.threads for machine in self._machines), default=1)

    def add(self, machine: Machine) -> None:
        """The machine of the head comes first: of two halves of a run, the one with the first member may continue."""
        channel = machine.channel
        is_here = channel.local_address is not None and channel.local_address.host == channel.peer_address.host
        self._machines[machine] = None
        if is_here:
            self._machines = {machine: None, **self._machines}
        self._names.add(machine.name)

    def adopt(self, machine: Machine, workers: Iterable[int]) -> None:
        """These workers run on the machine already."""
        for place, id in enumerate(workers):
            machine.workers[id] = place
            self._of[id] = self._was_on[id] = machine
        machine.pids = {each.id: each.pid for each in machine.given.report.workers if each.pid is not None}

    def remove(self, machine: Machine) -> tuple[int, ...]:
        """The machine is gone. Returns its workers."""
        del self._machines[machine]
        self._names.discard(machine.name)
        for id in machine.workers:
            self._of.pop(id, None)
        return tuple(machine.workers)

    def started(self, machine: Machine, worker: int, pid: int) -> None:
        machine.pids[worker] = pid

    def gone(self, worker: int) -> None:
        """The process of the worker is gone."""
        machine = self._of.pop(worker, None)
        if machine is not None:
            machine.workers.pop(worker, None)
            machine.pids.pop(worker, None)

    def has(self, machine: Machine, worker: int) -> bool:
        """Whether the worker runs on this machine."""
        return self._of.get(worker) is machine

    def note_idle(self, idle_s: dict[str, float]) -> None:
        self._idle_s.update({int(id): idle for id, idle in idle_s.items()})

    # -- what the supervisor asks for (launcher/local_machine.py: Machines) ------------------------------

    holds_terminal = False

    @property
    def ids(self) -> list[int]:
        return list(self._of)

    def pid(self, id: int) -> int | None:
        machine = self._of.get(id)
        return None if machine is None else machine.pids.get(id)

    def host(self, id: int) -> str:
        return self._was_on[id].name

    def log(self, id: int) -> str:
        return f"{self._was_on[id].name}:{self._was_on[id].given.folder}/workers/{id}/log.txt"

    def stack(self, id: int) -> str:
        return f"{self._was_on[id].name}:{self._was_on[id].given.folder}/workers/{id}/stack.txt"

    def spawn(self, ids: Sequence[int], settings: RunSettings, *, are_spares: bool = False) -> dict[int, int]:
        """Each worker gets a free place. Its rank is the number of that place among those of all machines.

        A worker for which there is no place gets no rank: its machine was lost before it was started. A spare goes where most
        places are free; if none is free, it shares a place on the machine with the fewest spares.
        """
        chosen = self._place_spares(ids) if are_spares else self._place(ids)
        first, ranks = self.room if are_spares else 0, dict[int, int]()
        placed: list[tuple[Machine, dict[int, int]]] = []
        for machine in self._machines:
            mine = chosen.get(machine, {})
            ranks |= {id: first + place for id, place in mine.items()}
            placed.append((machine, mine))
            first += machine.given.room
        if not ranks:
            return {}
        master = next(iter(self._machines)).given
        port = master.master_ports[self._starts % len(master.master_ports)] if master.master_ports else 0
        for number, (machine, mine) in enumerate(placed):
            if mine:
                room, address = machine.given.room, machine.given.address
                places = {
                    id: Placement(
                        ranks[id],
                        max(settings.size, ranks[id] + 1),
                        room,
                        master.address,
                        port,
                        number,
                        len(self._machines),
                        address,
                        is_spare=are_spares,
                    )
                    for id in mine
                }
                machine.send(spawn_message(settings, places), self.now)
        return ranks

    def _place(self, ids: Sequence[int]) -> dict[Machine, dict[int, int]]:
        """The first free places, on machines that have less workers than room if possible: a spare may have become a member."""
        free = {machine: machine.free for machine in self._machines}
        missing = {machine: max(0, machine.given.room - len(machine.workers)) for machine in free}
        places = [(machine, place) for machine in free for place in free[machine][: missing[machine]]]
        places += [(machine, place) for machine in free for place in free[machine][missing[machine] :]]
        return self._put(dict(zip(ids, places, strict=False)))

    def _place_spares(self, ids: Sequence[int]) -> dict[Machine, dict[int, int]]:
        usable = [machine for machine in self._machines if machine.given.room and not machine.is_leaving]
        chosen: dict[Machine, dict[int, int]] = {}
        for id in ids if usable else ():
            machine = max(usable, key=lambda machine: machine.given.room - len(machine.workers))
            taken = list(machine.workers.values())
            mine = self._put({id: (machine, min(range(machine.given.room), key=taken.count))})
            chosen[machine] = chosen.get(machine, {}) | mine[machine]
        return chosen

    def _put(self, where: dict[int, tuple[Machine, int]]) -> dict[Machine, dict[int, int]]:
        chosen: dict[Machine, dict[int, int]] = {}
        for id, (machine, place) in where.items():
            machine.workers[id] = chosen.setdefault(machine, {})[id] = place
            self._of[id] = self._was_on[id] = machine
        return chosen

    def device(self, id: int, gpu: str) -> tuple[str, int]:
        machine = self._of.get(id)
        return ("", 0) if machine is None else device_of(machine.name, machine.given.room, gpu)

    def send(self, ids: Sequence[int], packet: Packet) -> None:
        """One message per machine, however many of its workers get the packet."""
        workers: dict[Channel, tuple[Machine, list[int]]] = {}
        for id in ids:
            on = self._of.get(id)
            if on is not None:
                workers.setdefault(on.channel, (on, []))[1].append(id)
        for machine, mine in workers.values():
            machine.send({"type": "send", "workers": mine, "packet": packet}, self.now)

    def signal(self, id: int, number: int) -> None:
        self._tell(id, {"type": "signal", "worker": id, "number": number})

    def kill_hung(self, id: int) -> None:
        self._tell(id, {"type": "kill hung", "worker": id})

    def stop(self, id: int, grace_s: float) -> None:
        self._tell(id, {"type": "stop", "worker": id, "grace_s": grace_s})

    def reap(self) -> None:
        """An agent tells when a process has ended."""

    def idle_s(self, now: float) -> dict[int, float]:
        """As the agents measured it when they were last asked, if that was just before. Asks them again."""
        idle_s, self._idle_s = self._idle_s, {}
        is_fresh, self._asked_at = now - self._asked_at < _FRESH_S, now
        self._tell_all({"type": "watch idle"})
        return {id: idle for id, idle in idle_s.items() if id in self._of} if is_fresh else {}

    def cancel_unstarted(self) -> None:
        self._tell_all({"type": "cancel unstarted"})
        for machine in self._machines:
            for id in [id for id in machine.workers if id not in machine.pids]:
                self.gone(id)

    def kill_all(self) -> None:
        self._tell_all({"type": "kill all"})

    def forget_workers(self) -> None:
        self._starts += 1
        self._tell_all({"type": "forget workers"})

    def keep(self, packet: Packet) -> None:
        self._kept.add(packet)
        self._tell_all({"type": "keep", "packet": packet})

    def keep_again(self, packet: Packet) -> None:
        """An agent has kept the packet for this head. Agents that have registered with none get it too."""
        self._kept.add(packet)
        for machine in self._machines:
            if not machine.given.kept:
                machine.send({"type": "keep", "packet": packet}, self.now)

    def give_kept(self, machine: Machine) -> None:
        """The machine has joined a run that is under way."""
        for packet in self._kept:
            machine.send({"type": "keep", "packet": packet}, self.now)

    def _tell(self, id: int, message: Message) -> None:
        machine = self._of.get(id)
        if machine is not None:
            machine.send(message, self.now)

    def _tell_all(self, message: Message) -> None:
        for machine in self._machines:
            machine.send(message, self.now)
