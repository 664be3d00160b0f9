"""Averaging one bucket: gloo, shared memory, and the memcpy of the same bytes, in one run.

    python -m benchmarks.allreduce [--workers 2 4]

Every worker holds gradients of the given total size in 16 tensors. One operation is: copy them into
the bucket, average it over the workers, leave the result where param.grad would be a view of it. For
gloo that is a flat buffer and all_reduce in place. The floor: each worker copies its gradients into
a bucket, then reads and writes a bucket once (the reduction by slices), all workers at once, without
waiting for each other. Medians of interleaved rounds; the slowest worker counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import machine, run_workers, write
from lockstep.comm.shm import Shm
from lockstep.comm.torch_group import TorchGroup

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
TENSORS = 16


def deposit(views: list[torch.Tensor], grads: list[torch.Tensor], scale: float | None) -> None:
    """As Lockstep's buckets do it, for either transport: scaled on the way in where that is cheaper."""
    if scale is None:
        torch._foreach_copy_(views, grads)
    elif views[0].nbytes > 1 << 16:
        for view, grad in zip(views, grads, strict=True):
            torch.mul(grad, scale, out=view)
    else:
        torch._foreach_copy_(views, grads)
        torch._foreach_mul_(views, scale)


def operations(comms: dict[str, Any], nbytes: int) -> dict[str, Callable[[], None]]:
    numel = nbytes // 4
    grads = list(torch.randn(numel).chunk(TENSORS))
    found: dict[str, Callable[[], None]] = {}
    for name, comm in comms.items():
        flat = comm.buffer(numel, torch.float32, torch.device("cpu"))
        views = list(flat.chunk(TENSORS))

        def average(flat: torch.Tensor = flat, views: list[torch.Tensor] = views, comm: Any = comm) -> None:
            averages = comm.averages(flat)
            deposit(views, grads, None if averages else 1.0 / comm.size)
            comm.reduce(flat, "mean" if averages else "sum", "a bucket").wait()

        found[name] = average
    bucket, other = torch.zeros(numel), torch.zeros(numel)
    parts = list(bucket.chunk(TENSORS))

    def floor() -> None:
        deposit(parts, grads, None)
        other.copy_(bucket)

    found["memcpy"] = floor
    return found


def worker(rank: int, size: int, folder: str, sizes: list[str], most_rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(f"{folder}/store", size)
    comms = {
        "gloo": TorchGroup(dist.PrefixStore("gloo", store), rank, size, timeout_s=120),
        "shm": Shm(dist.PrefixStore("shm", store), rank, size, timeout_s=120),
    }
    results = {}
    for label in sizes:
        nbytes = SIZES[label]
        acts = operations(comms, nbytes)
        rounds = min(most_rounds, 12 if nbytes > 8 << 20 else 40)
        repeat = max(1, min(50, (4 << 20) // nbytes))
        times: dict[str, list[float]] = {name: [] for name in acts}
        for round_ in range(rounds + 3):
            for name, act in acts.items():
                comms["shm"].barrier()
                began = time.perf_counter()
                for _ in range(repeat):
                    act()
                took = (time.perf_counter() - began) / repeat
                if round_ >= 3:
                    times[name].append(took)
        mine = torch.tensor([times[name] for name in acts], dtype=torch.float64)
        everyone = torch.zeros(size, *mine.shape, dtype=torch.float64)
        comms["shm"].all_gather(everyone, mine, "times").wait()
        slowest = everyone.amax(0)
        results[label] = {name: statistics.median(slowest[i].tolist()) * 1e6 for i, name in enumerate(acts)}
        acts.clear()
        comms["shm"].barrier()
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    os._exit(0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| workers | bucket | gloo | shm | memcpy | gloo / shm | shm / memcpy |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        for label, us in row["us"].items():
            shown = " | ".join(
                f"{us[name]:.0f} us" if us[name] < 1e4 else f"{us[name] / 1e3:.1f} ms" for name in ("gloo", "shm", "memcpy")
            )
            lines.append(
                f"| {row['workers']} | {label} | {shown} | {us['gloo'] / us['shm']:.1f} | {us['shm'] / us['memcpy']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", help="numbers of workers (default 2, 4, 8, 16 as the cores allow, at least 2 and 4)"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=40, help="the greatest number of rounds per size")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    counts = options.workers or [n for n in (2, 4, 8, 16) if n <= max(4, cores)]
    rows = []
    for size in counts:
        with tempfile.TemporaryDirectory() as folder:
            run_workers(worker, size, folder, options.sizes, options.rounds)
            rows.append({"workers": size, "us": json.loads(Path(folder, "results.json").read_text())})
        text = table(rows)
        write(f"allreduce-{cores}-cores", {"machine": machine(), "results": rows}, text, "python -m benchmarks.allreduce")
    print(text)


if __name__ == "__main__":
    main()
