"""LaneLog: averages what the user logs in each lane over all lanes, by weight. The averages have the same bits on every worker.

Values stay on their device until they are exchanged, every few steps: ``run.log`` itself waits for no device and sends nothing.
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
"""Receives (step, averages) on rank 0."""


class LaneLog:
    """Collects logged values: ``note`` in any micro-batch, ``exchange`` between steps. ``latest`` holds the newest averages."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.latest: dict[str, float] = {}
        self._sinks = sinks
        self._entries: list[tuple[int, int, float | None, dict[str, Any]]] = []  # step, lane, weight (None: not known yet), values

    def note(self, step: int, lane: int, values: Mapping[str, Any]) -> None:
        """Keep what the user logged in one lane of a step.

        Raises:
            UsageError: If a value is not a number or a tensor of one element.
        """
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise UsageError(
                        f"run.log({name}=...) got a tensor of shape {list(value.shape)}. Log one number, for example {name}.mean()."
                    )
                kept[name] = value.detach().clone()
            else:
                try:
                    kept[name] = float(value)
                except (TypeError, ValueError):
                    raise UsageError(
                        f"run.log({name}={value!r:.60}) is not a number. Log a number or a tensor of one element."
                    ) from None
        self._entries.append((step, lane, None, kept))

    def weigh(self, weight: float) -> None:
        """Give the values that were noted since the last call this weight. Called at the end of each micro-batch."""
        self._entries = [(step, lane, weight if known is None else known, values) for step, lane, known, values in self._entries]

    def discard_step(self, step: int) -> None:
        """Drop the values of a step that did not commit: it will run again, and log again."""
        self._entries = [entry for entry in self._entries if entry[0] != step]

    def exchange(self, comm: Comm) -> None:
        """Average what all workers noted since the last exchange, and pass the averages to rank 0's sinks, step by step.

        All workers must call this.
        """
        mine = [
            [step, lane, weight, {k: float(v).hex() for k, v in values.items()}] for step, lane, weight, values in self._entries
        ]
        texts = [json.dumps(mine).encode()]
        if comm.size > 1:
            texts = gather_bytes(comm, texts[0], "what was logged")
        self._entries = []  # only now: if a worker is lost in the exchange, all others repeat it
        for step, values in average([entry for text in texts for entry in json.loads(text)]):
            self.latest = values
            for sink in self._sinks if comm.rank == 0 else []:
                sink(step, values)


def average(entries: list[Any]) -> list[tuple[int, dict[str, float]]]:
    """Convert entries [step, lane, weight, {name: hex}] into (step, weighted means), sorted by step.

    Sums are exactly rounded (``math.fsum``), so the result does not depend on the order of the lanes.
    """
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
