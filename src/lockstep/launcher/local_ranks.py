"""LocalRanks: which worker has which number on this machine, and so which GPU. Knows no processes.

A replacement gets the number of a lost worker. A spare shares a number, and its GPU, with a member while it waits.
"""

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

    def assign_to_spares(self, workers: Sequence[int]) -> dict[int, int]:
        """Give each of these workers the number that the fewest workers have, and of several such numbers the lowest."""
        for worker in workers:
            taken = list(self._ranks.values())
            self._ranks[worker] = min(range(self.count), key=taken.count)
        return {worker: self._ranks[worker] for worker in workers}

    @property
    def count(self) -> int:
        """How many different numbers there are, with those that nobody has at the moment. At least 1."""
        return max(self._ranks.values(), default=0) + 1

    def has(self, number: int) -> bool:
        """Whether a worker has this number."""
        return number in self._ranks.values()

    def release(self, worker: int) -> None:
        """The process of the worker is gone."""
        self._ranks.pop(worker, None)
