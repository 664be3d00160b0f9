"""What exactness costs: the same bits on any number of workers, against sums as the backend likes, and torch DDP.

    python -m benchmarks.exact [--workers 2] [--rounds 16]

Three tables from one run, interleaved, medians: a step of one lane per worker (GPT of 25 M parameters, batches
from run.shard); four lanes on one worker against plain gradient accumulation of the same micro-batches;
and the start of a shard in the middle of a long epoch. Every variant runs under the settings it
asks for: deterministic kernels for the exact ones only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.gpt import GPT, GPTConfig
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import Dataset, TensorDataset

import lockstep
from benchmarks.report import machine, run_workers, write
from lockstep.data.map_source import MapSource
from lockstep.data.source import LoaderOptions

CONFIG = GPTConfig(vocab=128, context=64, layers=8, heads=8, width=512)
BATCH = 4  # per lane
MANY = 20_000_000


def tokens(samples: int) -> torch.Tensor:
    return torch.randint(CONFIG.vocab, (samples, CONFIG.context + 1), generator=torch.Generator().manual_seed(1))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def lockstep_turns(lanes: int, exact: bool, comm: str | None) -> Iterator[None]:
    """One turn of the loop per ``next``."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    opt = optimizer_of(model)
    run = lockstep.Run(model, opt, lanes=lanes, exact=exact, comm=comm)
    for (batch,) in run.shard(TensorDataset(tokens(4096)), global_batch=lanes * BATCH, shuffle=True, epochs=1000):
        model(batch).backward()
        opt.step()
        opt.zero_grad()
        yield


def torch_turns() -> Iterator[None]:
    torch.manual_seed(0)
    model = TorchDDP(GPT(CONFIG), gradient_as_bucket_view=True)
    opt = optimizer_of(model)
    for batch in endless():
        model(batch).backward()
        opt.step()
        opt.zero_grad()
        yield


def accumulating_turns(lanes: int) -> Iterator[None]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    opt = optimizer_of(model)
    for number, batch in enumerate(endless(), 1):
        (model(batch) / lanes).backward()
        if number % lanes == 0:
            opt.step()
            opt.zero_grad()
        yield


def endless() -> Iterator[torch.Tensor]:
    data = tokens(4096)
    while True:
        yield from data.split(BATCH)


def measure(variants: dict[str, tuple[bool, Iterator[None]]], turns: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each variant, over ``rounds`` of ``turns`` turns. The flag: whether to ask for determinism."""
    for exact, loop in variants.values():
        torch.use_deterministic_algorithms(exact)
        timed(loop, 3 * turns)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds):
        names = list(variants)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            torch.use_deterministic_algorithms(variants[name][0])
            times[name].append(timed(variants[name][1], turns))
    return {
        name: {"ms": 1e3 * statistics.median(t), "p25_ms": 1e3 * sorted(t)[len(t) // 4], "p75_ms": 1e3 * sorted(t)[3 * len(t) // 4]}
        for name, t in times.items()
    }


def timed(loop: Iterator[None], turns: int) -> float:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    began = time.perf_counter()
    for _ in range(turns):
        next(loop)
    return time.perf_counter() - began


def workers_body(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    variants = {
        "torch DDP": (False, torch_turns()),
        "exact=False, shm": (False, lockstep_turns(size, False, "shm")),
        "exact, shm": (True, lockstep_turns(size, True, "shm")),
        "exact=False, gloo": (False, lockstep_turns(size, False, "gloo")),
        "exact, gloo": (True, lockstep_turns(size, True, "gloo")),
    }
    found = measure(variants, 2, rounds)
    if rank == 0:
        Path(folder, "workers.json").write_text(json.dumps(found))
    os._exit(0)  # torch's DdpReducer may deadlock when the last owner of a gloo group is destroyed


def lanes_body(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    variants = {
        "gradient accumulation": (False, accumulating_turns(4)),
        "4 lanes, exact=False": (False, lockstep_turns(4, False, None)),
        "4 lanes, exact": (True, lockstep_turns(4, True, None)),
    }
    Path(folder, "lanes.json").write_text(json.dumps(measure(variants, 4, rounds)))


class Long(Dataset[Any]):
    """Twenty million samples, which counts how many were asked for."""

    touched = 0

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> torch.Tensor:
        self.touched += 1
        return torch.tensor(index)


def start() -> dict[str, float]:
    """Seconds from nothing to the first batch at sample 10 million, and samples touched; median of 5."""
    took = []
    for epoch in range(5):
        data = Long()
        began = time.perf_counter()
        source = MapSource(data, LoaderOptions(lanes=8, global_batch=256, epochs=5, shuffle=True))
        source.seek(epoch, MANY // 2 // 256, (0, 8))
        source.take()
        took.append(time.perf_counter() - began)
        source.close()
    return {"ms": 1e3 * statistics.median(took), "touched": data.touched}


def table(results: dict[str, Any], size: int) -> str:
    lines = [f"| one lane per worker, {size} workers | ms (quartiles) | x torch DDP | x exact=False |", "|---|---|---|---|"]
    found = results["workers"]
    for name, v in found.items():
        loose = found.get(f"exact=False, {name.split(', ')[-1]}")
        ratio = f"{v['ms'] / loose['ms']:.3f}" if loose and name.startswith("exact,") else "-"
        lines.append(
            f"| {name} | {v['ms'] / 2:.1f} ({v['p25_ms'] / 2:.1f}-{v['p75_ms'] / 2:.1f}) "
            f"| {v['ms'] / found['torch DDP']['ms']:.3f} | {ratio} |"
        )
    plain = results["lanes"]["gradient accumulation"]["ms"]
    lines += ["", "| four micro-batches, 1 worker | ms per step (quartiles) | x accumulation |", "|---|---|---|"]
    for name, v in results["lanes"].items():
        lines.append(f"| {name} | {v['ms']:.1f} ({v['p25_ms']:.1f}-{v['p75_ms']:.1f}) | {v['ms'] / plain:.3f} |")
    begun = results["start"]
    lines += [
        "",
        f"First batch at sample {MANY // 2:,} of {MANY:,}, shuffled: {begun['ms']:.1f} ms, {begun['touched']:.0f} samples touched.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    results: dict[str, Any] = {"start": start()}
    bodies: list[tuple[str, int, Callable[..., None]]] = [("workers", options.workers, workers_body), ("lanes", 1, lanes_body)]
    with tempfile.TemporaryDirectory() as folder:
        for name, size, body in bodies:
            run_workers(body, size, folder, options.rounds)
            results[name] = json.loads(Path(folder, f"{name}.json").read_text())
    text = table(results, options.workers)
    print(text)
    command = f"python -m benchmarks.exact --workers {options.workers} --rounds {options.rounds}"
    write(f"exact-{options.workers}-workers", {"machine": machine(), "results": results}, text, command)


if __name__ == "__main__":
    main()
