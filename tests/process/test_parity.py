"""N ranks with batch B get the weights of one process with batch N*B. Among each other, ranks have the same bits.

Tolerance: both sides add the same numbers in a different order. In fp32 under SGD, 20 steps keep the
weights within 2e-5. Adam makes full-size steps from the rounding noise of a gradient that should be zero (a key
bias under softmax), so Adam and AdamW run in fp64, where eps exceeds that noise: 1e-9.
The mixed-dtype model keeps its fp32 parts and gets 5e-4. A lost or doubled gradient is off by 1e-2.
"""

from __future__ import annotations

import pytest
import torch

import lockstep
from tests.models import MODELS, OPTIMIZERS, batch, build, digest, loss_of, part
from tests.workers import run_workers

STEPS = 20
SAMPLES = 24


def make(name: str, optimizer: str, seed: int) -> torch.nn.Module:
    model = build(name, seed)
    return model if optimizer == "sgd" or name == "mixed" else model.double()


def data(step: int, model: torch.nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step, SAMPLES)
    return (x if name == "mixed" else x.to(next(model.parameters()).dtype)), y


def train_replica(rank: int, size: int, name: str, optimizer: str, comm: str) -> tuple[list[bytes], dict[str, torch.Tensor]]:
    model = lockstep.replicate(make(name, optimizer, seed=rank), bucket_mb=0.001, timeout_s=30, comm=comm)
    opt = OPTIMIZERS[optimizer](model.parameters())
    digests = []
    for step in range(STEPS):
        x, y = data(step, model, name)
        loss_of(model, part(x, rank, size), part(y, rank, size)).backward()
        opt.step()
        opt.zero_grad()
        digests.append(digest(model))
    return digests, model.state_dict()


def train_alone(name: str, optimizer: str, size: int) -> dict[str, torch.Tensor]:
    """One process, the whole batch. BatchNorm sees the same chunks as the ranks would, and keeps chunk 0's statistics."""
    model = make(name, optimizer, seed=0)
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        x, y = data(step, model, name)
        if name == "cnn":
            before = {k: b.clone() for k, b in model.named_buffers()}
            for rank in reversed(range(size)):
                for k, b in model.named_buffers():
                    b.data.copy_(before[k])
                (loss_of(model, part(x, rank, size), part(y, rank, size)) / size).backward()
        else:
            loss_of(model, x, y).backward()
        opt.step()
        opt.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("size", "comm"), [(2, "gloo"), (3, "shm")])
def test_ranks_equal_one_process(name: str, optimizer: str, size: int, comm: str) -> None:
    results = run_workers(train_replica, size, name, optimizer, comm)
    for digests, _ in results[1:]:
        assert digests == results[0][0], "replicas must be identical after every step"
    alone = train_alone(name, optimizer, size)
    tolerance = 5e-4 if name == "mixed" else 2e-5 if optimizer == "sgd" else 1e-9
    for key, expected in alone.items():
        torch.testing.assert_close(results[0][1][key], expected, atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
