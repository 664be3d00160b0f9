"""The GPUs that workers use decide what carries CUDA tensors. There is no GPU here: torch says what a test lets it say."""

from __future__ import annotations

import types
import warnings
from unittest import mock

import pytest
import torch

from lockstep.comm import open_comm as module
from lockstep.comm.open_comm import open_comm
from lockstep.world import World
from tests.workers import run_workers


def carrier(rank: int, size: int, gpus: list[tuple[int, str]]) -> str:
    """``gpus``: the index and the UUID of each rank's GPU. Returns what the comm would be opened over."""
    index, uuid = gpus[rank]
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=types.SimpleNamespace(uuid=uuid)),
        mock.patch.object(module, "TorchGroup") as group,
    ):
        open_comm(torch.device("cuda", index), world=World.detect(), timeout_s=20.0)
    return str(group.call_args.kwargs["cuda"])


def warning(rank: int, size: int) -> str:
    """All workers put their model on the first of two GPUs. Returns the warning, or an empty text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        carrier(rank, size, [(0, "GPU-a")] * size)
    return "".join(str(each.message) for each in found)


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        ([(0, "GPU-a"), (1, "GPU-b")], "nccl"),
        ([(0, "GPU-a"), (0, "GPU-a")], "gloo"),  # three workers had two GPUs, and the one on the other GPU was lost
        ([(0, "GPU-a"), (1, "GPU-b"), (0, "GPU-a")], "gloo"),
        ([(0, "GPU-a"), (0, "GPU-b"), (0, "GPU-c")], "nccl"),  # each worker sees one GPU; torch says nothing of the others
        ([(0, ""), (1, "")], "nccl"),  # the driver tells no UUIDs
        ([(0, ""), (0, "")], "gloo"),
    ],
)
def test_nccl_is_chosen_only_if_no_two_workers_use_one_gpu(gpus: list[tuple[int, str]], want: str) -> None:
    assert run_workers(carrier, len(gpus), gpus) == [want] * len(gpus)


def test_a_worker_that_uses_the_gpu_of_another_one_is_told_which_is_its_own() -> None:
    first, second = run_workers(warning, 2)
    assert first == ""
    assert second.startswith("rank 1 shares the GPU cuda:0 with another worker")
    assert "cuda:1 is meant for this worker" in second
