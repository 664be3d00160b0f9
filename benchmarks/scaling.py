"""Weak scaling on one machine: the same work per worker, more and more workers, one thread each.

    python -m benchmarks.scaling [--workers 1 2 4 8]

100% is the bare loop (no averaging) run by as many processes at once: it already pays for the
memory bandwidth and the clock that the workers share, so what is left is the cost of staying
identical. A GPT of 25 M parameters, 8x64 tokens per worker; torch DDP over gloo and Lockstep,
interleaved in one run. Writes a table and a picture to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.gpt import GPTConfig

from benchmarks.report import RESULTS, line_chart, machine, run_workers, write
from benchmarks.step import Case, measure

CASE = Case("GPT 25 M, 8x64", GPTConfig(vocab=128, context=64, layers=8, heads=8, width=512), 8, 8, 2)
SHOWN = ("torch DDP", "Lockstep, shm")


def worker(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    found = measure(replace(CASE, rounds=rounds), only=("bare", *SHOWN))
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(found))
    os._exit(0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| workers | bare ms | torch DDP ms | Lockstep ms | torch DDP | Lockstep |", "|---|---|---|---|---|---|"]
    for row in rows:
        ms = {name: row["variants"][name]["ms"] for name in ("bare", *SHOWN)}
        shares = [f"{100 * ms['bare'] / ms[name]:.1f}%" for name in SHOWN]
        lines.append(f"| {row['workers']} | {' | '.join(f'{v:.0f}' for v in ms.values())} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, nargs="+", default=[n for n in (1, 2, 4, 8, 16, 32) if n <= cores])
    parser.add_argument("--rounds", type=int, default=CASE.rounds)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    name = f"scaling-{cores}-cores"
    for size in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            run_workers(worker, size, folder, options.rounds)
            rows.append({"workers": size, "variants": json.loads(Path(folder, "results.json").read_text())})
        text = table(rows)
        print(text.splitlines()[-1], flush=True)
        write(name, {"machine": machine(), "results": rows}, text, "python -m benchmarks.scaling")
    lines = {
        shown: [(r["workers"], 100 * r["variants"]["bare"]["ms"] / r["variants"][shown]["ms"]) for r in rows] for shown in SHOWN
    }
    picture = line_chart("Weak scaling, % of the bare loop run in parallel", "workers", lines)
    Path(os.environ.get("BENCHMARK_RESULTS", RESULTS), f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
