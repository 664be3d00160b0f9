"""Comm.fold on every transport: the same bits as one process that adds along the tree, however lanes are my_lanes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.comm import fold_gloo
from lockstep.comm.base import Comm, Pending, real
from lockstep.comm.connections import Connections
from lockstep.comm.fold_nccl import fold_on_stream
from lockstep.comm.open_comm import open_comm
from lockstep.comm.store import open_store
from lockstep.comm.torch_group import TorchGroup, build_gloo, destroy_gloo
from lockstep.errors import InvariantError, PeerError, UsageError
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import Fold, Node, cover, fold, halves
from lockstep.world import World
from tests.contract.test_comm import KINDS, in_process, over
from tests.workers import run_workers

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@cache
def leaf(lane: int, n: int, dtype: torch.dtype) -> Tensor:
    """The value of one lane: of mixed magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(7 * lane + 1)
    parts = torch.randn(2, n, generator=generator) * 10.0 ** torch.randint(-2, 3, (2, n), generator=generator)
    return torch.complex(parts[0], parts[1]).to(dtype) if dtype.is_complex else parts[0].to(dtype)


@cache
def value(node: Node, n: int, dtype: torch.dtype) -> Tensor:
    """The reference: the value of a node of the tree."""
    if node[1] - node[0] == 1:
        return leaf(node[0], n, dtype)
    left, right = halves(node)
    return value(left, n, dtype) + value(right, n, dtype)


def total(lanes: int, n: int, dtype: torch.dtype, scale: float | None) -> Tensor:
    result = value((0, lanes), n, dtype).clone()
    if scale is not None:
        real(result).mul_(scale)
    return result


def deposit(tensor: Tensor, plan: Fold, rank: int, n: int) -> Tensor:
    """This rank's values into its first rows; whatever else lies there must not matter."""
    tensor.fill_(float("nan"))
    for row, node in enumerate(plan.held[rank]):
        tensor[row * n : (row + 1) * n] = value(node, n, tensor.dtype)
    return tensor


def require_total(tensor: Tensor, plan: Fold, n: int, scale: float | None) -> None:
    found, expected = tensor[:n], total(plan.lanes, n, tensor.dtype, scale)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (tensor.dtype, n, plan.held, scale)


def folds(comm: Comm) -> None:
    for lanes in (1, 5, 8, 13):
        if lanes < comm.size:
            continue
        plan = fold(lanes, assign_lanes(lanes, comm.size))
        for dtype in DTYPES:
            for n in (0, 1, 7, 1000, 70001):
                tensors = [comm.buffer(plan.width * n, dtype, CPU)]
                if n in (7, 70001) and dtype in (torch.float32, torch.complex64):
                    tensors.append(torch.empty(plan.width * n, dtype=dtype))  # no memory of the comm's
                for tensor in tensors:
                    for scale in (None, 1 / 3):
                        pending = comm.fold(deposit(tensor, plan, comm.rank, n), plan, scale, "a fold")
                        pending.wait()
                        assert pending.done()
                        require_total(tensor, plan, n, scale)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_bits_of_one_process(kind: str, size: int) -> None:
    over(kind, size, folds)


def cut_small(comm: Comm, copied_bytes: int = 1 << 20) -> None:
    """Let small tensors travel as large ones do."""
    if comm.name != "loopback":  # which is this very process, and needs none of it
        fold_gloo.PIECE_BYTES, fold_gloo.COPIED_BYTES = 1 << 12, copied_bytes


def folds_unusual_dealings(comm: Comm) -> None:
    """Ranks that hold nothing, or everything, or lanes from all over the tree; the root is not the first value of rank 0."""
    everything: list[Sequence[Node]] = [((0, 8),), (), ()]
    scattered: list[Sequence[Node]] = [((4, 8), (1, 2)), ((2, 4),), ((0, 1),)]
    last_has_most: list[Sequence[Node]] = [(), ((0, 1),), cover(8, 1, 8)]
    for held in (everything, everything[::-1], scattered, scattered[::-1], last_has_most):
        plan = Fold(8, tuple(tuple(nodes) for nodes in held))
        for n, copied_bytes in ((1, 0), (1, 1 << 20), (40, 0), (10007, 0), (10007, 1 << 20)):
            cut_small(comm, copied_bytes)
            tensor = comm.buffer(plan.width * n, torch.float32, CPU)
            comm.fold(deposit(tensor, plan, comm.rank, n), plan, 0.1, "a fold").wait()
            require_total(tensor, plan, n, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_any_dealing_of_lanes_will_do(kind: str) -> None:
    over(kind, 3, folds_unusual_dealings)


def interleaves(comm: Comm) -> None:
    """Everything at once; even ranks wait in reverse order, odd ones in order."""
    cut_small(comm, 1 << 10)
    pending: list[tuple[Pending, Any]] = []
    for i in range(24):
        plan = fold(5 + i, assign_lanes(5 + i, comm.size))
        n = (3000 * i) % 20011 + i
        tensor = comm.buffer(plan.width * n, DTYPES[i % 5], CPU) if i % 3 else torch.empty(plan.width * n, dtype=DTYPES[i % 5])
        deposit(tensor, plan, comm.rank, n)
        scale = None if i % 2 else 1 / (i + 1)
        pending.append(
            (comm.fold(tensor, plan, scale, f"fold {i}"), lambda t=tensor, p=plan, n=n, s=scale: require_total(t, p, n, s))
        )
        ranks = torch.full((comm.size, 2), -1)
        gathering = comm.all_gather(ranks, torch.tensor([comm.rank, i]), f"gather {i}")
        pending.append((gathering, lambda r=ranks, i=i: require(r.tolist() == [[k, i] for k in range(comm.size)])))
        for tensor in (torch.full((i + 1,), comm.rank + 1.0), comm.buffer(i + 1, torch.float32, CPU).fill_(comm.rank + 1.0)):
            reducing = comm.reduce(tensor, "sum", f"reduction {i}")
            pending.append((reducing, lambda t=tensor: require(bool((t == sum(range(comm.size + 1))).all()))))
        if i % 4 == comm.rank:
            comm.progress()
    for one, check in reversed(pending) if comm.rank % 2 == 0 else pending:
        one.wait()
        check()
    comm.barrier()


def require(fact: bool) -> None:
    assert fact


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_many_folds_and_other_operations_may_be_in_flight_and_waited_for_in_any_order(kind: str, size: int) -> None:
    over(kind, size, interleaves)


def overtakes(comm: Comm) -> None:
    """Rank 0 comes to its second fold long before the others have waited for their first, and the other way round."""
    n, plan = 50_000, fold(8, assign_lanes(8, comm.size))
    tensors = [comm.buffer(plan.width * n, torch.float32, CPU) for _ in range(3)]
    for turn in range(6):
        pending = []
        for tensor in tensors:
            pending.append(comm.fold(deposit(tensor, plan, comm.rank, n), plan, None, "a fold"))
            if (comm.rank + turn) % comm.size == 0:
                pending.pop().wait()
        for one in pending:
            one.wait()
        for tensor in tensors:
            require_total(tensor, plan, n, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_wait_for_each_fold_while_another_issues_all_first(kind: str) -> None:
    over(kind, 3, overtakes)


def waits_late(comm: Comm) -> None:
    wait_late(comm, lambda numel: comm.buffer(numel, torch.float32, CPU))
    wait_late(comm, torch.empty)


def wait_late(comm: Comm, make: Callable[[int], Tensor]) -> None:
    """Rank 0 waits for what came last first; the others come to that only when rank 0 has helped them with the rest."""
    plan = fold(8, assign_lanes(8, comm.size))
    first, second, ones = make(plan.width * 5000), make(plan.width * 5000), comm.buffer(100, torch.float32, CPU).fill_(1.0)
    issues = [
        lambda: comm.fold(deposit(first, plan, comm.rank, 5000), plan, None, "a fold"),
        lambda: comm.reduce(ones, "sum", "a sum"),
        lambda: comm.fold(deposit(second, plan, comm.rank, 5000), plan, None, "another fold"),
        lambda: comm.reduce(torch.ones(10), "sum", "another sum"),
    ]
    if comm.rank == 0:
        for one in reversed([issue() for issue in issues]):
            one.wait()
    else:
        for issue in issues:
            issue().wait()
    require_total(first, plan, 5000, None)
    require_total(second, plan, 5000, None)
    assert bool((ones == comm.size).all())


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_waits_for_one_operation_lets_the_others_go_on(kind: str) -> None:
    over(kind, 3, waits_late)


def overtaken_by_a_small_one(comm: Comm) -> None:
    """A small fold behind a large one has its values first; its results must wait for their turn all the same."""
    plan = fold(8, assign_lanes(8, comm.size))
    sizes = (1_500_000, 1000)
    tensors = [comm.buffer(plan.width * n, torch.float32, CPU) for n in sizes]
    for turn in range(8):
        for tensor, n in zip(tensors, sizes, strict=True):
            deposit(tensor, plan, comm.rank, n)
        comm.barrier()
        large, small = (comm.fold(tensor, plan, None, "a fold") for tensor in tensors)
        while turn % comm.size == comm.rank and not large.done():
            comm.progress()  # looks often, and so sees them come in whatever order they do
        small.wait()
        large.wait()
        for tensor, n in zip(tensors, sizes, strict=True):
            require_total(tensor, plan, n, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_fold_may_overtake_a_large_one(kind: str) -> None:
    over(kind, 3, overtaken_by_a_small_one)


def test_a_lone_worker_folds_without_anybody() -> None:
    run_workers(alone, 1)


def alone(rank: int, size: int) -> None:
    comm = TorchGroup(open_store(World.detect(), 20.0), 0, 1, timeout_s=20.0)
    folds(comm)
    several = Fold(5, (cover(5, 0, 3) + cover(5, 3, 5),))
    tensor = deposit(torch.empty(several.width * 100), several, 0, 100)
    comm.fold(tensor, several, 0.7, "several rows").wait()
    require_total(tensor, several, 100, 0.7)
    comm.close()


def misses(comm: Comm, warm: bool, shared: bool) -> tuple[str, float]:
    plan = fold(8, assign_lanes(8, comm.size))
    tensor = comm.buffer(plan.width * 1000, torch.float32, CPU) if shared else torch.empty(plan.width * 1000)
    if warm:
        comm.fold(deposit(tensor, plan, comm.rank, 1000), plan, None, "bucket 6 of step 5").wait()
    comm.barrier("the start")
    if comm.rank == comm.size - 1:
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        comm.fold(deposit(tensor, plan, comm.rank, 1000), plan, None, "bucket 7 of step 5").wait()
    took_s = time.monotonic() - began
    with pytest.raises(PeerError):
        comm.fold(tensor, plan, None, "the next one").wait()
    assert caught.value.ranks == (comm.size - 1,)
    return str(caught.value), took_s


def misses_first_shared(comm: Comm) -> tuple[str, float]:
    return misses(comm, warm=False, shared=True)


def misses_later_shared(comm: Comm) -> tuple[str, float]:
    return misses(comm, warm=True, shared=True)


def misses_first(comm: Comm) -> tuple[str, float]:
    return misses(comm, warm=False, shared=False)


def misses_later(comm: Comm) -> tuple[str, float]:
    return misses(comm, warm=True, shared=False)


@pytest.mark.parametrize("body", [misses_first_shared, misses_later_shared, misses_first, misses_later])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_ends_after_the_timeout_and_names_who_did_not_come(kind: str, body: Any) -> None:
    for message, took_s in over(kind, 3, body, 2.0)[:2]:
        assert "rank 2" in message
        assert "bucket 7 of step 5" in message
        assert took_s < 4.5


def aborts(comm: Comm) -> list[float]:
    """Several folds pend; another thread aborts. From this rank's own abort to its last broken wait."""
    plan = fold(8, assign_lanes(8, comm.size))
    tensors = [comm.buffer(plan.width * 1000, torch.float32, CPU), torch.zeros(plan.width * 1000), torch.zeros(plan.width * 7)]
    for tensor in tensors:
        comm.fold(tensor, plan, None, "a fold").wait()
    comm.barrier("the start")
    if comm.rank == comm.size - 1:
        time.sleep(0.5)  # never sends, but does not leave either: its closing connections would end the waits
        return []
    pending = [comm.fold(tensor, plan, None, f"bucket {i}") for i, tensor in enumerate(tensors)]
    step_end: list[float] = []

    def act() -> None:
        time.sleep(0.2)  # let the main thread get into its wait: it has no way to say so from inside
        step_end.append(time.monotonic())
        comm.abort("told to by the test")

    threading.Thread(target=act).start()
    delays = []
    for one in pending:
        with pytest.raises(PeerError):
            one.wait()
        delays.append(time.monotonic() - step_end[0] if step_end else 0.0)
    return delays


@pytest.mark.exclusive
@pytest.mark.parametrize("kind", KINDS)
def test_abort_from_another_thread_breaks_every_pending_fold(kind: str) -> None:
    delays = sorted(delay for by_rank in over(kind, 3, aborts)[:-1] for delay in by_rank)
    assert len(delays) == 6
    assert delays[3] < 0.05  # the median, as in test_comm.py
    assert delays[-1] < 1.0


def closes_in_a_fold(comm: Comm) -> None:
    plan = fold(8, assign_lanes(8, comm.size))
    tensor = torch.zeros(plan.width * 1000)
    comm.fold(tensor, plan, None, "a fold").wait()
    if comm.rank == 0:
        comm.fold(tensor, plan, None, "half a fold")  # and nobody waits for it
    comm.close()
    with pytest.raises((UsageError, PeerError)):
        comm.fold(tensor, plan, None, "too late")


@pytest.mark.parametrize("kind", KINDS)
def test_a_comm_may_be_closed_with_a_fold_in_flight(kind: str) -> None:
    over(kind, 2, closes_in_a_fold)


def on_a_stream(rank: int, size: int) -> None:
    """The steps that NCCL is given, with gloo in its place: its works block the host, which is all that differs."""
    groups = [build_gloo(open_store(World.detect(), 20.0), rank, size, connections := Connections())]
    for lanes in (5, 8, 13):
        plan = fold(lanes, assign_lanes(lanes, size))
        for dtype in DTYPES:
            for n in (0, 1, 7, 1000, 70001):
                for scale in (None, 1 / 3):
                    tensor = deposit(torch.empty(plan.width * n, dtype=dtype), plan, rank, n)
                    fold_on_stream(groups[0], rank, size, tensor, plan, scale)
                    require_total(tensor, plan, n, scale)
    nobody = Fold(8, (((0, 8),), *(() for _ in range(size - 1))))
    tensor = deposit(torch.empty(100), nobody, rank, 100)
    fold_on_stream(groups[0], rank, size, tensor, nobody, None)
    require_total(tensor, nobody, 100, None)
    destroy_gloo(connections, groups)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_nccl_is_given_folds_too(size: int) -> None:
    run_workers(on_a_stream, size)


def dies(comm: Comm) -> tuple[int, ...]:
    plan = fold(8, assign_lanes(8, comm.size))
    tensor = comm.buffer(plan.width * 500_000, torch.float32, CPU)
    comm.fold(deposit(tensor, plan, comm.rank, 500_000), plan, None, "a fold").wait()
    comm.barrier()
    pending = comm.fold(tensor, plan, None, "a fold")
    if comm.rank == 1:
        os._exit(1)  # in the middle of its fold
    with pytest.raises(PeerError) as caught:
        pending.wait()  # may come through
        comm.fold(tensor, plan, None, "the next fold").wait()
    return caught.value.ranks


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_rank_that_dies_in_a_fold_is_named(kind: str) -> None:
    began = time.monotonic()
    outcomes = run_workers(in_process, 3, kind, dies, 20.0, check=False)
    assert [outcomes[rank].value for rank in (0, 2)] == [(1,), (1,)], [(o.error, o.trace) for o in outcomes]
    assert time.monotonic() - began < 15


def on_machines(rank: int, size: int, machines: str) -> tuple[str, int]:
    comm: Any = open_comm(CPU, world=replace(World.detect(), machine=machines[rank]), timeout_s=20, kind="twolevel")
    cut_small(comm, 1 << 10)
    for lanes in (size, 8, 13):
        plan = fold(lanes, assign_lanes(lanes, size))
        for n in (0, 1, 33, 20003):
            for tensor in (comm.buffer(plan.width * n, torch.float32, CPU), torch.empty(plan.width * n)):
                for scale in (None, 0.3):
                    comm.fold(deposit(tensor, plan, rank, n), plan, scale, "a fold").wait()
                    require_total(tensor, plan, n, scale)
    before = comm.bytes_between
    plan = fold(8, assign_lanes(8, size))
    comm.fold(deposit(comm.buffer(plan.width * 10_000, torch.float32, CPU), plan, rank, 10_000), plan, None, "a fold").wait()
    comm.close()
    return machines[rank], comm.bytes_between - before


@pytest.mark.parametrize("machines", ["aabb", "abab", "aaab", "abcab", "aabbcc"])
def test_two_level_folds_for_any_assignment_of_ranks_to_machines(machines: str) -> None:
    sent = dict.fromkeys(machines, 0)
    for name, count in run_workers(on_machines, len(machines), machines):
        sent[name] += count
    if machines == "aabb":  # each machine's lanes are one subtree
        assert set(sent.values()) == {40_000}  # times 2(M-1)/M: what a ring would send


def test_a_fold_that_does_not_fit_is_our_own_error() -> None:
    def refuses(comm: Comm) -> None:
        with pytest.raises(InvariantError, match="3 workers was given to 2"):
            comm.fold(torch.zeros(9), fold(3, assign_lanes(3, 3)), None, "a fold")
        with pytest.raises(InvariantError, match="7 elements are not 2 rows"):
            comm.fold(torch.zeros(7), fold(6, assign_lanes(6, 2)), None, "a fold")

    over("loopback", 2, refuses)
