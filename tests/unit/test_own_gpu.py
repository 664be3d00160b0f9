"""What a worker says about its GPU: its name if no other worker may use it."""

from __future__ import annotations

import types

import pytest
import torch

from lockstep.comm.open_comm import own_gpu
from lockstep.world import World

GPU = torch.device("cuda", 1)


def second_of(local_size: int) -> World:
    return World(1, local_size, 1, local_size)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.delenv("LOCKSTEP_COMM", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=f"GPU-{device.index}"))


def test_over_nccl_a_worker_has_its_gpu_for_itself() -> None:
    assert own_gpu(GPU, None, second_of(2)) == "GPU-1"
    assert own_gpu(GPU, "nccl", second_of(4)) == "GPU-1"


def test_workers_may_share_a_gpu_over_gloo_and_with_a_library_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_gpu(GPU, None, second_of(3)) == "", "more workers than GPUs use gloo"
    assert own_gpu(GPU, "gloo", second_of(2)) == ""
    assert own_gpu(torch.device("cpu"), None, second_of(2)) == ""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert own_gpu(GPU, "nccl", second_of(2)) == ""


def test_a_worker_whose_script_uses_the_first_gpu_instead_of_its_own_may_share_it() -> None:
    assert own_gpu(torch.device("cuda", 0), None, second_of(2)) == ""
