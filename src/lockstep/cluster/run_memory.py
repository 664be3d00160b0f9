"""RunMemory: what an agent remembers of a run from the packets that it passes on, so that a new head can learn it.

Knows the packets of workers (launcher/worker_messages.py), not connections or processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lockstep.launcher.packets import Packet
from lockstep.plan.membership_recovery import MachineReport, WorkerReport


@dataclass
class _Store:
    """Requests to the store of a generation that were not answered, by their numbers."""

    generation: int
    requests: dict[int, Packet]


class RunMemory:
    def __init__(self) -> None:
        self.run_id = ""
        """Of the run; empty until a head has accepted this agent."""
        self.kept: dict[tuple[Any, ...], Packet] = {}
        """The recorded results and epochs of the run (launcher/recorded_results.py)."""
        self.main_worker: int | None = None
        """The worker with rank 0, if it is known."""
        self._workers: dict[int, WorkerReport] = {}
        self._stores: dict[int, _Store] = {}
        self._generation, self._members = -1, list[int]()
        self._stage, self._committed, self._max_members, self._next_id = -1, 0, 0, 0
        self._has_joined = self._needs_peers = False

    def spawned(self, ids: list[int]) -> None:
        for id in ids:
            self._workers[id] = WorkerReport(id)
            self._next_id = max(self._next_id, id + 1)

    def started(self, id: int, pid: int) -> None:
        self._update(id, pid=pid)

    def gone(self, id: int) -> None:
        """The head was told that the worker is gone."""
        self._workers.pop(id, None)
        self._stores.pop(id, None)

    def keep(self, packet: Packet) -> None:
        if packet.get("type") == "epoch":
            self.kept["epoch", packet.get("number")] = packet
        else:
            self.kept["result", packet.get("index"), packet.get("part")] = packet

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
            self._update(worker, has_joined=True)
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
        elif kind == "rank read":
            self._needs_peers = self._needs_peers or packet.get("needs_peers") is True

    def on_answer(self, workers: list[int], packet: Packet) -> None:
        """The head has sent a packet to workers."""
        if packet.get("type") == "generation":
            self._generation, self._members = _whole(packet.get("number")), [int(id) for id in packet.get("members", ())]
            self._next_id = max([self._next_id, *(id + 1 for id in self._members)])
            self.main_worker = self._members[0]
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
            self._has_joined,
            self._needs_peers,
        )

    def _update(self, id: int, **changes: Any) -> None:
        if id in self._workers:
            self._workers[id] = replace(self._workers[id], **changes)


def _whole(value: object, default: int = -1) -> int:
    return value if isinstance(value, int) else default
