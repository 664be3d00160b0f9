"""StepTiers: a table over the steps of a run that stays small, however long the run is. Knows neither files nor what a group holds.

    all steps        in at most ``max_groups`` groups of 1, 2, 4, 8, ... steps each
    |-------|-------|-------|-------|-------|-------|-------|---
                                                  |||||||||||||
                                                  the newest ``window`` recorded steps, each of them a group

If there are too many groups, each two neighbours become one. A step is added to both tiers, and steps may come in any order.
Readers draw the groups of the first tier up to the first group of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar


class Group(Protocol):
    """The sums over the steps from ``first`` to ``last``. ``changed``: the version of the table in which it changed last."""

    first: int
    last: int
    changed: int

    def absorb(self, other: Self) -> None:
        """Add the sums of ``other``."""
        ...

    @property
    def cells(self) -> int:
        """How much memory the group takes: its number of numbers, roughly."""
        ...


G = TypeVar("G", bound=Group)


class StepTiers(Generic[G]):
    """``make()`` returns an empty group. There are at most ``max_cells`` cells in the first tier, if it has more than 16 groups."""

    def __init__(self, make: Callable[[], G], *, max_groups: int = 512, window: int = 256, max_cells: int = 200_000) -> None:
        self._make, self._max_groups, self._window, self._max_cells = make, max_groups, window, max_cells
        self.width = 1
        """How many steps a group of the first tier covers."""
        self.regrouped_at = 0
        """The version in which ``width`` changed last."""
        self._coarse: dict[int, G] = {}
        self._fine: dict[int, G] = {}
        self._cells = 0

    def add(self, step: int, version: int, fill: Callable[[G], None]) -> None:
        """Let ``fill`` add something of ``step`` to its group in each tier."""
        coarse = self._group(self._coarse, (step - 1) // self.width, step, version)
        before = coarse.cells
        fill(coarse)
        self._cells += coarse.cells - before
        if len(self._fine) < self._window or step >= min(self._fine):
            fill(self._group(self._fine, step, step, version))
            if len(self._fine) > self._window:
                del self._fine[min(self._fine)]
        while len(self._coarse) > self._max_groups or (self._cells > self._max_cells and len(self._coarse) > 16):
            self._regroup(version)

    def coarse(self, since: int = 0) -> Iterator[G]:
        """The groups of the first tier that changed after version ``since``; all of them if they were regrouped after it."""
        since = 0 if self.regrouped_at > since else since
        return (group for _, group in sorted(self._coarse.items()) if group.changed > since)

    def fine(self, since: int = 0) -> Iterator[G]:
        """The groups of the second tier that changed after version ``since``."""
        return (group for _, group in sorted(self._fine.items()) if group.changed > since)

    @property
    def first_fine(self) -> int:
        """The first step of the second tier; 0 if there is none."""
        return min(self._fine, default=0)

    @property
    def newest(self) -> G | None:
        return self._fine[max(self._fine)] if self._fine else None

    def changes(self, since: int, to_json: Callable[[G], Any]) -> dict[str, Any] | None:
        """As plain data; None if nothing has changed."""
        coarse, fine = [to_json(group) for group in self.coarse(since)], [to_json(group) for group in self.fine(since)]
        if not coarse and not fine and since:
            return None
        reset = since == 0 or self.regrouped_at > since
        return {"reset": reset, "width": self.width, "coarse": coarse, "fine": fine, "firstFine": self.first_fine}

    def _group(self, groups: dict[int, G], key: int, step: int, version: int) -> G:
        if key not in groups:
            groups[key] = self._make()
            groups[key].first = groups[key].last = step
        group = groups[key]
        group.first, group.last, group.changed = min(group.first, step), max(group.last, step), version
        return group

    def _regroup(self, version: int) -> None:
        self.width, self.regrouped_at = self.width * 2, version
        grouped: dict[int, G] = {}
        for key, group in sorted(self._coarse.items()):
            if key // 2 in grouped:
                kept = grouped[key // 2]
                kept.absorb(group)
                kept.first, kept.last, kept.changed = min(kept.first, group.first), max(kept.last, group.last), version
            else:
                grouped[key // 2] = group
        self._coarse, self._cells = grouped, sum(group.cells for group in grouped.values())
