"""lockstep.DistributedDataParallel in place of torch's: same arguments, same results, side by side."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

import lockstep
from tests.models import CNN, MLP, batch, build, digest, loss_of, part
from tests.workers import run_workers

# torch's Reducer, as the last owner of a gloo group, joins the group's threads while it holds the GIL, which the threads may
# need: a deadlock that was seen here now and then. These references make the workers end without destroying it.
_kept: list[Any] = []


def with_group(rank: int, size: int) -> None:
    store = dist.FileStore(os.environ["LOCKSTEP_STORE"].removeprefix("file://") + "-torch", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def losses(model: nn.Module, rank: int, size: int, steps: int = 6, accumulate: bool = False) -> list[float]:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    out = []
    for step in range(steps):
        x, y = batch(step, 12)
        x, y = part(x, rank, size), part(y, rank, size)
        if accumulate:
            with model.no_sync():
                loss_of(model, x * 2, y).backward()
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        out.append(loss.item())
    return out


def side_by_side(rank: int, size: int, name: str, arguments: dict[str, Any], accumulate: bool) -> None:
    with_group(rank, size)
    model = build(name)
    theirs = TorchDDP(copy.deepcopy(model), **arguments)
    ours = lockstep.DistributedDataParallel(copy.deepcopy(model), timeout_s=20, **arguments)
    torch.testing.assert_close(
        losses(ours, rank, size, accumulate=accumulate), losses(theirs, rank, size, accumulate=accumulate), atol=1e-5, rtol=1e-5
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.module.named_parameters():
        torch.testing.assert_close(dict(ours.module.named_parameters())[key], value, atol=1e-5, rtol=1e-5)
    ours.load_state_dict(theirs.state_dict())
    _kept.append(theirs)


@pytest.mark.parametrize(
    ("name", "arguments", "accumulate"),
    [
        ("mlp", {}, False),
        ("mlp", {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, True),
        ("cnn", {"broadcast_buffers": True}, False),
        ("cnn", {"broadcast_buffers": False, "init_sync": True}, False),
        ("transformer", {"static_graph": True}, False),
        ("unused", {"find_unused_parameters": True}, True),
        ("mixed", {}, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_script_that_swaps_the_import_trains_as_before(name: str, arguments: dict[str, Any], accumulate: bool) -> None:
    run_workers(side_by_side, 2, name, arguments, accumulate)


def bare_world(rank: int, size: int) -> bytes:
    model = lockstep.DistributedDataParallel(MLP(), timeout_s=20)  # no init_process_group: the world comes from the variables
    losses(model, rank, size)
    return digest(model)


def test_it_needs_no_process_group() -> None:
    assert len(set(run_workers(bare_world, 2))) == 1


def subgroup(rank: int, size: int) -> bytes:
    with_group(rank, size)
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[0] if rank in (0, 2) else groups[1]
    model = build("mlp", seed=rank)
    model = lockstep.DistributedDataParallel(model, process_group=mine, timeout_s=20)
    losses(model, dist.get_rank(mine), dist.get_world_size(mine))
    result = digest(model)
    dist.barrier()
    return result


def test_a_process_group_of_some_ranks() -> None:
    digests = run_workers(subgroup, 3)
    assert digests[0] == digests[2] != digests[1]


def with_hook(rank: int, size: int, which: str) -> list[float]:
    with_group(rank, size)
    model = MLP()
    plain = copy.deepcopy(model)
    # powerSGD's callbacks wait for further collectives on gloo's two threads: with several buckets they wait for each other
    ours = lockstep.DistributedDataParallel(model, timeout_s=20, bucket_cap_mb=25 if which == "powersgd" else 0.003)
    if which == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1)
        ours.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ours.register_comm_hook(None, getattr(default_hooks, which))
    found = losses(ours, rank, size)
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        loss_of(plain, *batch(step, 12)).backward()
        plain_opt.step()
        plain_opt.zero_grad()
    # lossy by design: fp16 keeps 1e-3 of a gradient, rank 8 of 17 far less
    tolerance = {"allreduce_hook": 1e-5, "fp16_compress_hook": 1e-3}.get(which, 0.1)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert ours.module.layers[0].weight.grad is None
    dist.barrier()
    return found


@pytest.mark.parametrize("which", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powersgd"])
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_communication_hooks_work_on_our_buckets(which: str) -> None:
    run_workers(with_hook, 2, which)


def bad_hooks(rank: int, size: int) -> None:
    with_group(rank, size)
    model = lockstep.DistributedDataParallel(MLP(), timeout_s=20)
    with pytest.raises(lockstep.UsageError, match="callable"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, lambda state, bucket: 5)
    with pytest.raises(lockstep.UsageError, match="already"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(lockstep.UsageError, match=r"torch\.futures\.Future"):
        loss_of(model, *batch(0, 12)).backward()


def test_what_is_not_a_hook_gets_an_error_that_says_so() -> None:
    run_workers(bad_hooks, 2)


def ignored(rank: int, size: int) -> tuple[float, float]:
    model = CNN()
    lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "body.1.running_mean"])
    torch.manual_seed(rank)
    nn.init.normal_(model.head.weight)
    wrapped = lockstep.DistributedDataParallel(model, timeout_s=20)
    losses(wrapped, rank, size, steps=2)
    return float(model.head.weight.sum()), float(model.head.bias.sum())


def test_ignored_parameters_are_left_alone() -> None:
    first, second = run_workers(ignored, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def joined(rank: int, size: int) -> bytes:
    model = lockstep.DistributedDataParallel(MLP(), timeout_s=20)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            loss_of(model, *batch(step, 12)).backward()
            opt.step()
            opt.zero_grad()
    return digest(model)


def test_join_as_torch_spells_it() -> None:
    assert len(set(run_workers(joined, 2))) == 1


def test_arguments_that_cannot_work_get_an_error_that_says_what_to_do() -> None:
    for arguments, words in [
        ({"device_ids": [0]}, "are on cpu"),
        ({"device_ids": [0, 1]}, "one process drives one device"),
        ({"mixed_precision": object()}, "not a policy"),
        ({"bucket_cap_mb": -1}, "positive"),
        ({"timeout_s": 0}, "positive"),
    ]:
        with pytest.raises(lockstep.UsageError, match=words) as raised:
            lockstep.DistributedDataParallel(MLP(), **arguments)
        assert isinstance(raised.value, RuntimeError)
        assert isinstance(raised.value, TypeError)
    with pytest.raises(TypeError, match="bukcet"):
        lockstep.DistributedDataParallel(MLP(), bukcet=1)
    model = MLP()
    lockstep.replicate(model)
    with pytest.raises(lockstep.UsageError, match="already"):
        lockstep.replicate(model)
    with pytest.raises(lockstep.UsageError, match="no parameters"):
        lockstep.replicate(nn.ReLU())
    with pytest.raises(lockstep.UsageError, match="lazy"):
        lockstep.replicate(nn.LazyLinear(3))
    with pytest.raises(lockstep.UsageError, match="ignore names 'typo'"):
        lockstep.replicate(MLP(), ignore=["typo"])


class SometimesNone(torch.autograd.Function):
    """Gives its second input a gradient, or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, defined: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.defined = defined
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return grad, (grad * x).sum(0) if ctx.defined else None, None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.layers = MLP()

    def forward(self, x: torch.Tensor, defined: bool) -> torch.Tensor:
        return self.layers(SometimesNone.apply(x, self.weight, defined))


def undefined(rank: int, size: int) -> list[torch.Tensor]:
    model = lockstep.DistributedDataParallel(Scaled(), timeout_s=20, bucket_cap_mb=0.001)
    seen = []
    for defined in [True, rank == 0, False, True]:
        model(torch.ones(3, 12), defined).sum().backward()
        seen.append(copy.deepcopy(model.module.weight.grad))  # the next backward writes to the same memory
        model.zero_grad()
    assert seen[2] is None
    torch.testing.assert_close(seen[1] * 2, seen[0])  # only rank 0 had a gradient
    torch.testing.assert_close(seen[3], seen[0])
    return [seen[0].tolist(), seen[1].tolist()]


def test_an_undefined_gradient_is_an_unused_parameter() -> None:
    first, second = run_workers(undefined, 2)
    assert first == second


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": saved_and_loaded}


def copied(rank: int, size: int, has_group: bool) -> None:
    if has_group:
        with_group(rank, size)
    model = lockstep.DistributedDataParallel(build("cnn"), timeout_s=20)
    losses(model, rank, size, steps=2)
    if rank == 0:  # a copy that only evaluates needs no other rank
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        average.eval()
        model.eval()
        x = batch(0, 12)[0]
        torch.testing.assert_close(average(x), model(x))
        model.train()
    copies = [make(model) for make in COPIES.values()]
    expected = losses(model, rank, size)
    for each in copies:
        assert losses(each, rank, size) == expected
        assert digest(each) == digest(model)
        assert each.replica is not model.replica
    fresh = copy.deepcopy(copies[0])
    loss = loss_of(fresh, *batch(rank, 12))
    if rank == 0:  # not averaged: does not connect
        with fresh.no_sync():
            loss.backward()
        assert fresh.connected_replica is None
        assert fresh.require_backward_grad_sync
    _kept.append(copies)


@pytest.mark.parametrize("has_group", [True, False])
def test_a_copy_evaluates_at_once_and_connects_in_its_first_backward(has_group: bool) -> None:
    run_workers(copied, 2, has_group)


def copy_of_a_subgroup(rank: int, size: int) -> None:
    with_group(rank, size)
    model = lockstep.DistributedDataParallel(MLP(), process_group=dist.new_group([0, 1]), timeout_s=20)
    with pytest.raises(RuntimeError, match=r"Copy or save \.module instead"):
        copy.deepcopy(model)


def test_a_wrapper_with_a_process_group_of_its_own_says_that_it_cannot_be_copied() -> None:
    run_workers(copy_of_a_subgroup, 2)


def wrapped_again(rank: int, size: int) -> bytes:
    model = build("mlp")
    for _ in range(3):  # as a sweep or a notebook does: the earlier wrapper is still there when the next is made
        wrapper = lockstep.DistributedDataParallel(model, timeout_s=20)
        losses(wrapper, rank, size, steps=2)
    older, wrapper = wrapper, lockstep.DistributedDataParallel(model, timeout_s=20)
    with pytest.raises(RuntimeError, match="two DistributedDataParallel wrap this MLP"):
        loss_of(older, *batch(rank, 12)).backward()
    model.zero_grad()
    del wrapper
    losses(older, rank, size, steps=2)  # the other wrapper is gone
    wrapper = older
    outer = nn.Sequential(model, nn.Linear(4, 4))
    with pytest.raises(lockstep.UsageError, match="belongs to another replicated module"):
        lockstep.DistributedDataParallel(outer, timeout_s=20)
    result = digest(wrapper)
    wrapper.loop = wrapper  # a cycle: gone only when the garbage collector has run
    del wrapper, older
    losses(lockstep.DistributedDataParallel(outer, timeout_s=20), rank, size)
    if rank == 0:  # no wrapper is left: the model trains alone
        loss_of(model, *batch(0, 12)).backward()
    return result


def test_a_module_can_be_wrapped_again() -> None:
    first, second = run_workers(wrapped_again, 2)
    assert first == second


def step_in_backward(params: list[nn.Parameter]) -> None:
    """What a tutorial writes: one optimizer for each parameter, which steps and frees the gradient inside backward."""
    optimizers = {param: torch.optim.SGD([param], lr=0.05, momentum=0.9) for param in params}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        param.grad = None

    for param in params:
        param.register_post_accumulate_grad_hook(step)


def apply_in_backward(params: list[nn.Parameter]) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.05, "momentum": 0.9})


def optimizer_in_backward(rank: int, size: int, kind: str, wrap_first: bool) -> bytes:
    install = {"plain": step_in_backward, "torch": apply_in_backward}[kind]
    model, same = build("unused"), lockstep.DistributedDataParallel(build("unused"), timeout_s=20)
    if not wrap_first:
        install(list(model.parameters()))
    model = lockstep.DistributedDataParallel(model, timeout_s=20, bucket_cap_mb=0.001)
    if wrap_first:
        install(list(model.parameters()))
    losses(same, rank, size)
    for step in range(6):
        x, y = batch(step, 12)
        loss_of(model, part(x, rank, size), part(y, rank, size)).backward()
        assert all(param.grad is None for param in model.parameters())
    assert digest(model) == digest(same)
    return digest(model)


@pytest.mark.parametrize(("kind", "wrap_first"), [("plain", True), ("plain", False), ("torch", True), ("torch", False)])
def test_an_optimizer_inside_backward_sees_averaged_gradients(kind: str, wrap_first: bool) -> None:
    assert len(set(run_workers(optimizer_in_backward, 2, kind, wrap_first))) == 1


class Checkpointed(nn.Module):
    """Records the dtypes in which it computes. Its middle is computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.use_reentrant, self.dtypes = use_reentrant, set()

    def compute(self, h: torch.Tensor) -> torch.Tensor:
        self.dtypes |= {h.dtype, self.middle.weight.dtype}
        return torch.tanh(self.middle(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(self.compute, self.first(x), use_reentrant=self.use_reentrant)
        return self.norm(self.last(h))


def mixed_precision(rank: int, size: int, use_reentrant: bool) -> bytes:
    torch.manual_seed(rank)
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    low = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = lockstep.DistributedDataParallel(Checkpointed(use_reentrant), mixed_precision=low, timeout_s=20)
    same = lockstep.DistributedDataParallel(copy.deepcopy(model.module), mixed_precision=policy, timeout_s=20)
    found, expected = losses(model, rank, size), losses(same, rank, size)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert model.module.dtypes == {torch.bfloat16}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert model.state_dict()["module.middle.weight"].dtype == torch.float32
    loss_of(copy.deepcopy(model), *batch(rank, 12)).backward()
    return digest(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_mixed_precision_computes_and_reduces_low_and_keeps_the_parameters(use_reentrant: bool) -> None:
    assert len(set(run_workers(mixed_precision, 2, use_reentrant))) == 1


ATTRIBUTES = [
    "device",
    "device_ids",
    "device_type",
    "output_device",
    "dim",
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "parameters_to_ignore",
    "bucket_bytes_cap",
    "broadcast_bucket_size",
    "is_multi_device_module",
    "mixed_precision",
    "forward_sync_buffers",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "process_group",
]


def attributes(rank: int, size: int) -> None:
    with_group(rank, size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    model = build("cnn")
    for arguments in (
        {},
        {"bucket_cap_mb_list": [1, 2], "static_graph": True, "batched_grad_copy": True, "device_mesh": mesh},
        {
            "delay_all_reduce_named_params": [("head.weight", model.head.weight)],
            "param_to_hook_all_reduce": model.head.bias,
            "skip_all_reduce_unused_params": True,
            "forward_sync_buffers": False,
        },
    ):
        ours = lockstep.DistributedDataParallel(model, timeout_s=20, **arguments)
        losses(ours, rank, size, steps=3)
        if "param_to_hook_all_reduce" in arguments:
            continue  # torch's class leaves these parameters to a buffer of its own
        theirs = TorchDDP(copy.deepcopy(model), **arguments)
        losses(theirs, rank, size, steps=3)
        _kept.append(theirs)
        assert {name: getattr(ours, name) for name in ATTRIBUTES} == {name: getattr(theirs, name) for name in ATTRIBUTES}
        assert ours.will_sync_module_buffers() == theirs.will_sync_module_buffers()
        assert [b.shape for b in ours.modules_buffers] == [b.shape for b in theirs.modules_buffers]
        found, expected = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
        for key in ("world_size", "rank", "module_name", "num_parameter_tensors", "total_parameter_size_bytes", "bucket_cap_bytes"):
            assert found[key] == expected[key], key
        assert found["iteration"] == 3
        assert ours.logger._get_ddp_logging_data().ints_map["world_size"] == size
        ours.reducer.prepare_for_backward([])
    with pytest.raises(ValueError, match="belong together"):
        lockstep.DistributedDataParallel(MLP(), param_to_hook_all_reduce=model.head.bias)
    with pytest.raises(RuntimeError, match="both given"):
        lockstep.DistributedDataParallel(MLP(), process_group=dist.group.WORLD, device_mesh=mesh)


@pytest.mark.filterwarnings("ignore")
def test_attributes_and_figures_are_torchs() -> None:
    run_workers(attributes, 2)


def buffer_hook(rank: int, size: int, location: str) -> list[float]:
    with_group(rank, size)

    def add(state: str, buffers: dict[str, torch.Tensor]) -> Any:
        assert state == "state"
        return [dist.all_reduce(buffers["body.1.running_mean"], async_op=True).get_future()]

    model = lockstep.DistributedDataParallel(build("cnn"), timeout_s=20)
    model._register_buffer_comm_hook("state", add, getattr(_BufferCommHookLocation, location))
    mean = model.module.body[1].running_mean
    mean.fill_(rank + 1)
    model.module.body[1].momentum = 0.0
    loss_of(model, *batch(rank, 12)).backward()
    return mean.tolist()


@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_communication_hook_replaces_the_copying_of_buffers(location: str) -> None:
    assert run_workers(buffer_hook, 2, location) == [[3.0] * 6] * 2


def profiled(rank: int, size: int) -> list[str]:
    model = lockstep.DistributedDataParallel(MLP(), timeout_s=20, bucket_cap_mb=0.001)
    losses(model, rank, size, steps=2)
    with torch.profiler.profile() as profile:
        losses(model, rank, size, steps=1)
    return sorted({event.name for event in profile.events() if event.name.startswith("lockstep::")})


def test_a_profiler_shows_the_reductions() -> None:
    first, second = run_workers(profiled, 2)
    assert first == second
    assert first[:2] == ["lockstep::reduce bucket 0", "lockstep::reduce bucket 1"]
