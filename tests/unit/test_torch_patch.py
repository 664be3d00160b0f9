"""lockstep.patch(): where it puts our class, how it is undone, and what it says about modules that were imported too early."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lockstep

ORIGINALS = [torch.nn.parallel.DistributedDataParallel]  # in a list: patch() warns of modules that hold the class itself
OURS = [lockstep.DistributedDataParallel] * 2


def classes() -> list[type]:
    return [torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.distributed.DistributedDataParallel]


@pytest.fixture(autouse=True)
def _no_other_module_holds_the_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests of the same process may have imported it, or frameworks that do."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(("torch.", "lockstep.")) and any(value is ORIGINALS[0] for value in list(vars(module).values())):
            monkeypatch.delitem(sys.modules, name)
    yield
    assert classes() == ORIGINALS * 2


def test_the_patch_can_be_undone_more_than_once() -> None:
    patch = lockstep.patch()
    assert classes() == OURS
    patch.undo()
    patch.undo()
    assert classes() == ORIGINALS * 2


def test_as_a_context_manager_it_ends_with_the_block_also_if_the_block_raises() -> None:
    with pytest.raises(KeyError):
        with lockstep.patch():
            model = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            raise KeyError
    assert type(model) is OURS[0]
    model.replica.close()


def test_patches_can_be_nested() -> None:
    with lockstep.patch():
        with lockstep.patch():
            assert classes() == OURS
        assert classes() == OURS


def test_a_module_that_has_imported_the_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("too_early")
    module.DDP = ORIGINALS[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "too_early", module)
    with pytest.warns(UserWarning, match=r"^too_early imported torch's .* Call lockstep\.patch\(\) before that import\.$"):
        lockstep.patch().undo()


@pytest.mark.slow
def test_torch_compile_works_under_the_patch() -> None:
    code = """
import lockstep, torch
lockstep.patch()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
torch.compile(model, backend="eager")(torch.ones(1, 2)).sum().backward()
assert model.module.weight.grad.abs().sum() == 4
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_torch_asks_its_class_which_instance_is_in_forward() -> None:
    assert OURS[0]._get_active_ddp_module() is None
    assert OURS[0]._active_ddp_module is None
