"""What a training step costs on the CPU: the bare loop, torch DDP and Lockstep, interleaved in one run.

    python -m benchmarks.step            2 workers of 1 thread, models of 5 M and 25 M parameters

Each round runs a few steps of every variant, in another order each time; a table of medians and
ratios is printed and written to benchmarks/results/. Bare means: the same loop without averaging,
so the replicas drift apart; it is the floor. benchmarks/gpu/ is the same for GPUs.
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
VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "torch DDP": lambda model: TorchDDP(model, gradient_as_bucket_view=True),
    "Lockstep, gloo": lambda model: lockstep.DistributedDataParallel(model, comm="gloo"),
    "Lockstep, shm": lambda model: lockstep.DistributedDataParallel(model, comm="shm"),
}


class Trainer:
    """One variant's model, optimizer and data."""

    def __init__(self, case: Case, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = wrap(GPT(case.config))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(case.config.vocab, (case.batch, case.config.context + 1))

    def step(self) -> None:
        self.model(self.tokens).backward()
        self.opt.step()
        self.opt.zero_grad()


def timed(trainer: Trainer, steps: int) -> float:
    """Seconds per step."""
    _settle()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    _settle()
    return (time.perf_counter() - began) / steps


def _settle() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def measure(case: Case, only: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    times = interleaved(case, {name: wrap for name, wrap in VARIANTS.items() if not only or name in only})
    return {
        name: {"ms": 1e3 * statistics.median(t), "p25_ms": 1e3 * quantile(t, 0.25), "p75_ms": 1e3 * quantile(t, 0.75)}
        for name, t in times.items()
    }


def interleaved(case: Case, chosen: dict[str, Callable[[nn.Module], nn.Module]], warm_up: int = 4) -> dict[str, list[float]]:
    """Seconds per step of every variant in every round."""
    trainers = {name: Trainer(case, wrap) for name, wrap in chosen.items()}
    for trainer in trainers.values():
        timed(trainer, warm_up)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for round_ in range(case.rounds):
        for name in _rotated(list(trainers), round_):
            times[name].append(timed(trainers[name], case.steps_per_round))
    return times


def _rotated(names: list[str], by: int) -> Iterator[str]:
    return (names[(i + by) % len(names)] for i in range(len(names)))


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def worker(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = []
    for full in CPU_CASES:
        results.append({"case": full.name, "workers": size, "variants": measure(replace(full, rounds=min(rounds, full.rounds)))})
        gc.collect()
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    os._exit(0)  # torch's DdpReducer may deadlock when the last owner of a gloo group is destroyed


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| step | workers | variant | ms (quartiles) | x bare | x torch DDP |", "|---|---|---|---|---|---|"]
    for row in results:
        bare, torch_ddp = row["variants"]["bare"]["ms"], row["variants"]["torch DDP"]["ms"]
        for name, v in row["variants"].items():
            lines.append(
                f"| {row['case']} | {row['workers']} | {name} | {v['ms']:.2f} ({v['p25_ms']:.2f}-{v['p75_ms']:.2f}) "
                f"| {v['ms'] / bare:.3f} | {v['ms'] / torch_ddp:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="(default 2)")
    parser.add_argument("--rounds", type=int, default=100, help="the greatest number of rounds per case")
    options = parser.parse_args()
    size = options.workers
    with tempfile.TemporaryDirectory() as folder:
        run_workers(worker, size, folder, options.rounds)
        results = json.loads(Path(folder, "results.json").read_text())
    text = table(results)
    print(text)
    data = {"machine": machine(), "results": results}
    write(f"step-cpu-{size}-workers", data, text, f"python -m benchmarks.step --workers {size}")


if __name__ == "__main__":
    main()
