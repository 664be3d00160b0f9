"""Accelerate after lockstep.patch(): the losses of torch's class, checkpoints, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.torchrun import torchrun

pytest.importorskip("accelerate", reason="the package accelerate is not installed: pip install -e '.[frameworks]'")


def test_accelerate(tmp_path: Path) -> None:
    for found in torchrun("train_accelerate.py", tmp_path):
        assert not found["torch"].pop("is_ours")
        assert found["ours"].pop("is_ours")
        assert found["resumed"].pop("is_ours")
        assert found["ours"] == found["torch"]
        assert found["resumed"] == found["ours"]
        assert found["ours"]["unwrapped"] == "Sequential"
