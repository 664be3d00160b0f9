"""Optimizers that load a state with parameter groups that they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.errors import UsageError
from lockstep.training.parameter_groups import add_groups, missing_groups, read_groups
from tests.models import MLP, data

pytestmark = pytest.mark.usefixtures("one_thread")


def test_groups_that_were_added_are_missing_and_can_be_added() -> None:
    model = MLP()
    named = list(model.named_parameters())
    first, second = torch.optim.AdamW(model.layers[4].parameters()), torch.optim.AdamW(model.layers[4].parameters())
    first.add_param_group({"params": model.layers[0].parameters(), "lr": 0.5})
    missing = missing_groups("AdamW", read_groups(second, named), read_groups(first, named))
    assert missing == [["layers.0.weight", "layers.0.bias"]]
    add_groups(second, missing, named)
    second.load_state_dict(first.state_dict())
    assert read_groups(second, named) == read_groups(first, named)
    assert second.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("mine", [[["a"], ["b"], ["c"]], [["b"]], [["a", "b"]]])
def test_groups_that_cannot_come_from_added_ones_are_refused(mine: list[list[str]]) -> None:
    with pytest.raises(UsageError, match=r"AdamW of this script updates [12] parameters? from"):
        missing_groups("AdamW", mine, [["a"], ["b"]])


def train(run: lockstep.Run, model: torch.nn.Module, opt: torch.optim.Optimizer, epochs: int) -> int:
    iterations = 0
    shard = run.shard(data(40), global_batch=8, epochs=epochs)
    expected = len(shard)
    for x, y in shard:
        iterations += 1
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert iterations == expected
    return iterations


def test_a_state_without_groups_is_loaded_as_before_and_len_is_what_remains(tmp_path: Path) -> None:
    """A checkpoint of an earlier version has no groups."""

    def begin() -> tuple[lockstep.Run, torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = MLP()
        opt = torch.optim.AdamW(model.parameters())
        return lockstep.Run(model, opt, lanes=2, checkpoint=tmp_path, every="1000h"), model, opt

    run, model, opt = begin()
    assert train(run, model, opt, 2) == 20
    state = run._state.capture()
    del state["groups"]
    run.close()
    run, model, opt = begin()
    assert train(run, model, opt, 3) == 10  # it has resumed after two epochs
    run._state.restore(state)
    assert run.step == 10
    run.close()
