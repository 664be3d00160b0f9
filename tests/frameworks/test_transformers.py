"""transformers.Trainer and PEFT after lockstep.patch(): the losses of torch's class, checkpoints, evaluation, LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.torchrun import SCRIPTS, SETTINGS, needs, read_results, torchrun
from tests.launch import LaunchedRun

pytestmark = needs("transformers", "accelerate", "peft")

NAMES = ("torch", "ours", "resumed", "torch_adapters", "adapters")


@pytest.mark.slow
def test_trainer(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    workers = torchrun(SCRIPTS / "train_transformers.py", tmp_path, *NAMES)
    for found in workers:
        for name, result in found.items():
            assert result.pop("is_ours") == (not name.startswith("torch"))
        assert len(found["ours"]["logged"]) == 8
        assert found["ours"] == found["torch"]
        assert found["resumed"] == found["ours"]
        assert found["adapters"] == found["torch_adapters"]
        assert all("lora_" in name for name in found["adapters"]["reduced"])
        assert len(found["adapters"]["reduced"]) == 4
        assert found["adapters"]["changed"] == found["adapters"]["reduced"]
    assert workers[0]["adapters"]["adapters"] == workers[1]["adapters"]["adapters"]
    run = launch(SCRIPTS / "train_transformers.py", workers=2, args=["killed"], env={**SETTINGS, "LOCKSTEP_DDP": "1"})
    assert run.wait(120) == 0, run.dump()
    assert run.notes("died") == {"1": "step 6"}
    for before, found in zip(workers, read_results(tmp_path)):
        assert found["killed"].pop("is_ours")
        assert found["killed"] == before["ours"], "restarted from the checkpoint of step 4"
