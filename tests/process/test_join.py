"""join(): ranks with fewer batches take part in the averages of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from tests.models import CNN, UnusedBranch, batch, digest, loss_of, part
from tests.process.reference import mean_grads, require_grads
from tests.workers import run_workers

BATCHES = [3, 5, 1]  # rank 0 runs out before rank 1, rank 2 before both
EARLY = (
    "rank 2 ran out of data at step 1, and raise_early (or throw_on_early_termination) stops all ranks then. "
    "Leave it out to continue with the ranks that have data."
)


def uneven(rank: int, size: int, over_all: bool, buffers: bool) -> tuple[bytes, int]:
    model = lockstep.replicate(CNN() if buffers else UnusedBranch(), bucket_mb=0.002, timeout_s=20)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = lockstep.replica_of(model)
    with replica.join(divide_by_initial_size=over_all):
        for step in range(BATCHES[rank]):
            active = [r for r in range(size) if step < BATCHES[r]]

            def backward(m: nn.Module, r: int, step: int = step, active: list[int] = active) -> None:
                if r in active:
                    x, y = batch(step, 12)
                    loss_of(m, part(x, r, size), part(y, r, size)).backward()

            expected = mean_grads(model, size, backward, divisor=size if over_all else len(active))
            backward(model, rank)
            require_grads(model, expected)
            if buffers:
                assert int(model.body[1].num_batches_tracked) == step + 1, "the buffers of a rank that has data"
            opt.step()
            opt.zero_grad()
        longest = digest(model)
    assert rank != 1 or digest(model) == longest, "rank 1 trained longest: its state counts"
    return digest(model), replica.reducer.step


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("over_all", [True, False])
def test_the_mean_is_over_all_ranks_or_over_those_with_data(over_all: bool, buffers: bool) -> None:
    results = run_workers(uneven, 3, over_all, buffers)
    assert [step for _, step in results] == [5, 5, 5]
    assert len({d for d, _ in results}) == 1, "after join all ranks have the state of the rank that trained longest"


def accumulate_inside_join(rank: int, size: int) -> bytes:
    model = lockstep.replicate(UnusedBranch(), timeout_s=20)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = lockstep.replica_of(model)
    with replica.join():
        for step in range(2 * BATCHES[rank]):
            x, y = batch(step, 12)
            if step % 2 == 0:
                with replica.no_sync():
                    loss_of(model, x, y).backward()
            else:
                loss_of(model, x, y).backward()
                opt.step()
                opt.zero_grad()
    return digest(model)


def test_no_sync_inside_join() -> None:
    assert len(set(run_workers(accumulate_inside_join, 3))) == 1


def stop_all(rank: int, size: int) -> tuple[int, str]:
    model = lockstep.replicate(UnusedBranch(), timeout_s=20)
    done = 0
    try:
        with lockstep.replica_of(model).join(raise_early=True):
            for step in range(BATCHES[rank]):
                loss_of(model, *batch(step, 12)).backward()
                done += 1
    except lockstep.PeerError as error:
        return done, str(error)
    return done, "no error"


def test_raise_early_stops_all_ranks_if_one_runs_out_of_data() -> None:
    assert run_workers(stop_all, 3) == [(1, EARLY)] * 3


def disabled(rank: int, size: int) -> int:
    model = lockstep.replicate(UnusedBranch(), timeout_s=20)
    with lockstep.replica_of(model).join(enable=False):
        loss_of(model, *batch(0, 12)).backward()
    return lockstep.replica_of(model).reducer.step


def test_a_disabled_join_does_nothing() -> None:
    assert run_workers(disabled, 2) == [1, 1]


def unfreeze_after_a_rank_ran_out(rank: int, size: int) -> bytes:
    model = UnusedBranch()
    model.used.layers[0].weight.requires_grad_(False)
    lockstep.replicate(model, timeout_s=20)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.replica_of(model).join():
        for step in range(2 if rank == 1 else 5):
            if step == 3:
                model.used.layers[0].weight.requires_grad_(True)
            loss_of(model, *batch(step, 12)).backward()
            opt.step()
            opt.zero_grad()
    return digest(model)


def test_a_rank_without_data_follows_if_the_others_unfreeze() -> None:
    assert len(set(run_workers(unfreeze_after_a_rank_ran_out, 2))) == 1
