"""RunMemory: what an agent remembers of a run from the packets that it passes on, so that a new head can learn it.

Knows the packets of workers (launcher/worker_messages.py), not connections or processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.cluster.messages import Message
from lockstep.launcher.environment import RunSettings
from lockstep.launcher.packets import Packet
from lockstep.plan.membership_recovery import MachineReport, WorkerReport


@dataclass
class _Store:
    """Requests to the store of a generation that were not answered, by their numbers."""

    generation: int
    requests: dict[int, Packet]


class KeptPackets:
    """What a new head needs besides the report: recorded results and epochs (launcher/recorded_results.py). All agents have it."""

    def __init__(self) -> None:
        self._packets: dict[tuple[Any, ...], Packet] = {}

    def __len__(self) -> int:
        return len(self._packets)

    def __iter__(self) -> Iterator[Packet]:
        return iter(list(self._packets.values()))

    @property
    def wanted(self) -> int:
        """How many workers a person has asked for; 0: as many as there is room for."""
        return max(0, _whole(self._packets.get(("wanted",), {}).get("size"), 0))

    def add(self, packet: Packet) -> None:
        """Keep a part of a result, where an epoch began, or how many workers are wanted.

        The beginning of an epoch drops the results that no newcomer needs from then on.
        """
        if packet.get("type") == "wanted":
            self._packets["wanted",] = packet
            return
        if packet.get("type") != "epoch":
            self._packets["result", packet.get("index"), packet.get("part")] = packet
            return
        self._packets["epoch", packet.get("number")] = packet
        first, end = _whole(packet.get("first")), _whole(packet.get("keep"))
        old = [key for key in self._packets if key[0] == "result" and first <= _whole(key[1]) < end]
        for key in old:
            del self._packets[key]


class RunMemory:
    def __init__(self) -> None:
        self.run_id = ""
        """Of the run; empty until a head has accepted this agent."""
        self.kept = KeptPackets()
        self.main_worker: int | None = None
        """The worker with rank 0, if it is known."""
        self.threads: int | None = None
        """Of each worker of the run; None until the first one was started here."""
        self._started = 0
        self._workers: dict[int, WorkerReport] = {}
        self._stores: dict[int, _Store] = {}
        self._exits: dict[int, Message] = {}
        self._generation, self._members = -1, list[int]()
        self._stage, self._committed, self._max_members, self._next_id = -1, 0, 0, 0
        self._has_joined = self._needs_peers = False

    def spawned(self, ranks: Mapping[int, int], settings: RunSettings) -> None:
        """``ranks``: worker -> the rank with which it is started. A newcomer has another one when it has joined."""
        self._started, self.threads = settings.size, settings.threads
        for id, rank in ranks.items():
            self._workers[id] = WorkerReport(id)
            self._next_id = max(self._next_id, id + 1)
            if rank == 0 and self._generation < 0:
                self.main_worker = id

    def started(self, id: int, pid: int) -> None:
        self._update(id, pid=pid)

    def exited(self, id: int, message: Message) -> None:
        """The process of a worker is gone, and ``message`` tells it to the head.

        The head may be lost before it has read the message. A member is therefore reported, and the message repeated, until a
        generation is formed without it.
        """
        if self._generation < 0 or id in self._members:
            self._exits[id] = message
        else:
            self.gone(id)

    @property
    def exits(self) -> list[Message]:
        """What a new head must be told after the report: which of the reported workers are gone."""
        return list(self._exits.values())

    def gone(self, id: int) -> None:
        """The run has gone on without the worker."""
        self._workers.pop(id, None)
        self._stores.pop(id, None)
        self._exits.pop(id, None)

    def forget_exits(self) -> None:
        """All workers are gone and start again."""
        for id in list(self._exits):
            self.gone(id)

    def on_packet(self, worker: int, packet: Packet) -> None:
        """A worker has sent a packet to the head."""
        kind = packet.get("type")
        number = _whole(packet.get("generation"))
        if kind == "store":
            request = packet.get("id")
            store = self._stores.get(worker)
            if store is None or store.generation != number:
                store = self._stores[worker] = _Store(number, {})
            if isinstance(request, int):
                store.requests[request] = packet
        elif kind == "join":
            self._has_joined = True
            self._max_members = _whole(packet.get("most"), 0) or self._max_members
            self._update(worker, has_joined=True, **({"gpu": str(packet["gpu"])} if "gpu" in packet else {}))
        elif kind == "ready":
            self._update(worker, ready_generation=number, steps=_whole(packet.get("step")))
            self._committed = max(self._committed, _whole(packet.get("step")))
        elif kind == "lost" and number == self._generation:
            self._update(worker, is_unsettled=True)
        elif kind == "stage":
            self._stage = max(self._stage, _whole(packet.get("stage")))
        elif kind == "progress":
            self._committed = max(self._committed, _whole(packet.get("step")))
        elif kind == "leaving":
            self._update(worker, leaving=True)
        elif kind == "finished":
            self._update(worker, finished=True)
        elif kind in ("recorded", "epoch"):
            self.kept.add(packet)  # the head may be lost before it has given a copy to all agents
        elif kind == "rank read":
            self._needs_peers = self._needs_peers or packet.get("needs_peers") is True

    def on_answer(self, workers: list[int], packet: Packet) -> None:
        """The head has sent a packet to workers."""
        if packet.get("type") == "generation":
            self._generation, self._members = _whole(packet.get("number")), [int(id) for id in packet.get("members", ())]
            self._next_id = max([self._next_id, *(id + 1 for id in self._members)])
            self.main_worker = self._members[0]
            for id in [id for id in self._exits if id not in self._members]:
                self.gone(id)
            for id in workers:
                self._update(id, is_unsettled=False)
                self._stores.pop(id, None)
        elif packet.get("type") == "stored":
            for id in workers:
                if id in self._stores:
                    self._stores[id].requests.pop(_whole(packet.get("id")), None)

    def unanswered(self) -> list[tuple[int, Packet]]:
        """The requests to the store of the current generation that a new head must answer."""
        current = [(id, store) for id, store in self._stores.items() if store.generation == self._generation]
        return [(id, packet) for id, store in current for packet in store.requests.values()]

    def report(self, room: int) -> MachineReport:
        """``room``: how many workers this machine starts."""
        waiting = {id for id, packet in self.unanswered() if packet.get("op") in ("get", "wait")}
        workers = tuple(replace(each, is_unsettled=True) if each.id in waiting else each for each in self._workers.values())
        return MachineReport(
            room,
            workers,
            self._generation,
            tuple(self._members),
            self._stage,
            self._committed,
            self._max_members,
            self._next_id,
            self.kept.wanted,
            self._has_joined,
            self._needs_peers,
            self._started,
        )

    def _update(self, id: int, **changes: Any) -> None:
        if id in self._workers:
            self._workers[id] = replace(self._workers[id], **changes)


def _whole(value: object, default: int = -1) -> int:
    return value if isinstance(value, int) else default
