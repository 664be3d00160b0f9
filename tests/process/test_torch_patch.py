"""LOCKSTEP_DDP=1 under `lockstep run`: the script finds our class under torch's name."""

from __future__ import annotations

from collections.abc import Callable

from tests.launch import LaunchedRun

SCRIPT = """
from torch.nn.parallel import DistributedDataParallel as DDP
import torch
model = DDP(torch.nn.Linear(2, 2))
print("class of", model.__class__.__module__, "on", model.replica.comm.size, "workers")
"""


def test_a_script_finds_our_class_under_the_name_of_torchs(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(SCRIPT, workers=2, env={"LOCKSTEP_DDP": "1"})
    assert run.wait() == 0, run.dump()
    assert {run.log(worker) for worker in range(2)} == {"class of lockstep.replicas.ddp on 2 workers\n"}


def test_another_value_than_0_or_1_is_an_error(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(SCRIPT, workers=1, env={"LOCKSTEP_DDP": "yes"})
    assert run.wait() == 1, run.dump()
    assert "LOCKSTEP_DDP='yes' is not a choice. Set it to 1 for lockstep.patch(), or unset it." in run.stderr()
