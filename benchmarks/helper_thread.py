"""What the helper thread of shared memory is worth while cores are idle, and what it costs while none is.

    python -m benchmarks.helper_thread [--workers 2 4 8] [--rounds 10] [--modes off on]

The step of benchmarks/step.py, a GPT of 25 M parameters on 4x64 tokens: the bare loop, torch DDP, and Lockstep over shared memory
with LOCKSTEP_HELPER_THREAD=off, on or auto. Variants run interleaved, one step at a time; a ratio is the median of the ratios of
the rounds. 16 cores: about 25 s for each number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from benchmarks.report import machine, run_workers, write
from benchmarks.step import CPU_CASES, VARIANTS, interleaved, quantile

CASE = CPU_CASES[1]


def with_helper(mode: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        os.environ["LOCKSTEP_HELPER_THREAD"] = mode
        return lockstep.DistributedDataParallel(model, comm="shm")

    return wrap


def worker(rank: int, size: int, folder: str, rounds: int, modes: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    chosen = {name: wrap for name, wrap in VARIANTS.items() if name in ("bare", "torch DDP")}
    chosen |= {f"Lockstep, helper {mode}": with_helper(mode) for mode in modes}
    times = interleaved(replace(CASE, rounds=rounds, steps_per_round=1), chosen, warm_up=3)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(times))
    os._exit(0)  # as in benchmarks/step.py


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| workers | variant | ms (quartiles) | x bare (quartiles) | x torch DDP |", "|---|---|---|---|---|"]
    for row in rows:
        times = row["times"]
        for name, t in times.items():
            of_bare, of_torch = ([a / b for a, b in zip(t, times[base], strict=True)] for base in ("bare", "torch DDP"))
            lines.append(
                f"| {row['workers']} | {name} | {1e3 * statistics.median(t):.1f} ({_quartiles([1e3 * s for s in t], 1)}) "
                f"| {statistics.median(of_bare):.3f} ({_quartiles(of_bare, 3)}) | {statistics.median(of_torch):.3f} |"
            )
    return "\n".join(lines)


def _quartiles(values: list[float], digits: int) -> str:
    return f"{quantile(values, 0.25):.{digits}f}-{quantile(values, 0.75):.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, nargs="+", default=[n for n in (2, 4, 8) if n <= cores])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--modes", nargs="+", default=["off", "on"], choices=["off", "on", "auto"])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in options.workers:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run_workers(worker, size, folder, options.rounds, options.modes)
            rows.append({"workers": size, "times": json.loads(Path(folder, "results.json").read_text())})
        print(table(rows[-1:]), f"\n{time.monotonic() - began:.0f} s", flush=True)
        words = f"--workers {' '.join(map(str, options.workers))} --rounds {options.rounds} --modes {' '.join(options.modes)}"
        command = f"python -m benchmarks.helper_thread {words}"
        write(f"helper-thread-{cores}-cores", {"machine": machine(), "results": rows}, table(rows), command)


if __name__ == "__main__":
    main()
