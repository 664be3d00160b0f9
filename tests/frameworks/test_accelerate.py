"""Accelerate after lockstep.patch(): the losses of torch's class, checkpoints, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.frameworks.torchrun import SCRIPTS, SETTINGS, needs, read_results, torchrun
from tests.launch import LaunchedRun

pytestmark = needs("accelerate")


def test_accelerate(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    workers = torchrun(SCRIPTS / "train_accelerate.py", tmp_path, "torch", "ours", "resumed")
    for found in workers:
        for name, result in found.items():
            assert result.pop("is_ours") == (name != "torch")
        assert found["ours"] == found["torch"]
        assert found["resumed"] == found["ours"]
        assert found["ours"]["unwrapped"] == "Sequential"
    run = launch(SCRIPTS / "train_accelerate.py", workers=2, args=["torch"], env={**SETTINGS, "LOCKSTEP_DDP": "1"})
    assert run.wait() == 0, run.dump()
    for found, before in zip(read_results(tmp_path), workers):
        assert found["torch"].pop("is_ours"), "LOCKSTEP_DDP=1 under lockstep run"
        assert found["torch"] == before["torch"]
