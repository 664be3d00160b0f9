"""CUDA tensors travel over gloo until NCCL is connected on all ranks; all ranks change over at the same operation.

There is no GPU here: a second gloo group stands for NCCL, and tensors of float32 stand for CUDA tensors.
"""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import nccl_group, torch_group
from lockstep.comm.connections import Connections
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.gloo_devices import build_gloo, destroy_gloo
from lockstep.comm.operation import Done
from lockstep.comm.store import open_store
from lockstep.comm.torch_group import TorchGroup
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import fold
from lockstep.world import World
from tests.contract.test_fold import deposit, require_total
from tests.workers import run_workers

CPU = torch.device("cpu")
DELAYS_S = (0.0, 0.4, 0.2)


class Nccl(nccl_group.NcclGroup):
    """Folds with a gloo group, and counts how many folds it was given."""

    folds = 0

    def fold(self, tensor: Tensor, plan: Any, scale: float | None, number: int, what: str) -> Any:
        self.await_ready(number, what)
        nccl_group.fold_on_stream(self._backend, self._rank, self._size, tensor, plan, scale)
        self.folds += 1
        return Done()


def nccl_for(comm: TorchGroup, tensor: Tensor) -> Any:
    return comm._nccl if comm._over_nccl and tensor.dtype == torch.float32 else None


def changes_over(rank: int, size: int, gloo_meanwhile: bool | None) -> tuple[list[int], float]:
    """Returns the numbers of the folds that the stand-in for NCCL was given, and how long the constructor took."""
    connections, built = Connections(), []

    def build(store: dist.Store, rank: int, size: int, device: object) -> Any:
        time.sleep(DELAYS_S[rank])  # NCCL takes its time, and not the same everywhere
        built.append(build_gloo(store, rank, size, connections))
        return mock.Mock(wraps=built[0], abort=lambda: None, shutdown=lambda: None)

    with (
        mock.patch.object(torch_group, "build_nccl", build),
        mock.patch.object(torch_group, "NcclGroup", Nccl),
        mock.patch.object(torch_group, "require_cuda", return_value=CPU),
        mock.patch.object(TorchGroup, "_nccl_for", nccl_for),
    ):
        store, began = open_store(World.detect(), 20.0), time.monotonic()
        comm = TorchGroup(store, rank, size, timeout_s=20.0, cuda="nccl", device=CPU, gloo_meanwhile=gloo_meanwhile)
        took_s = time.monotonic() - began
        plan, over_nccl = fold(8, assign_lanes(8, size)), []
        nccl: Any = comm._nccl
        pause = random.Random(rank)
        for number in range(60):
            before = nccl.folds
            tensor = deposit(torch.empty(plan.width * 100), plan, rank, 100)
            comm.fold(tensor, plan, 0.5, f"bucket {number}").wait()
            comm.await_device()
            require_total(tensor, plan, 100, 0.5)
            over_nccl += [number] * (nccl.folds - before)
            assert gather_bytes(comm, bytes([number]), f"control word {number}") == [bytes([number])] * size
            if number % 7 == rank:
                time.sleep(pause.uniform(0, 0.05))
        comm.close()
    destroy_gloo(connections, built)
    return over_nccl, took_s


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_change_over_at_the_same_operation(size: int) -> None:
    results = run_workers(changes_over, size, True)
    assert len({tuple(numbers) for numbers, _ in results}) == 1, results
    numbers = results[0][0]
    assert 0 < numbers[0] < 60, numbers
    assert numbers == list(range(numbers[0], 60))


def test_a_large_model_waits_in_its_first_fold_and_a_run_without_an_agent_in_the_constructor() -> None:
    for gloo_meanwhile, waits in ((False, False), (None, True)):
        results = run_workers(changes_over, 2, gloo_meanwhile)
        assert [numbers for numbers, _ in results] == [list(range(60))] * 2
        assert all((took_s > 0.35) == waits for _, took_s in results), results
