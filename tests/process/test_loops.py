"""Loops as people write them: a kill of a worker, and a cut of the whole run with a resume, leave the result as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lockstep
from tests.loop_run import LoopRun
from tests.models import MLP, data
from tests.workers import run_workers

START = """
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import RandomSampler

import lockstep
from tests.loop_notes import note_end, note_step
from tests.models import data

torch.manual_seed(1)
backbone, head = nn.Sequential(nn.Linear(12, 16), nn.Tanh()), nn.Linear(16, 4)
model = nn.Sequential(backbone, head)
train = data(40)
"""

SCHEDULER_AFTER_EACH_EPOCH = """
opt = torch.optim.AdamW(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
run = lockstep.Run(model, opt, sched, lanes=4, checkpoint="../checkpoints", every="3 steps")
for epoch in range(6):
    for x, y in run.shard(train, global_batch=8, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        note_step(run)
    sched.step()
assert opt.param_groups[0]["lr"] == 0.1 * 0.5**6
"""

CHANGES_BETWEEN_LOOPS = """
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = lockstep.Run(model, opt, lanes=4, checkpoint="../checkpoints", every="3 steps")
sampler = RandomSampler(train, generator=torch.Generator().manual_seed(5))
for x, y in run.shard(train, global_batch=8, sampler=sampler, epochs=3):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    note_step(run)
with torch.no_grad():
    for weight in model.parameters():
        weight.mul_(0.9)
for g in opt.param_groups:
    g["lr"] *= 0.5
opt.state.clear()
for x, y in run.shard(train, global_batch=8, sampler=sampler, epochs=3):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    note_step(run)
"""

UNFREEZE_BETWEEN_LOOPS = """
backbone.requires_grad_(False)
opt = torch.optim.AdamW(head.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
run = lockstep.Run(model, opt, sched, lanes=4, checkpoint="../checkpoints", every="3 steps")
for epoch in range(6):
    if epoch == 2:
        backbone.requires_grad_(True)
        opt.add_param_group({"params": backbone.parameters(), "lr": 0.01})
    for x, y in run.shard(train, global_batch=8, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        note_step(run)
    sched.step()
"""

UNFREEZE_IN_AN_EPOCH = UNFREEZE_BETWEEN_LOOPS.replace("range(6)", "run.epochs(6)")

UNFREEZE_IN_THE_LOOP = """
backbone.requires_grad_(False)
opt = torch.optim.AdamW(head.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=4, checkpoint="../checkpoints", every="3 steps")
for x, y in run.shard(train, global_batch=8, shuffle=True, epochs=6):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if run.every("epoch") and run.epoch == 1:
        backbone.requires_grad_(True)
        opt.add_param_group({"params": backbone.parameters(), "lr": 0.01})
    note_step(run)
"""

END = """
note_end(run)
"""

LOOPS = {
    "scheduler after each epoch": SCHEDULER_AFTER_EACH_EPOCH,
    "changes between loops": CHANGES_BETWEEN_LOOPS,
    "unfreeze between loops": UNFREEZE_BETWEEN_LOOPS,
    "unfreeze in an epoch": UNFREEZE_IN_AN_EPOCH,
    "unfreeze in the loop": UNFREEZE_IN_THE_LOOP,
}
STEPS = 30

Start = Callable[..., LoopRun]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The result of each loop, alone and undisturbed."""
    results = {}
    for name, loop in LOOPS.items():
        run = LoopRun(START + loop + END, tmp_path_factory.mktemp("alone") / "run", 0)
        results[name] = run.result()
        assert results[name].startswith(f"{STEPS} "), run.dump()
    return results


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LoopRun] = []

    def start_here(loop: str, folder: str, workers: int, *options: str, **settings: Any) -> LoopRun:
        started.append(LoopRun(START + loop + END, tmp_path / folder, workers, *options, **settings))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


@pytest.mark.parametrize("name", LOOPS)
def test_a_killed_worker_is_replaced_and_the_result_is_the_same(name: str, expected: dict[str, str], start: Start) -> None:
    run = start(LOOPS[name], "run", 2, die_at=18, hold_at=18)
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == expected[name]
    assert len(run.notes("done")) == 2


@pytest.mark.parametrize(("name", "workers"), list(zip(LOOPS, [(2, 1), (1, 2), (2, 3), (1, 2), (3, 2)], strict=True)))
def test_a_run_that_is_cut_and_resumed_has_the_same_result(
    name: str, workers: tuple[int, int], expected: dict[str, str], start: Start
) -> None:
    start(LOOPS[name], "first", workers[0], hold_at=19).cut(19)
    second = start(LOOPS[name], "second", workers[1])
    assert second.result() == expected[name]
    assert "lockstep: resumed at step " in second.output(), second.dump()


def count_iterations(rank: int, size: int, samples: int) -> tuple[int, int]:
    """Returns len() of a loop with five lanes, and the number of its iterations."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Run(model, opt, lanes=5) as run:
        shard = run.shard(data(samples), global_batch=10, epochs=2)
        expected, iterations = len(shard), 0
        for x, y in shard:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            iterations += 1
        return expected, iterations


@pytest.mark.parametrize(("samples", "iterations"), [(40, [8, 16, 16]), (32, [8, 14, 14])])
def test_len_is_the_number_of_iterations_on_each_worker(samples: int, iterations: list[int]) -> None:
    """Two samples are left for five lanes: the first worker has an iteration on a placeholder batch, the others one each."""
    assert run_workers(count_iterations, 3, samples) == [(count, count) for count in iterations]
