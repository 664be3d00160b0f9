"""What a training step costs: the bare loop, torch DDP and Lockstep, interleaved in one run.

    python -m benchmarks.step            CPU: 2 workers of 1 thread, models of 5 M and 25 M parameters
    python -m benchmarks.step --gpu      one NVIDIA GPU over NCCL: GPT of 124 M, large and tiny batch; a deep narrow model

Each round runs a few steps of every variant, in another order each time; a table of medians and
ratios is printed and written to benchmarks/results/. Bare means: the same loop without averaging,
so the replicas drift apart; it is the floor. Peak memory is taken one variant at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.gpt import GPT, GPTConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from benchmarks.report import machine, run_workers, write


@dataclass(frozen=True)
class Case:
    name: str
    config: GPTConfig
    batch: int
    rounds: int
    steps_per_round: int


CPU_CASES = [
    Case("GPT 5 M, 8x64", GPTConfig(vocab=128, context=64, layers=6, heads=4, width=256), 8, 20, 2),
    Case("GPT 25 M, 4x64", GPTConfig(vocab=128, context=64, layers=8, heads=8, width=512), 4, 16, 2),
]
GPU_CASES = [
    Case("GPT 124 M, 8x1024 bf16", GPTConfig(vocab=50304, context=1024, layers=12, heads=12, width=768), 8, 20, 5),
    Case("GPT 124 M, 1x256 bf16 (launch bound)", GPTConfig(vocab=50304, context=256, layers=12, heads=12, width=768), 1, 20, 10),
    Case(
        "48 layers of 256, 1x128 bf16 (launch bound)", GPTConfig(vocab=512, context=128, layers=48, heads=4, width=256), 1, 20, 10
    ),
]


def variants(gpu: bool) -> dict[str, Callable[[nn.Module], nn.Module]]:
    found: dict[str, Callable[[nn.Module], nn.Module]] = {
        "bare": lambda model: model,
        "torch DDP": lambda model: TorchDDP(model, gradient_as_bucket_view=True, device_ids=[0] if gpu else None),
    }
    if gpu:
        found["Lockstep"] = lambda model: lockstep.DistributedDataParallel(model)
    else:
        found["Lockstep, gloo"] = lambda model: lockstep.DistributedDataParallel(model, comm="gloo")
        found["Lockstep, shm"] = lambda model: lockstep.DistributedDataParallel(model, comm="shm")
    return found


class Trainer:
    """One variant's model, optimizer and data."""

    def __init__(self, case: Case, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = wrap(GPT(case.config).to(device))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(case.config.vocab, (case.batch, case.config.context + 1), device=device)
        self.device = device

    def step(self) -> None:
        cast: AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with cast:
            loss = self.model(self.tokens)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()


def timed(trainer: Trainer, steps: int) -> float:
    """Seconds per step; on CUDA with the device idle before and after."""
    _settle(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    _settle(trainer.device)
    return (time.perf_counter() - began) / steps


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif dist.get_world_size() > 1:
        dist.barrier()


def measure(case: Case, device: torch.device, only: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    chosen = {name: wrap for name, wrap in variants(device.type == "cuda").items() if not only or name in only}
    trainers = {name: Trainer(case, wrap, device) for name, wrap in chosen.items()}
    for trainer in trainers.values():
        timed(trainer, 4)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for round_ in range(case.rounds):
        for name in _rotated(list(trainers), round_):
            times[name].append(timed(trainers[name], case.steps_per_round))
    return {
        name: {"ms": 1e3 * statistics.median(t), "p25_ms": 1e3 * _quantile(t, 0.25), "p75_ms": 1e3 * _quantile(t, 0.75)}
        for name, t in times.items()
    }


def peak_memory(case: Case) -> dict[str, float]:
    """MB allocated at most in a step, one variant in memory at a time; after the steps in which buckets are rebuilt."""
    found = {}
    for name, wrap in variants(True).items():
        trainer = Trainer(case, wrap, torch.device("cuda", 0))
        for _ in range(4):
            trainer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            trainer.step()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() / 2**20
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _rotated(names: list[str], by: int) -> Iterator[str]:
    return (names[(i + by) % len(names)] for i in range(len(names)))


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def worker(rank: int, size: int, gpu: bool, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, device_id=device if gpu else None)
    results = []
    for full in GPU_CASES if gpu else CPU_CASES:
        case = replace(full, rounds=min(rounds, full.rounds))
        row: dict[str, Any] = {"case": case.name, "workers": size, "variants": measure(case, device)}
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
            row["peak_mb"] = peak_memory(case)
        results.append(row)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    os._exit(0)  # torch's DdpReducer may deadlock when the last owner of a gloo group is destroyed


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| step | workers | variant | ms (quartiles) | x bare | x torch DDP | peak MB |", "|---|---|---|---|---|---|---|"]
    for row in results:
        bare, torch_ddp = row["variants"]["bare"]["ms"], row["variants"]["torch DDP"]["ms"]
        for name, v in row["variants"].items():
            peak = f"{row['peak_mb'][name]:.0f}" if "peak_mb" in row else "-"
            lines.append(
                f"| {row['case']} | {row['workers']} | {name} | {v['ms']:.2f} ({v['p25_ms']:.2f}-{v['p75_ms']:.2f}) "
                f"| {v['ms'] / bare:.3f} | {v['ms'] / torch_ddp:.3f} | {peak} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="one GPU over NCCL instead of the CPU over gloo")
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--rounds", type=int, default=100, help="the greatest number of rounds per case")
    options = parser.parse_args()
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs an NVIDIA GPU, and torch sees none here")
    size = 1 if options.gpu else options.workers
    with tempfile.TemporaryDirectory() as folder:
        run_workers(worker, size, options.gpu, folder, options.rounds, method="spawn" if options.gpu else "fork")
        results = json.loads(Path(folder, "results.json").read_text())
    text = table(results)
    print(text)
    name, flag = ("step-gpu", " --gpu") if options.gpu else (f"step-cpu-{size}-workers", f" --workers {size}")
    write(name, {"machine": machine(options.gpu), "results": results}, text, f"python -m benchmarks.step{flag}")


if __name__ == "__main__":
    main()
