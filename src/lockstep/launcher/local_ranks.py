"""LocalRanks: which worker has which number on this machine. A replacement gets the number of a lost worker. Knows no processes."""

from __future__ import annotations

from collections.abc import Sequence


class LocalRanks:
    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # worker -> its number

    def assign(self, workers: Sequence[int]) -> dict[int, int]:
        """Give each of these workers the lowest number that no other worker has."""
        for worker in workers:
            taken = set(self._ranks.values())
            self._ranks[worker] = next(number for number in range(len(taken) + 1) if number not in taken)
        return {worker: self._ranks[worker] for worker in workers}

    def has(self, number: int) -> bool:
        """Whether a worker has this number."""
        return number in self._ranks.values()

    def release(self, worker: int) -> None:
        """The process of the worker is gone."""
        self._ranks.pop(worker, None)
