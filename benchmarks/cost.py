"""What surviving costs while nothing fails: one script under `lockstep run`, and under torchrun, where nobody could recover.

    python -m benchmarks.cost [--workers 2] [--pairs 12]

The same lanes, comm and model in both; a step takes about 20 ms of work. Runs alternate; compared are each pair's median steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import machine, write

SCRIPT = """
import os, statistics, sys, time, torch, torch.nn.functional as F, lockstep
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(8192, 256)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
widths = [256, 768, 768]
body = [layer for a, b in zip(widths, widths[1:]) for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
model = torch.nn.Sequential(*body, torch.nn.Linear(768, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
run = lockstep.Run(model, opt, lanes=int(os.environ["COST_LANES"]), comm="shm")
times = []
for a, b in run.shard(data, global_batch=256 * run.lanes, shuffle=True, epochs=1000):
    F.cross_entropy(model(a), b).backward()
    opt.step(); opt.zero_grad()
    if run.committed:
        times.append(time.perf_counter())
    if len(times) == 300:
        break
if run.is_main:
    steps = [after - before for before, after in zip(times[20:], times[21:])]
    open(sys.argv[1], "w").write(str(statistics.median(steps)))
run.close()
"""


def step_s(command: list[str], workers: int, folder: Path) -> float:
    """The median step of one run."""
    note = folder / "step"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COST_LANES": str(workers)}
    subprocess.run(
        [*command, "script.py", str(note)], cwd=folder, check=True, timeout=120, env=environment, stderr=subprocess.DEVNULL
    )
    return float(note.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    given = parser.parse_args()
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.workers}"],
        "lockstep run": [sys.executable, "-m", "lockstep", "run", "-n", str(given.workers)],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        for pair in range(given.pairs):
            for name in list(commands)[:: 1 if pair % 2 else -1]:
                times[name].append(step_s(commands[name], given.workers, Path(folder)))
    ratios = sorted(ours / theirs for ours, theirs in zip(times["lockstep run"], times["torchrun"], strict=True))
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
    rows = [f"| {given.workers} workers, {given.pairs} pairs of runs | ms per step, median |", "|---|---|"]
    rows += [f"| under {name} | {statistics.median(times[name]) * 1000:.2f} |" for name in commands]
    rows.append(f"| ratio of a pair: median (quartiles) | {middle:.4f} ({low:.4f}-{high:.4f}) |")
    table = "\n".join(rows)
    print(table)
    command = f"python -m benchmarks.cost --workers {given.workers} --pairs {given.pairs}"
    write(f"cost-{os.cpu_count()}-cores", {"machine": machine(), "step_s": times}, table, command)


if __name__ == "__main__":
    main()
