"""A script under `lockstep run` that constructs a second Run gets an error on each worker: its workers are members already."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch import LaunchedRun

SCRIPT = """
import torch, lockstep
for number in range(2):
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with lockstep.Run(model, opt, lanes=2) as run:
        for x in run.shard(torch.ones(8, 2), global_batch=4):
            model(x).sum().backward()
            opt.step()
    print("finished", number)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_run_in_one_script_is_an_error_not_a_hang(workers: int, launch: Callable[..., LaunchedRun]) -> None:
    run = launch(SCRIPT, workers=workers)
    assert run.wait() == 1
    assert "UsageError: this script has constructed a second Run" in run.output()
    assert "finished 1" not in run.output()
