"""The engine on CUDA. Standard unittest, so that it runs where pytest is not installed: tests/gpu/run.py.

NCCL with one rank always runs. Sizes 2 and 4 run over gloo, and over NCCL where ranks can meet over it (ranks.py). Tolerances: fp32
sums in another order, 20 SGD steps: 2e-5 (TF32 is off).
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.comm.torch_group import TorchGroup
from tests.gpu.ranks import HAS_GPU, sizes_over_nccl, use_gpu, why_no_nccl
from tests.models import MODELS, batch, build, digest, loss_of, part
from tests.process.reference import mean_grads, require_grads
from tests.workers import run_workers

STEPS, SAMPLES = 20, 24
SHARED = ("mlp", "transformer", "unused", "mixed")


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(step: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    x, y = batch(step, SAMPLES)
    return part(x, rank, size).to(gpu()), part(y, rank, size).to(gpu())


def nccl(rank: int = 0, size: int = 1, timeout_s: float = 60.0) -> TorchGroup:
    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), size)
    return TorchGroup(store, rank, size, cuda="nccl", device=gpu(), timeout_s=timeout_s)


def train(model: nn.Module, rank: int, size: int) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, *on_gpu(step, rank, size)).backward()
        opt.step()
        opt.zero_grad()


def nccl_parity(rank: int, size: int, name: str) -> None:
    use_gpu()
    plain = build(name).to(gpu())
    model = copy.deepcopy(plain)
    lockstep.replicate(model, comm=nccl(), bucket_mb=0.001)
    train(plain, 0, 1)
    train(model, 0, 1)
    for (key, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, msg=lambda m, k=key: f"{name} {k}: {m}")
    if name == "mlp":  # no atomics in its kernels: the averaged gradient of one rank is that gradient
        assert digest(model) == digest(plain)


Trained = dict[str, tuple[bytes, dict[str, Tensor]]]


def together(rank: int, size: int, carrier: str) -> Trained:
    """Train the models of SHARED on all ranks. Returns the digest and the weights of each."""
    use_gpu()
    found = {}
    for name in SHARED:
        model = lockstep.replicate(build(name, seed=rank).to(gpu()), comm=carrier, bucket_mb=0.001, timeout_s=60)
        assert lockstep.replica_of(model).comm.name == carrier
        train(model, rank, size)
        found[name] = digest(model), {k: v.cpu() for k, v in model.state_dict().items()}
        lockstep.replica_of(model).close()
    return found


def alone(rank: int, size: int) -> Trained:
    use_gpu()
    found = {}
    for name in SHARED:
        model = build(name).to(gpu())
        train(model, 0, 1)
        found[name] = digest(model), {k: v.cpu() for k, v in model.state_dict().items()}
    return found


class Both(nn.Module):
    """Half on the host, half on the GPU: hooks fire in two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.Linear(12, 12)
        self.device = nn.Linear(12, 4, device=gpu())

    def forward(self, x: Tensor) -> Tensor:
        return self.device(torch.tanh(self.host(x)).to(gpu())).cpu() + self.host(x)[:, :4]


def two_devices(rank: int, size: int, carrier: str) -> None:
    use_gpu()
    model = lockstep.replicate(Both(), comm=carrier, timeout_s=60)
    for step in range(4):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            x, y = batch(step, SAMPLES)
            loss_of(m, part(x, r, size), part(y, r, size)).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)


def branches(rank: int, size: int, carrier: str) -> None:
    use_gpu()
    model = lockstep.replicate(build("unused").to(gpu()), comm=carrier, timeout_s=60)
    for step in range(4):
        users = {0: [1], 1: [0], 2: [], 3: [0, 1]}[step]

        def backward(m: nn.Module, r: int, step: int = step, users: list[int] = users) -> None:
            x, y = on_gpu(step, r, size)
            nn.functional.cross_entropy(m(x, branch=r in users), y).backward()

        expected = mean_grads(model, size, backward)
        model.zero_grad()
        backward(model, rank)
        require_grads(model, expected)


def amp_and_accumulation(rank: int, size: int, carrier: str) -> bytes:
    use_gpu()
    model = lockstep.replicate(build("transformer").to(gpu()), comm=carrier, timeout_s=60)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(6):
        for micro in range(2):
            replica = lockstep.replica_of(model)
            replica.syncs = micro == 1
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, *on_gpu(2 * step + micro, rank, size))
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return digest(model)


def one_copy_per_bucket(rank: int, size: int) -> None:
    model = lockstep.replicate(build("transformer").to(gpu()), comm="gloo", bucket_mb=0.004)  # a rank that is alone has no buckets
    for step in range(2):
        loss_of(model, *on_gpu(step)).backward()
        model.zero_grad()
    buckets = len(lockstep.replica_of(model).reducer.plan.buckets)
    assert buckets > 3
    real_copy = torch._foreach_copy_
    with mock.patch.object(torch, "_foreach_copy_", side_effect=real_copy) as copy_:
        loss_of(model, *on_gpu(2)).backward()
    assert copy_.call_count == buckets, (copy_.call_count, buckets)


def stuck_stream(rank: int, size: int) -> str:
    """The stream stands still in front of a collective: the host does not block, but learns of it."""
    comm = nccl(timeout_s=1.0)
    comm.reduce(torch.ones(4, device=gpu()), "mean", "a warm-up").wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(8e9))  # several seconds of a busy kernel
    comm.reduce(torch.ones(4, device=gpu()), "mean", "bucket 3 of step 41").wait()
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        try:
            comm.barrier("the host's next operation")
        except lockstep.PeerError as error:
            return str(error)
        time.sleep(0.05)
    return "nothing happened"


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class OneRank(unittest.TestCase):
    def test_one_rank_over_nccl_equals_the_bare_model(self) -> None:
        for name in MODELS:
            with self.subTest(name):
                run_workers(nccl_parity, 1, name, deadline_s=120)

    def test_gradients_enter_a_bucket_in_one_multi_tensor_copy(self) -> None:
        run_workers(one_copy_per_bucket, 2, deadline_s=120)

    def test_a_collective_that_does_not_end_is_reported_after_the_timeout(self) -> None:
        message: Any = run_workers(stuck_stream, 1, deadline_s=120)[0]
        self.assertIn("bucket 3 of step 41", message)


class SeveralRanks:
    """What holds whatever carries the gradients."""

    carrier: str

    def test_several_ranks_equal_one_process(self: Any) -> None:
        (expected,) = run_workers(alone, 1, deadline_s=120)
        for size in (2, 4) if self.carrier == "gloo" else sizes_over_nccl():
            results = run_workers(together, size, self.carrier, deadline_s=240)
            for name in SHARED:
                with self.subTest(f"{name} on {size}"):
                    self.assertEqual(len({found[name][0] for found in results}), 1, "replicas must be identical")
                    for key, value in expected[name][1].items():
                        torch.testing.assert_close(results[0][name][1][key], value, atol=5e-5, rtol=5e-5)

    def test_parameters_on_host_and_gpu_in_one_model(self) -> None:
        run_workers(two_devices, 2, self.carrier, deadline_s=120)

    def test_parameters_unused_on_some_ranks(self) -> None:
        run_workers(branches, 2, self.carrier, deadline_s=120)

    def test_autocast_grad_scaler_and_accumulation_keep_replicas_identical(self: Any) -> None:
        self.assertEqual(len(set(run_workers(amp_and_accumulation, 2, self.carrier, deadline_s=120))), 1)


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class OverGloo(SeveralRanks, unittest.TestCase):
    carrier = "gloo"


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class OverNccl(SeveralRanks, unittest.TestCase):
    carrier = "nccl"

    def setUp(self) -> None:
        if reason := why_no_nccl(2):
            self.skipTest(reason)


if __name__ == "__main__":
    unittest.main()
