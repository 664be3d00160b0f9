"""transformers.Trainer and PEFT after lockstep.patch(): the losses of torch's class, checkpoints, evaluation, LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.torchrun import SCRIPTS, torchrun

for package in ("transformers", "accelerate", "peft"):
    pytest.importorskip(package, reason=f"the package {package} is not installed: pip install -e '.[frameworks]'")


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    workers = torchrun(SCRIPTS / "train_transformers.py", tmp_path)
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
