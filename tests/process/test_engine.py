"""Everything that needs no flag and raises nothing. Each body runs on every rank and checks itself
against a plain copy of the model that processes all ranks' data in one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.models import CNN, MLP, UnusedBranch, batch, build, digest, loss_of, part
from tests.process.reference import grads_of, mean_grads, require_grads
from tests.workers import run_workers


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    return lockstep.replicate(model, bucket_mb=0.002, timeout_s=20, **options)


def mine(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step, 12)
    return part(x, rank, size), part(y, rank, size)


# -- at the start ----------------------------------------------------------------------------


def start_with_rank_dependent_weights(rank: int, size: int) -> bytes:
    model = CNN()
    torch.manual_seed(rank)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.copy_(torch.rand(tensor.shape) * 9)
    before = digest(model)
    replicated(model)
    assert (digest(model) == before) == (rank == 0)
    return digest(model)


def test_parameters_and_buffers_start_as_rank_0_has_them() -> None:
    digests = run_workers(start_with_rank_dependent_weights, 3)
    assert len(set(digests)) == 1


def differ(rank: int, size: int, how: str) -> str:
    model = MLP()
    if rank == 1:
        if how == "shape":
            model.layers[2] = nn.Linear(33, 18)
        elif how == "dtype":
            model.layers[2].weight.data = model.layers[2].weight.data.double()
        elif how == "requires_grad":
            model.layers[2].weight.requires_grad_(False)
        elif how == "buffer":
            model.register_buffer("extra", torch.zeros(3))
        elif how == "missing":
            model.layers[4] = nn.Identity()
    with pytest.raises(lockstep.UsageError) as caught:
        lockstep.replicate(model, timeout_s=20, bucket_mb=3 if how == "setting" and rank == 1 else 5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["layers.2.weight", "[17, 33]", "[18, 33]"]),
        ("dtype", ["layers.2.weight", "float32", "float64"]),
        ("requires_grad", ["layers.2.weight", "requires_grad=True", "requires_grad=False"]),
        ("buffer", ["extra", "nothing more"]),
        ("missing", ["layers.4.weight", "nothing more"]),
        ("setting", ["bucket_mb", "5", "3"]),
    ],
)
def test_a_difference_between_models_is_named_on_every_rank(how: str, words: list[str]) -> None:
    messages = run_workers(differ, 3, how)
    assert len(set(messages)) == 1
    for word in [*words, "rank 0", "rank 1"]:
        assert word in messages[0]


# -- unused parameters and differing control flow ----------------------------------------------


def branch_on_some_ranks(rank: int, size: int) -> None:
    model = replicated(UnusedBranch())
    for step in range(5):
        users = {0: [1], 1: [0, 2], 2: [], 3: [0, 1, 2], 4: [1]}[step]  # another set of ranks each step

        def backward(m: nn.Module, r: int, step: int = step, users: list[int] = users) -> None:
            x, y = mine(step, r, size)
            nn.functional.cross_entropy(m(x, branch=r in users), y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)
        assert model.unused.weight.grad is None


def test_parameters_unused_on_some_or_all_ranks_need_no_flag() -> None:
    run_workers(branch_on_some_ranks, 3)


class Routed(nn.Module):
    """Every rank goes through other layers, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for i in route:
            x = torch.tanh(self.experts[i](x))
        return self.head(x)


def route_by_rank(rank: int, size: int) -> None:
    model = lockstep.replicate(Routed(), bucket_mb=0.0005, timeout_s=20)  # a bucket per expert
    routes = [[[0, 1, 2], [2, 1, 0], [3]], [[3, 3], [], [0, 1, 2, 3]], [[1], [0], [1, 0]]]
    for step, by_rank in enumerate(routes):

        def backward(m: nn.Module, r: int, step: int = step, by_rank: list[list[int]] = by_rank) -> None:
            x, y = mine(step, r, size)
            nn.functional.cross_entropy(m(x, by_rank[r]), y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)


def test_control_flow_may_differ_by_rank() -> None:
    run_workers(route_by_rank, 3)


# -- forwards and backwards in any number ------------------------------------------------------


def many_forwards_and_backwards(rank: int, size: int, set_to_none: bool) -> None:
    model = replicated(MLP())
    for step in range(3):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = mine(step, r, size)
            first, second = loss_of(m, x, y), loss_of(m, x * 2, y)
            (first + second).backward()  # several forwards, one backward
            loss_of(m, x * 3, y).backward()  # and another backward before the step
            third = loss_of(m, x * 4, y)
            third.backward(retain_graph=True)
            third.backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad(set_to_none=set_to_none)
        backward(model, rank)
        require_grads(model, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_forwards_and_backwards_per_step_add_up(set_to_none: bool) -> None:
    run_workers(many_forwards_and_backwards, 2, set_to_none)


def gradient_penalty(rank: int, size: int) -> None:
    model = replicated(MLP())

    def backward(m: nn.Module, r: int) -> None:
        x, y = mine(0, r, size)
        x.requires_grad_(True)
        loss = loss_of(m, x, y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)  # must not count as a backward
        (loss + grad.pow(2).sum()).backward()

    expected = mean_grads(model, size, backward)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)


def test_autograd_grad_inside_a_step_is_not_a_backward() -> None:
    run_workers(gradient_penalty, 2)


def gradients_are_views(rank: int, size: int) -> None:
    model = replicated(MLP())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss_of(model, *mine(step, rank, size)).backward()
        buckets = {b.wire.untyped_storage().data_ptr() for b in lockstep.replica_of(model).reducer._buckets}
        assert len(buckets) > 1
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} <= buckets
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)


def test_gradients_are_views_of_the_buckets_whatever_zero_grad_does() -> None:
    run_workers(gradients_are_views, 2)


def learn_order(rank: int, size: int) -> list[int]:
    model = replicated(Routed())
    for step in range(2):
        x, y = mine(step, rank, size)
        nn.functional.cross_entropy(model(x, [0, 1, 2, 3] if rank == 0 else [3, 1, 2, 0]), y).backward()
    return list(lockstep.replica_of(model).reducer.plan.params)


def test_buckets_follow_the_ready_order_of_the_first_backward_agreed_across_ranks() -> None:
    orders = run_workers(learn_order, 2)
    assert orders[0] == orders[1]
    # head, then experts 3, 2, 1, 0: rank 0's route backwards. Bias before weight, as autograd gives them.
    assert [i // 2 for i in orders[0]] == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]


# -- accumulation ------------------------------------------------------------------------------


def accumulate(rank: int, size: int) -> None:
    model = replicated(UnusedBranch())
    for step in range(3):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = mine(step, r, size)
            nn.functional.cross_entropy(m(x, branch=True), y).backward()
            loss_of(m, x * 2, y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        x, y = mine(step, rank, size)
        with lockstep.replica_of(model).no_sync():
            nn.functional.cross_entropy(model(x, branch=True), y).backward()  # the branch is used here alone
        loss_of(model, x * 2, y).backward()
        require_grads(model, expected)


def test_no_sync_accumulates_and_the_next_backward_reduces_the_whole_window() -> None:
    run_workers(accumulate, 2)


# -- checkpointing -----------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, everything: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, 4)
        self.reentrant, self.everything = reentrant, everything

    def forward(self, x: Tensor) -> Any:
        def run(module: Any, h: Tensor) -> Tensor:
            return checkpoint(module, h, use_reentrant=self.reentrant)

        x = x.detach().requires_grad_(True)
        h = run(self.embed, x) if self.everything else self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:  # block 0 twice: its gradient comes in two parts
            h = run(block, h)
        return Opaque(run(self.head, h) if self.everything else self.head(h))


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.inner = {"logits": [value]}


def checkpointed(rank: int, size: int, reentrant: bool, everything: bool) -> int:
    model = replicated(Checkpointed(reentrant, everything))
    for step in range(4):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = mine(step, r, size)
            nn.functional.cross_entropy(m(x).inner["logits"][0], y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)
    return lockstep.replica_of(model).reducer.step


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_both_kinds_with_a_shared_block(reentrant: bool, everything: bool) -> None:
    assert run_workers(checkpointed, 2, reentrant, everything) == [4, 4], "one reduction per backward, not one per segment"


# -- freezing ----------------------------------------------------------------------------------


def freeze_and_unfreeze(rank: int, size: int) -> None:
    model = UnusedBranch()
    for p in model.sometimes.parameters():
        p.requires_grad_(False)
    model = replicated(model)
    for step in range(6):
        thawed = step in (2, 3, 5)
        for p in model.sometimes.parameters():
            p.requires_grad_(thawed)
        model.used.layers[0].weight.requires_grad_(step != 3)

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = mine(step, r, size)
            nn.functional.cross_entropy(m(x, branch=True), y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)
    assert len(lockstep.replica_of(model).reducer.plan.params) == 10, "the unfrozen ones have a place in the plan now"


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    run_workers(freeze_and_unfreeze, 2)


def stale_gradient(rank: int, size: int) -> None:
    model = replicated(MLP())
    loss_of(model, *mine(0, rank, size)).backward()
    loss_of(model, *mine(1, rank, size)).backward()
    frozen = model.layers[0].weight
    kept = frozen.grad.clone()
    frozen.requires_grad_(False)
    loss_of(model, *mine(2, rank, size)).backward()
    assert torch.equal(frozen.grad, kept), "a frozen parameter's old gradient is the user's"


def test_the_gradient_of_a_parameter_frozen_later_is_left_alone() -> None:
    run_workers(stale_gradient, 2)


# -- outputs -----------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@dataclass
class Record:
    logits: Tensor
    note: str = "x"


WRAPPERS = {
    "tuple": lambda t: (t, None, 3),
    "namedtuple": lambda t: Pair(t, "text"),
    "dict": lambda t: {"deep": [{"logits": t}]},
    "dataclass": Record,
    "object": Opaque,
    "generator": lambda t: (x for x in [t]),
}


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = MLP(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        self.logits = logits
        return WRAPPERS[self.kind](logits)


def any_output(rank: int, size: int) -> None:
    for kind in WRAPPERS:
        model = Wrapped(kind)

        def backward(m: nn.Module, r: int) -> None:
            x, y = mine(0, r, size)
            m(x)
            nn.functional.cross_entropy(m.logits, y).backward()
            m.logits = None

        expected = mean_grads(model, size, backward)
        replicated(model)
        for _ in range(2):
            model.zero_grad()
            backward(model, rank)
            require_grads(model, expected)
        lockstep.replica_of(model).close()


def test_outputs_may_be_of_any_python_type() -> None:
    run_workers(any_output, 2)


# -- sparse gradients --------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12, sparse=True)
        self.never = nn.Embedding(5, 3, sparse=True)
        self.body = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.words((x.abs() * 9).long() % 50).mean(1))


def sparse(rank: int, size: int) -> list[int]:
    model = replicated(Bag())
    rows = []
    for step in range(3):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = mine(step, r, size)
            if r == 1 and step == 1:  # rank 1 does not use the embedding in this step
                nn.functional.cross_entropy(m.body(x), y).backward()
            else:
                loss_of(m, x, y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        assert model.words.weight.grad.is_sparse
        rows.append(model.words.weight.grad._nnz())
        require_grads(model, expected)
    return rows


def test_sparse_gradients_stay_sparse_and_are_averaged() -> None:
    results = run_workers(sparse, 3)
    assert results[0] == results[1] == results[2]


def surprise_sparse(rank: int, size: int) -> None:
    """A gradient that turns out sparse although no module announced it."""
    weight = nn.Parameter(torch.randn(20, 4))
    model = nn.ParameterList([weight])
    replicated(model)
    rows = torch.arange(5) + rank
    nn.functional.embedding(rows, weight, sparse=True).sum().backward()
    expected = torch.zeros(20, 4)
    for r in range(size):
        expected[torch.arange(5) + r] += 1 / size
    torch.testing.assert_close(weight.grad, expected)


def test_an_unannounced_sparse_gradient_is_averaged_as_a_dense_one() -> None:
    run_workers(surprise_sparse, 2)


# -- what stands around the backward -----------------------------------------------------------


def scaler_and_clipping(rank: int, size: int) -> list[bytes]:
    model = replicated(MLP())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain = copy.deepcopy(model)
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        bad = float("inf") if step == 2 else 1.0  # an overflow on rank 1 alone: all must skip the step
        x, y = mine(step, rank, size)
        scaler.scale(loss_of(model, x, y) * (bad if rank == 1 else 1.0)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        whole, labels = batch(step, 12)
        plain_scaler.scale(loss_of(plain, whole, labels) * bad).backward()
        plain_scaler.unscale_(plain_opt)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_scaler.step(plain_opt)
        plain_scaler.update()
        plain_opt.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    return [digest(model)]


def test_grad_scaler_and_clipping_see_averaged_gradients() -> None:
    results = run_workers(scaler_and_clipping, 2)
    assert results[0] == results[1]


def compiled(rank: int, size: int, what: str) -> None:
    model = MLP() if what != "batchnorm" else CNN()
    plain = copy.deepcopy(model)

    def backward(m: nn.Module, r: int) -> None:
        loss_of(m, *mine(0, r, size)).backward()

    expected = mean_grads(plain, size, backward)
    if what == "blocks":
        model.layers[0].compile(backend="aot_eager")
        model.layers[2].compile(backend="aot_eager")
        callable_ = replicated(model)
    elif what == "before":
        callable_ = replicated(torch.compile(model, backend="aot_eager", fullgraph=True))
    else:
        callable_ = torch.compile(replicated(model), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        if what != "batchnorm":
            model.zero_grad()
            backward(callable_, rank)
            require_grads(model, expected)
        else:
            backward(callable_, rank)


@pytest.mark.parametrize("what", ["blocks", "before", "after", "batchnorm"])
def test_torch_compile_of_the_model_or_its_blocks(what: str) -> None:
    run_workers(compiled, 2, what, deadline_s=120)


def copies_are_plain(rank: int, size: int) -> None:
    model = replicated(MLP())
    loss_of(model, *mine(0, rank, size)).backward()
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for other in (copied,):
        with pytest.raises(lockstep.UsageError, match="not replicated"):
            lockstep.replica_of(other)
        if rank == 0:  # one rank alone: would hang if the copy were a replica
            other.zero_grad()
            loss_of(other, *mine(0, 0, size)).backward()
    step = lockstep.replica_of(model).reducer.step
    assert step == 1


def test_a_deep_copy_of_a_replica_is_a_plain_model() -> None:
    run_workers(copies_are_plain, 2)


# -- buffers -----------------------------------------------------------------------------------


def two_forwards_with_buffers(rank: int, size: int) -> tuple[bytes, float]:
    model = replicated(CNN())
    for step in range(3):
        x, y = mine(step, rank, size)
        model.train()
        first = loss_of(model, x, y)
        model.eval()  # eval mode saves the running statistics themselves for backward
        second, third = loss_of(model, x, y), loss_of(model, x * 2, y)
        (first + second).backward()  # buffers are written at its end ...
        third.backward()  # ... but not under the feet of this graph
        model.zero_grad()
    return digest(model), float(model.body[1].running_mean.sum())


def test_buffers_follow_rank_0_and_no_live_graph_sees_them_change() -> None:
    results = run_workers(two_forwards_with_buffers, 2)
    assert results[0] == results[1]


def rank_0_statistics(rank: int, size: int, broadcast: bool) -> Tensor:
    model = replicated(nn.BatchNorm1d(3), broadcast_buffers=broadcast)
    model(torch.full((4, 3), float(rank + 1)) + torch.arange(4.0).view(4, 1)).sum().backward()
    return model.running_mean


def test_buffers_are_rank_0s_after_a_step_unless_told_otherwise() -> None:
    first, second = run_workers(rank_0_statistics, 2, True)
    torch.testing.assert_close(first, torch.full((3,), 0.25))
    assert torch.equal(first, second)
    first, second = run_workers(rank_0_statistics, 2, False)
    assert not torch.equal(first, second)


# -- one rank ----------------------------------------------------------------------------------


def test_a_lone_process_trains_as_before_and_may_repeat_a_backward_that_raised() -> None:
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    lockstep.replicate(model, bucket_mb=0.002)
    x, y = batch(0, 8)
    for _ in range(3):
        loss_of(model, x, y).backward()
        loss_of(plain, x, y).backward()
        handle = model.layers[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, x, y).backward()
        handle.remove()
        model.zero_grad()
        plain.zero_grad()
    loss_of(model, x, y).backward()
    loss_of(plain, x, y).backward()
    for a, b in zip(grads_of(model).values(), grads_of(plain).values(), strict=True):
        assert torch.equal(a, b)
    assert build("mlp") is not None


# -- found by breaking the engine on purpose: each of these failed with one line changed --------------


def raise_before_any_gradient(rank: int, size: int) -> None:
    model = replicated(MLP())
    x, y = mine(0, rank, size)
    expected = mean_grads(model, size, lambda m, r: loss_of(m, *mine(0, r, size)).backward())
    out = model(x)
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nn.functional.cross_entropy(out, y).backward()
    loss_of(model, x, y).backward()
    require_grads(model, expected)


def test_a_backward_that_raised_before_any_gradient_leaves_no_trace() -> None:
    run_workers(raise_before_any_gradient, 2)


def nothing_is_sent(rank: int, size: int) -> int:
    model = replicated(MLP())
    replica = lockstep.replica_of(model)
    with replica.no_sync():
        with replica.no_sync():
            pass
        loss_of(model, *mine(0, rank, size)).backward()
    return replica.reducer.step


def test_no_sync_sends_nothing_nested_or_not() -> None:
    assert run_workers(nothing_is_sent, 2) == [0, 0]


class SparseOrDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 4, sparse=True)
        self.body = nn.Linear(12, 4)

    def forward(self, x: Tensor, dense: bool) -> Tensor:
        return self.body(x) + (x @ self.words.weight if dense else self.words(x.abs().long() % 12).sum(1))


def sparse_here_dense_there(rank: int, size: int) -> None:
    model = replicated(SparseOrDense())

    def backward(m: nn.Module, r: int) -> None:
        x, y = mine(0, r, size)
        nn.functional.cross_entropy(m(x, dense=r == 0), y).backward()

    expected = mean_grads(model, size, backward)
    backward(model, rank)
    assert not model.words.weight.grad.is_sparse
    require_grads(model, expected)


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another() -> None:
    run_workers(sparse_here_dense_there, 2)


def hook_with_a_new_tensor(rank: int, size: int) -> None:
    model = replicated(MLP())
    replica = lockstep.replica_of(model)

    def hook(state: Any, bucket: Any) -> Any:
        mean = bucket.buffer().clone()
        replica.comm.reduce(mean, "mean", "a hook's own reduction").wait()
        future: Any = torch.futures.Future()
        future.set_result(mean)
        return future

    replica.register_comm_hook(None, hook)
    expected = mean_grads(model, size, lambda m, r: loss_of(m, *mine(0, r, size)).backward())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, *mine(0, rank, size)).backward()
        require_grads(model, expected)


def test_a_communication_hook_may_return_a_new_tensor() -> None:
    run_workers(hook_with_a_new_tensor, 2)


def buffers_stay_where_they_are(rank: int, size: int) -> bool:
    model = replicated(nn.BatchNorm1d(3))
    held = model.running_mean.data_ptr()
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
    return model.running_mean.data_ptr() == held


def test_buffers_keep_their_memory_when_no_graph_needs_it() -> None:
    assert run_workers(buffers_stay_where_they_are, 2) == [True, True]


# -- found by attacking it ---------------------------------------------------------------------


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.layer(x) if use else x * 1.0


def drop_the_only_layer(rank: int, size: int) -> None:
    model = replicated(LayerDrop())
    outside = torch.ones(1, requires_grad=True)
    for step in range(6):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, _ = mine(step, r, size)
            m(x * outside * 10**step, use=(step + r) % size == 1).sum().backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)


def test_a_rank_whose_output_uses_no_parameter_still_takes_part() -> None:
    run_workers(drop_the_only_layer, 2)


def refuse(rank: int, size: int, how: str) -> str:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1))
    if how == "strides":
        if rank == 0:
            model[0].weight = nn.Parameter(torch.randn(3, 2).t())
        words = "strides [1, 2]"
    elif how == "shared":
        lockstep.replicate(model[0], timeout_s=20)
        words = "parameter 0.weight belongs to another replicated module"
    with pytest.raises(lockstep.UsageError) as caught:
        lockstep.replicate(model, timeout_s=20)
    return str(caught.value) if words in str(caught.value) else f"{words} not in: {caught.value}"


@pytest.mark.parametrize("how", ["strides", "shared"])
def test_what_would_be_averaged_wrongly_is_refused(how: str) -> None:
    messages = run_workers(refuse, 2, how)
    assert messages[0] == messages[1]
    assert " not in: " not in messages[0]


def raise_then_go_on(rank: int, size: int, comm: str) -> None:
    model = lockstep.replicate(MLP(), timeout_s=20, comm=comm, bucket_mb=0.002)
    x, y = mine(0, rank, size)
    for _ in range(2):
        loss_of(model, x, y).backward()
        model.zero_grad()

    def backward(m: nn.Module, r: int) -> None:
        a, b = mine(0, r, size)
        with contextlib.nullcontext() if m is not model else lockstep.replica_of(model).no_sync():
            loss_of(m, a, b).backward()
        handle = m.layers[4].weight.register_hook(lambda grad: 1 / 0)  # before any bucket has left
        with pytest.raises(ZeroDivisionError):
            loss_of(m, a, b).backward()
        handle.remove()
        loss_of(m, a * 2, b).backward()

    expected = mean_grads(model, size, backward)
    backward(model, rank)
    require_grads(model, expected)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_a_backward_that_raised_before_a_bucket_left_may_be_repeated(comm: str) -> None:
    run_workers(raise_then_go_on, 2, comm)


class SideLoss(nn.Module):
    """A hook on an activation runs another loss, of parameters of the same model, in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper, self.side = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.lower(x))

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                self.side(x).pow(2).mean().backward()

        h.register_hook(hook)
        return self.upper(h)


def backward_in_a_hook(rank: int, size: int) -> int:
    model = lockstep.replicate(SideLoss(), bucket_mb=0.0002, timeout_s=20)  # buckets leave before the hook runs
    for step in range(4):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            loss_of(m, *mine(step, r, size)).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)
    return lockstep.replica_of(model).reducer.step


def test_another_backward_inside_a_hook() -> None:
    assert run_workers(backward_in_a_hook, 2) == [4, 4], "one reduction per backward, not one for each of the two"


def step_in_a_hook(rank: int, size: int) -> str:
    model = replicated(MLP())
    nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in model.parameters()]
    for node in nodes:  # a hook on autograd's own node, which cannot be deferred

        def take(*_: Any, param: Tensor = node.variable) -> None:
            param.grad = None

        node.register_hook(take)
    with pytest.raises(lockstep.UsageError) as caught:
        for step in range(2):  # in the first backward the gradients may have been undefined
            loss_of(model, *mine(step, rank, size)).backward()
    return str(caught.value)


def test_a_hook_that_takes_gradients_away_is_named() -> None:
    for message in run_workers(step_in_a_hook, 2):
        assert "layers." in message
        assert "optimizer inside backward" in message


def whole_numbers(rank: int, size: int) -> int:
    model = MLP()
    model.count = nn.Parameter(torch.tensor([rank + 7]), requires_grad=False)
    replicated(model)
    return int(model.count)


def test_parameters_of_whole_numbers_start_as_rank_0s_too() -> None:
    assert run_workers(whole_numbers, 2) == [7, 7]


def growing_buffer(rank: int, size: int) -> str:
    model = MLP()
    model.register_buffer("seen", torch.zeros(3))
    replicated(model)
    model.seen = torch.zeros(3 + rank)
    try:
        loss_of(model, *mine(0, rank, size)).backward()
    except lockstep.UsageError as error:
        return str(error)
    return "no error"


def test_buffers_whose_sizes_come_to_differ_are_an_error() -> None:
    for message in run_workers(growing_buffer, 2):
        assert "the buffers after step 0" in message


def forget_replicas(rank: int, size: int, comm: str) -> tuple[int, int]:
    def resources() -> tuple[int, int]:
        gc.collect()
        gc.collect()  # what the finalizers of the first pass let go
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):
        model = lockstep.replicate(MLP(), timeout_s=20, comm=comm)
        loss_of(model, *mine(0, rank, size)).backward()
        loss_of(model, *mine(0, rank, size)).backward()
        if _ == 0:
            lockstep.replica_of(model).close()
        del model
        before = resources()
    for _ in range(5):
        model = lockstep.replicate(MLP(), timeout_s=20, comm=comm)
        loss_of(model, *mine(0, rank, size)).backward()
        del model
    after = resources()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_a_forgotten_replica_leaves_no_thread_and_no_descriptor(comm: str) -> None:
    assert run_workers(forget_replicas, 2, comm) == [(0, 0), (0, 0)]
