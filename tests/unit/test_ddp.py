"""DistributedDataParallel in one process: its signature, its place among torch's classes, its figures."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.models import MLP


def test_it_takes_every_argument_of_torchs_class_in_the_same_order() -> None:
    theirs = list(inspect.signature(TorchDDP.__init__).parameters.values())
    ours = list(inspect.signature(lockstep.DistributedDataParallel.__init__).parameters.values())
    assert [(each.name, each.kind, each.default) for each in ours[: len(theirs)]] == [
        (each.name, each.kind, each.default) for each in theirs
    ]


def test_it_counts_as_an_instance_of_torchs_class_and_inherits_nothing_from_it() -> None:
    model = lockstep.DistributedDataParallel(MLP())
    assert isinstance(model, TorchDDP)
    assert issubclass(lockstep.DistributedDataParallel, TorchDDP)
    assert TorchDDP not in type(model).__mro__
    assert not isinstance(MLP(), TorchDDP)
    with pytest.raises(AttributeError):
        _ = model._ddp_init_helper


def test_torchs_join_context_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(lockstep.UsageError, match=r"with model\.join"):
        torch.distributed.algorithms.Join([lockstep.DistributedDataParallel(MLP())])


def test_torchs_state_dict_functions_unwrap_it() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = lockstep.DistributedDataParallel(MLP())
    assert list(get_model_state_dict(model)) == list(model.module.state_dict())


def test_an_argument_that_makes_no_difference_gets_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lockstep"):
        lockstep.DistributedDataParallel(MLP(), bucket_cap_mb_list=[1, 2], batched_grad_copy=True)
    assert [record.message.split("(")[1].split("=")[0] for record in caplog.records] == ["bucket_cap_mb_list", "batched_grad_copy"]


def test_a_copy_in_one_process_trains() -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(2, 1))
    twin = copy.deepcopy(model)
    assert twin._get_ddp_logging_data()["iteration"] == 0
    for each in (model, twin):
        each(torch.ones(3, 2)).sum().backward()
    assert torch.equal(model.module.weight.grad, twin.module.weight.grad)
    assert twin._get_ddp_logging_data()["iteration"] == 1


def test_names_to_ignore_may_be_unknown_as_in_torch() -> None:
    model = nn.Linear(2, 1)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, [".bias", "absent.weight"])
    ddp = lockstep.DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp._get_ddp_logging_data()["bucket_sizes"] == "8"


def test_user_hooks_run_after_the_average_and_can_be_removed() -> None:
    model = nn.Linear(2, 1)
    calls = []
    before = model.weight.register_post_accumulate_grad_hook(lambda param: calls.append("before"))
    ddp = lockstep.DistributedDataParallel(model)
    after = model.weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    ddp(torch.ones(1, 2)).sum().backward()
    assert calls == ["before", "after"]
    with ddp.no_sync():  # not averaged: no call
        ddp(torch.ones(1, 2)).sum().backward()
    before.remove()
    after.remove()
    model.bias.register_post_accumulate_grad_hook(lambda param: calls.append("bias"))
    model.weight.register_post_accumulate_grad_hook(lambda param: calls.append("weight"))
    ddp(torch.ones(1, 2)).sum().backward()
    assert calls[2:] == ["weight", "bias"]
    del ddp
    model(torch.ones(1, 2)).sum().backward()  # autograd calls them again
    assert sorted(calls[4:]) == ["bias", "weight"]


def test_low_precision_is_used_by_recurrent_layers_too() -> None:
    policy = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    model = lockstep.DistributedDataParallel(nn.LSTM(3, 4), mixed_precision=policy)
    output, _ = model(torch.ones(2, 1, 3))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
