"""Lightning with LockstepStrategy: the losses of torch's class, checkpoints, validation, manual optimization."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.torchrun import SCRIPTS, SETTINGS, needs, read_results, torchrun
from tests.launch import LaunchedRun

pytestmark = needs("lightning")

NAMES = ("torch", "ours", "resumed", "names", "torch_manual", "ours_manual", "fit_again")


@pytest.mark.slow
def test_lightning(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    workers = torchrun(SCRIPTS / "train_lightning.py", tmp_path, *NAMES)
    for found in workers:
        assert found["ours"] == found["resumed"] == ["lockstep", found["torch"][1]]
        assert found["ours_manual"] == ["lockstep", found["torch_manual"][1]]
        assert found["torch"][0] == found["torch_manual"][0] == "torch"
        assert len(found["fit_again"]) == 16
        assert all("module" not in name for name in found["names"]), "a checkpoint can be read without the wrapper"
    first, second = (found["ours"][1] for found in workers)
    assert first[:-1] != second[:-1], "each worker has its own part of the data"
    assert first[-1] == second[-1], "the loss of a validation is that of all workers"
    settings = {**SETTINGS, "LOCKSTEP_DDP": "1"}
    run = launch(SCRIPTS / "train_lightning.py", workers=2, args=["torch", "ours", "torch_manual"], env=settings)
    assert run.wait() == 0, run.dump()
    for before, found in zip(workers, read_results(tmp_path)):
        assert found["torch"] == found["ours"] == before["ours"], "Lightning's own strategy has our class too"
        assert found["torch_manual"] == before["ours_manual"]


def test_without_lightning_the_strategy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["lightning", *(name for name in sys.modules if name.startswith("lightning."))]:  # another test has imported it
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lockstep.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match=r"^LockstepStrategy needs the package lightning .* Install it: pip install lightning$"):
        importlib.import_module("lockstep.integrations.lightning")
