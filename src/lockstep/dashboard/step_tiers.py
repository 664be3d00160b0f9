"""StepTiers: a table over the steps of a run that stays small, however long the run is. Knows neither files nor what a row holds.

    all steps        in at most ``max_rows`` rows of 1, 2, 4, 8, ... steps each
    |-------|-------|-------|-------|-------|-------|-------|---
                                                  |||||||||||||
                                                  the newest ``window`` recorded steps, one row each

If there are too many rows, each two neighbours become one. A step is added to both tiers, and steps may come in any order. Readers
draw the rows of the first tier up to the first row of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar


class Row(Protocol):
    """The sums over the steps from ``first`` to ``last``. ``changed``: the version of the table in which it changed last."""

    first: int
    last: int
    changed: int

    def absorb(self, other: Self) -> None:
        """Add the sums of ``other``."""
        ...

    @property
    def cells(self) -> int:
        """How much memory the row takes: its number of numbers, roughly."""
        ...


R = TypeVar("R", bound=Row)


class StepTiers(Generic[R]):
    """``make()`` returns an empty row. There are at most ``max_cells`` cells in the first tier, if it has more than 16 rows."""

    def __init__(self, make: Callable[[], R], *, max_rows: int = 512, window: int = 256, max_cells: int = 200_000) -> None:
        self._make, self._max_rows, self._window, self._max_cells = make, max_rows, window, max_cells
        self.width = 1
        """How many steps a row of the first tier covers."""
        self.regrouped_at = 0
        """The version in which ``width`` changed last."""
        self._coarse: dict[int, R] = {}
        self._fine: dict[int, R] = {}
        self._cells = 0

    def add(self, step: int, version: int, fill: Callable[[R], None]) -> None:
        """Let ``fill`` add something of ``step`` to its row in each tier."""
        coarse = self._row(self._coarse, (step - 1) // self.width, step, version)
        before = coarse.cells
        fill(coarse)
        self._cells += coarse.cells - before
        if len(self._fine) < self._window or step >= min(self._fine):
            fill(self._row(self._fine, step, step, version))
            if len(self._fine) > self._window:
                del self._fine[min(self._fine)]
        while len(self._coarse) > self._max_rows or (self._cells > self._max_cells and len(self._coarse) > 16):
            self._regroup(version)

    def coarse(self, since: int = 0) -> Iterator[R]:
        """The rows of the first tier that changed after version ``since``; all of them if the rows were regrouped after it."""
        since = 0 if self.regrouped_at > since else since
        return (row for _, row in sorted(self._coarse.items()) if row.changed > since)

    def fine(self, since: int = 0) -> Iterator[R]:
        """The rows of the second tier that changed after version ``since``."""
        return (row for _, row in sorted(self._fine.items()) if row.changed > since)

    @property
    def first_fine(self) -> int:
        """The first step of the second tier; 0 if there is none."""
        return min(self._fine, default=0)

    @property
    def newest(self) -> R | None:
        return self._fine[max(self._fine)] if self._fine else None

    def changes(self, since: int, to_json: Callable[[R], Any]) -> dict[str, Any] | None:
        """As plain data; None if nothing has changed."""
        coarse, fine = [to_json(row) for row in self.coarse(since)], [to_json(row) for row in self.fine(since)]
        if not coarse and not fine and since:
            return None
        reset = since == 0 or self.regrouped_at > since
        return {"reset": reset, "width": self.width, "coarse": coarse, "fine": fine, "firstFine": self.first_fine}

    def _row(self, rows: dict[int, R], key: int, step: int, version: int) -> R:
        if key not in rows:
            rows[key] = self._make()
            rows[key].first = rows[key].last = step
        row = rows[key]
        row.first, row.last, row.changed = min(row.first, step), max(row.last, step), version
        return row

    def _regroup(self, version: int) -> None:
        self.width, self.regrouped_at = self.width * 2, version
        grouped: dict[int, R] = {}
        for key, row in sorted(self._coarse.items()):
            if key // 2 in grouped:
                kept = grouped[key // 2]
                kept.absorb(row)
                kept.first, kept.last, kept.changed = min(kept.first, row.first), max(kept.last, row.last), version
            else:
                grouped[key // 2] = row
        self._coarse, self._cells = grouped, sum(row.cells for row in grouped.values())
