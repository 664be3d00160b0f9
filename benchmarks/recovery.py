"""From kill -9 of one worker to the survivors' next committed step, and to its replacement's first: `lockstep run` and torchrun.

    python -m benchmarks.recovery [--workers 2 4] [--kills 20]

A step takes 20 ms (it sleeps). Workers write a line for every commit; the clock is the machine's. torchrun restarts
everybody, each from a checkpoint of the last step (written every step, which is not counted); 5 kills of it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write

BODY = """
import os, sys, time, torch, torch.nn.functional as F
folder = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(4096, 16)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
file = os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def note(era): os.write(file, f"{time.monotonic()} {era}\\n".encode())
"""
OURS = (
    BODY
    + """
import lockstep
run = lockstep.Run(model, opt, lanes=16)
for a, b in run.shard(data, global_batch=64, shuffle=True, epochs=10000):
    F.cross_entropy(model(a), b).backward()
    opt.step(); opt.zero_grad()
    if run.committed:
        time.sleep(0.02)
        note(run.generation)
"""
)
THEIRS = (
    BODY
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
place = f"{folder}/checkpoint.pt"
if os.path.exists(place): model.load_state_dict(torch.load(place, weights_only=True))
ddp = DDP(model)
era = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while True:
    i = torch.randint(4096, (64,))
    F.cross_entropy(ddp(data.tensors[0][i]), data.tensors[1][i]).backward()
    opt.step(); opt.zero_grad()
    time.sleep(0.02)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), place + ".new"); os.replace(place + ".new", place)
    note(era)
"""
)


def commits(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Process id -> (when, era) of its commits. An era is a generation, or the number of restarts."""
    found = {}
    for path in folder.iterdir():
        if path.name.isdigit():
            lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 1]
            found[int(path.name)] = [(float(when), int(era)) for when, era in lines]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def settled(folder: Path, workers: int, deadline_s: float = 30.0) -> dict[int, list[tuple[float, int]]]:
    """Wait until so many live processes commit in one era."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        now = {pid: lines for pid, lines in commits(folder).items() if lines and alive(pid)}
        if len(now) == workers and len({lines[-1][1] for lines in now.values()}) == 1 and min(map(len, now.values())) > 3:
            return now
        time.sleep(0.02)
    raise RuntimeError("the workers did not settle within 30 s")


def measure(command: list[str], folder: Path, workers: int, kills: int, survivors_live: bool) -> tuple[list[float], list[float]]:
    """(seconds to the survivors' next commit, seconds to the replacement's first) of each kill."""
    chance = random.Random(0)
    log = (folder / "log.txt").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    next_s, back_s = [], []
    try:
        for _ in range(kills):
            now = settled(folder, workers)
            era = next(iter(now.values()))[-1][1]
            victim = chance.choice(sorted(now))
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            later = settled_after(folder, workers, era, victim)
            old = [pid for pid in later if pid in now] if survivors_live else list(later)
            first = {pid: next(when for when, number in lines if number > era) for pid, lines in later.items()}
            next_s.append(max(first[pid] for pid in old) - began)
            back_s.append(max(first.values()) - began)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    return next_s, back_s


def settled_after(folder: Path, workers: int, era: int, victim: int) -> dict[int, list[tuple[float, int]]]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        now = {pid: lines for pid, lines in commits(folder).items() if lines and pid != victim and alive(pid)}
        if len(now) == workers and all(lines[-1][1] > era for lines in now.values()):
            return now
        time.sleep(0.02)
    raise RuntimeError("did not come back within 30 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="without torchrun")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    head = "| workers | launcher | next commit, median s | worst s | replacement back, median s | kills |"
    lines = [head, "|---|---|---|---|---|---|"]
    for size in options.workers:
        for name in ("lockstep run",) if options.alone else ("lockstep run", "torchrun"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                (folder / "train.py").write_text(OURS if name == "lockstep run" else THEIRS)
                script = [str(folder / "train.py"), place]
                if name == "lockstep run":
                    kills = options.kills
                    command = [sys.executable, "-m", "lockstep", "run", "-n", str(size), "--max-respawns", "1000"]
                    command += ["--run-dir", f"{place}/run", *script]
                else:
                    kills = min(5, options.kills)
                    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
                    command += ["--max-restarts=1000", *script]
                try:
                    next_s, back_s = measure(command, folder, size, kills, name == "lockstep run")
                except RuntimeError as error:
                    lines.append(f"| {size} | {name} | {error} | - | - | - |")
                    print(lines[-1], flush=True)
                    continue
            rows.append({"workers": size, "launcher": name, "next_s": next_s, "back_s": back_s})
            middle, back = statistics.median(next_s), statistics.median(back_s)
            lines.append(f"| {size} | {name} | {middle:.3f} | {max(next_s):.3f} | {back:.2f} | {kills} |")
            print(lines[-1], flush=True)
    numbers = " ".join(map(str, options.workers))
    command_text = f"python -m benchmarks.recovery --workers {numbers} --kills {options.kills}{' --alone' if options.alone else ''}"
    write(f"recovery-{os.cpu_count()}-cores", {"machine": machine(), "results": rows}, "\n".join(lines), command_text)


if __name__ == "__main__":
    main()
