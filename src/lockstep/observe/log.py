"""LaneLog: what the user logs in each lane, averaged over lanes by weight, the same on every worker to the bit.

Values stay on their device until they are exchanged, some steps at a time: logging costs no
synchronisation and no message in the steps between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError

Sink = Callable[[int, dict[str, float]], None]


class LaneLog:
    """``note`` in any turn; ``exchange`` (collective) between steps; ``latest`` is what came out last."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.latest: dict[str, float] = {}
        self._sinks = sinks
        self._noted: list[tuple[int, int, float | None, dict[str, Any]]] = []

    def note(self, step: int, lane: int, values: Mapping[str, Any]) -> None:
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise UsageError(
                        f"run.log({name}=...) got a tensor of shape {list(value.shape)}. Log one number: {name}.mean(), say."
                    )
                kept[name] = value.detach().clone()
            else:
                try:
                    kept[name] = float(value)
                except (TypeError, ValueError):
                    raise UsageError(
                        f"run.log({name}={value!r:.60}) is no number. Log a number or a tensor of one element."
                    ) from None
        self._noted.append((step, lane, None, kept))

    def weigh(self, weight: float) -> None:
        """A turn is over: what was noted in it has this weight."""
        self._noted = [(step, lane, weight if known is None else known, values) for step, lane, known, values in self._noted]

    def forget(self, step: int) -> None:
        """A step did not commit: what it logged will be logged again."""
        self._noted = [entry for entry in self._noted if entry[0] != step]

    def exchange(self, comm: Comm) -> None:
        """All workers' notes since the last time become averages, which go to the sinks, step by step."""
        mine = [[step, lane, weight, {k: float(v).hex() for k, v in values.items()}] for step, lane, weight, values in self._noted]
        texts = [json.dumps(mine).encode()]
        if comm.size > 1:
            texts = gather_bytes(comm, texts[0], "what was logged")
        self._noted = []  # not before: a lost peer means that all do this again
        for step, values in average([entry for text in texts for entry in json.loads(text)]):
            self.latest = values
            for sink in self._sinks if comm.rank == 0 else []:
                sink(step, values)


def average(entries: list[Any]) -> list[tuple[int, dict[str, float]]]:
    """[step, lane, weight, {name: hex}] -> (step, weighted means), by step. Exactly rounded, so the order of lanes is nothing."""
    by_step: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for step, _, weight, values in entries:
        for name, value in values.items():
            by_step.setdefault(step, {}).setdefault(name, []).append((weight, float.fromhex(value)))
    return [(step, {name: _mean(pairs) for name, pairs in by_step[step].items()}) for step in sorted(by_step)]


def _mean(pairs: list[tuple[float, float]]) -> float:
    total = math.fsum(weight for weight, _ in pairs)
    if total == 0:
        return math.nan
    products = [weight * value for weight, value in pairs if weight]
    return math.fsum(products) / total if all(map(math.isfinite, products)) else sum(products)
