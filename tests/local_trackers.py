"""Trackers in this process: a short run that uses them, and calls of them without a run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

import lockstep


class Notes:
    """A tracker that remembers what it got, and fails when it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.closed = fails_at, 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise RuntimeError("the disk is full")
        self.got.append((step, values))

    def close(self) -> None:
        self.closed += 1


def train(steps: int = 6, **settings: Any) -> None:
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Run(model, opt, lanes=2, log_every=2, **settings) as run:
        for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(4 * steps, 4)), global_batch=4):
            loss = model(x).square().mean()
            run.log(loss=loss)
            loss.backward()
            opt.step()
            opt.zero_grad()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def opened(tracker: Any, folder: Path, run_id: str = "curves") -> Any:
    tracker.open(run_id, folder)
    return tracker


def write(tracker: Any, *steps: tuple[int, dict[str, float]]) -> None:
    for step, values in steps:
        tracker.log(step, values)
    tracker.flush()
