"""The eager step on a GPU: it never waits for the device, and the sums of a fold have the bits of torch's additions.

Standard unittest, as test_gpu.py.
"""

from __future__ import annotations

import importlib.util
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.comm.fold import fold_values
from lockstep.comm.open_comm import open_comm
from lockstep.comm.tree_sum import TreeSum
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import Fold, fold
from tests.gpu.ranks import HAS_GPU, sizes_over_nccl, use_gpu
from tests.workers import run_workers

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SCALES = (None, 1 / 3, 0.7 * 2.0**-30)
WARM_UP, MEASURED = 4, 4  # the first two steps compare large buffers by value


def values_of(count: int, length: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, with denormal numbers, signed zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(count)
    exponents = 10.0 ** torch.randint(-6, 6, (count, length), generator=generator)
    rows = (torch.randn(count, length, generator=generator, dtype=torch.float64) * exponents).to(dtype)
    tiny = torch.randn(count, length // 4, generator=generator, dtype=torch.float64) * torch.finfo(dtype).tiny
    rows[:, : length // 4] = tiny.to(dtype)
    rows[:, length // 4 : length // 4 + 3] = -0.0
    rows[0, -3:] = float("inf")
    rows[-1, -2:] = float("-inf")
    rows[-1, -1] = float("nan")
    return rows


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal bits, except those of a NaN."""
    numbers = ~torch.isnan(b)
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a[numbers].contiguous().view(torch.uint8), b[numbers].contiguous().view(torch.uint8)
    )


def folds(size: int) -> Iterator[Fold]:
    for lanes in (size, 8, 13):
        yield fold(lanes, assign_lanes(lanes, size))


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
@unittest.skipUnless(importlib.util.find_spec("triton"), "Triton is not installed")
class TreeKernel(unittest.TestCase):
    def test_the_kernel_has_the_bits_of_torchs_additions(self) -> None:
        from lockstep.comm.tree_kernel import make_kernel

        device = use_gpu()
        for size in (2, 3, 4, 8):
            for plan in folds(size):
                count = sum(map(len, plan.held))
                for dtype in DTYPES:
                    for scale in SCALES:
                        with self.subTest(size=size, lanes=plan.lanes, dtype=dtype, scale=scale):
                            self.compare(make_kernel, plan, values_of(count, 16 * 701, dtype).to(device), scale)

    def compare(self, make_kernel: Callable[..., Any], plan: Fold, values: Tensor, scale: float | None) -> None:
        in_kernel = scale is not None and values.dtype != torch.float64
        ours, theirs = torch.empty_like(values[0]), torch.empty_like(values[0])
        make_kernel(len(values), plan.adds, plan.root, in_kernel)(values.clone(), ours, 1.0 if scale is None else scale)
        if scale is not None and not in_kernel:
            ours.mul_(scale)
        TreeSum(len(values), plan.adds, plan.root)._chain(values.clone().unbind(), scale, theirs)
        self.assertTrue(equal(ours, theirs))


def folds_that_differ(rank: int, size: int) -> list[str]:
    """Fold over NCCL several times, with and without the kernel. Returns what differs from the fold of the host."""
    device = use_gpu()
    comm = open_comm(device, kind="nccl", timeout_s=60)
    wrong = []
    for plan in folds(size):
        first, mine = sum(map(len, plan.held[:rank])), len(plan.held[rank])
        for dtype in DTYPES:
            for n in (7, 1024, 16 * 4001):
                values = values_of(sum(map(len, plan.held)), n, dtype)
                for scale in SCALES:
                    expected = torch.empty(n, dtype=dtype)
                    fold_values(values.clone().unbind(), plan, scale, [expected])
                    for _ in range(2):
                        wire = torch.full((plan.width, n), float("nan"), dtype=dtype, device=device)
                        wire[:mine] = values[first : first + mine].to(device)
                        comm.fold(wire.view(-1), plan, scale, "a fold").wait()
                        if not equal(wire[0].cpu(), expected):
                            wrong.append(f"{plan.lanes} lanes, {n} x {dtype}, scale {scale}")
    comm.close()
    return wrong


class Convolutions(nn.Module):
    """BatchNorm statistics, a mask and a small table."""

    shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        self.register_buffer("mask", torch.ones(100_000))
        self.register_buffer("table", torch.full((10,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.mask[0]


class Layers(nn.Sequential):
    shape = (12,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 4))


def stepper_of_run(model: nn.Module, lanes: int, **options: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a function that makes a step of an endless loop, and one that ends the run."""
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    run = lockstep.Run(model, opt, lanes=lanes, verify_every=0, timeout_s=60, **options)
    dtype = next(model.parameters()).dtype
    data = torch.utils.data.TensorDataset(torch.randn(64 * lanes, *model.shape), torch.randint(0, 4, (64 * lanes,)))
    loader = iter(run.shard(data, global_batch=4 * lanes, epochs=100))

    def step() -> None:
        committed = False
        while not committed:
            x, y = (each.pin_memory().to(run.device, non_blocking=True) for each in next(loader))
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            opt.step()
            opt.zero_grad()
            committed = run.committed

    return step, run.close


def stepper_of_ddp(model: nn.Module) -> Callable[[], None]:
    wrapped = lockstep.DistributedDataParallel(model)
    opt = torch.optim.AdamW(wrapped.parameters(), fused=True)
    x, y = torch.randn(4, *model.shape, device="cuda"), torch.randint(0, 4, (4,), device="cuda")

    def step() -> None:
        F.cross_entropy(wrapped(x), y).backward()
        opt.step()
        opt.zero_grad()

    return step


def why_it_waits(step: Callable[[], None]) -> str:
    """Make some steps in which waiting for the device is an error. Returns that error, or ""."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(MEASURED):
            step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def steps_that_wait(rank: int, size: int) -> dict[str, str]:
    """Returns what waits for the device, by kind of step. A rank whose step waits leaves the others alone: so it ends first."""
    device = use_gpu()
    comm = {} if size == 1 else {"comm": "nccl"}
    found = {}
    for make in (Convolutions, Layers):
        for lanes in (size, 2 * size, 2 * size + 1):
            step, close = stepper_of_run(make().to(device), lanes, **comm)
            if why := why_it_waits(step):
                return {**found, f"Run, {make.__name__}, {lanes} lanes": why}
            close()
        step, close = stepper_of_run(make().to(device).bfloat16(), 2 * size, reduce_dtype=torch.float32, **comm)
        if why := why_it_waits(step):
            return {**found, f"Run, {make.__name__}, reduce_dtype": why}
        close()
        if why := why_it_waits(stepper_of_ddp(make().to(device))):
            return {**found, f"DDP, {make.__name__}": why}
    return found


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class Eager(unittest.TestCase):
    def test_no_step_of_one_rank_waits_for_the_device(self) -> None:
        self.assertEqual(run_workers(steps_that_wait, 1, deadline_s=120), [{}])

    def test_the_test_finds_a_step_that_waits(self) -> None:
        use_gpu()

        def step() -> None:
            torch.ones(1, device="cuda").item()

        self.assertIn("synchroniz", why_it_waits(step))


@unittest.skipUnless(HAS_GPU and 2 in sizes_over_nccl(), "no two NCCL ranks here: see tests/gpu/run.py")
class EagerOverNccl(unittest.TestCase):
    def test_no_step_of_two_ranks_waits_for_the_device(self) -> None:
        self.assertEqual(run_workers(steps_that_wait, 2, deadline_s=120), [{}, {}])

    def test_folds_over_nccl_have_the_bits_of_the_host(self) -> None:
        for size in sizes_over_nccl():
            with self.subTest(size):
                self.assertEqual(run_workers(folds_that_differ, size, deadline_s=120), [[]] * size)


if __name__ == "__main__":
    unittest.main()
