"""WorkerRanks: which worker has which rank, and has had it, as the lines of events.jsonl say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WorkerRanks:
    """Fed with the lines of events.jsonl in their order, without those that are damaged (recording/event_lines.py)."""

    def __init__(self) -> None:
        self.rank_of: dict[int, int] = {}
        """Worker -> the last rank that it has had, also of workers that are gone."""
        self._workers_of: dict[int, set[int]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "started" and not line.get("are_spares"):
            self._put({int(worker): rank for worker, rank in line["ranks"].items()})
        elif line["kind"] == "continue":
            self._put({worker: rank for rank, worker in enumerate(line["workers"])})
        elif line["kind"] == "event":
            for action in line.get("actions") or ():
                if "Form" in action:
                    self._put({worker: rank for rank, worker in enumerate(action["Form"]["members"])})

    def workers_of(self, rank: int) -> frozenset[int]:
        """Every worker that has had this rank."""
        return frozenset(self._workers_of.get(rank, ()))

    @property
    def ranks(self) -> list[int]:
        """Every rank that a worker has had."""
        return sorted(self._workers_of)

    def _put(self, ranks: Mapping[int, int]) -> None:
        self.rank_of.update(ranks)
        for worker, rank in ranks.items():
            self._workers_of.setdefault(rank, set()).add(worker)
