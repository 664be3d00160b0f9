"""Lightning with LockstepStrategy: the losses of torch's class, checkpoints, validation, manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.torchrun import SCRIPTS, SETTINGS, read_results, torchrun
from tests.launch import LaunchedRun

pytest.importorskip("lightning", reason="the package lightning is not installed: pip install -e '.[frameworks]'")


def test_lightning(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    workers = torchrun(SCRIPTS / "train_lightning.py", tmp_path)
    for found in workers:
        assert found["ours"] == found["torch"]
        assert found["ours_manual"] == found["torch_manual"]
        assert found["resumed"] == found["ours"]
        assert len(found["fit_again"]) == 16
        assert all("module" not in name for name in found["names"]), "a checkpoint can be read without the wrapper"
    assert workers[0]["ours"][:-1] != workers[1]["ours"][:-1], "each worker has its own part of the data"
    assert workers[0]["ours"][-1] == workers[1]["ours"][-1]
    run = launch(SCRIPTS / "train_lightning.py", workers=2, args=["ours"], env=SETTINGS)
    assert run.wait() == 0, run.dump()
    assert [found["ours"] for found in read_results(tmp_path)] == [found["ours"] for found in workers]
