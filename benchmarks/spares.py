"""From kill -9 of one worker to the first step that its replacement has committed, with and without a spare (`--spares 1`).

    python -m benchmarks.spares [--workers 2 4] [--rounds 4] [--kills 5]
    python -m benchmarks.spares --gpu [--megabytes 100]     over NCCL, with LOCKSTEP_NCCL_LIB if the workers share one GPU

Each round starts one run per variant, one after the other, and kills workers of it one by one. A step sleeps for 20 ms. Before each
kill, all workers train, and the spare stands by. If each worker has a GPU, the spare replaces only the worker that uses the GPU of
the spare, so that worker is killed. "warmed up": the script does a forward and a backward pass on random data before
``Run(...)``, so that a spare has loaded what the first step needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests import shared_gpu

from benchmarks.recovery import alive, commits, settled, settled_after, supervised
from benchmarks.report import machine, write

SCRIPT = """
import os, sys, time, torch, torch.nn.functional as F
folder, width, device, comm, is_warmed_up = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "1"
if device == "cuda":
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(4096, 16)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
layers = torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
model = torch.nn.Sequential(*layers).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
with open(f"{folder}/device-{os.getpid()}", "w") as note:
    note.write(device)
if is_warmed_up:
    F.cross_entropy(model(x[:8].to(device)), data.tensors[1][:8].to(device)).backward()
    opt.zero_grad()
    if device != "cpu":
        torch.cuda.synchronize(device)
file = os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
import lockstep
run = lockstep.Run(model, opt, lanes=12, comm=comm)
for a, b in run.shard(data, global_batch=48, shuffle=True, epochs=10000):
    F.cross_entropy(model(a.to(device)), b.to(device)).backward()
    opt.step(); opt.zero_grad()
    if run.committed:
        time.sleep(0.02)
        os.write(file, f"{time.monotonic()} {run.generation}\\n".encode())
"""
STANDS_BY = "stands by as a spare"
COLUMNS = (
    *("workers", "model", "replacement", "next commit of the others, median s", "replacement is a member, median s"),
    *("its first commit, median s", "worst s", "kills"),
)


@dataclass
class Variant:
    name: str
    spares: int
    is_warmed_up: bool = False
    next_s: list[float] = field(default_factory=list)
    """To the next committed step of the survivors."""
    joined_s: list[float] = field(default_factory=list)
    """To the generation that has the replacement."""
    back_s: list[float] = field(default_factory=list)
    """To the first committed step of the replacement."""

    def row(self, workers: int, model: str) -> str:
        middle = [f"{statistics.median(times):.3f}" for times in (self.next_s, self.joined_s, self.back_s)]
        return f"| {workers} | {model} | {self.name} | {' | '.join(middle)} | {max(self.back_s):.3f} | {len(self.back_s)} |"


def await_spare(folder: Path, count: int, deadline_s: float = 60.0) -> None:
    """Wait until spares have stood by ``count`` times since the run began."""
    end = time.monotonic() + deadline_s
    while (folder / "log.txt").read_text().count(STANDS_BY) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"no spare stood by within {deadline_s:.0f} s")
        time.sleep(0.02)


def replaceable(folder: Path, members: Iterable[int]) -> list[int]:
    """The members on the device of a spare, which has committed nothing yet; all members if there is no spare."""
    devices = {int(path.name.removeprefix("device-")): path.read_text() for path in folder.glob("device-*")}
    committed = commits(folder)
    of_spares = {device for pid, device in devices.items() if alive(pid) and not committed.get(pid)}
    return sorted(pid for pid in members if not of_spares or devices[pid] in of_spares)


def last_formed(folder: Path) -> float:
    """When the newest generation was formed, on the machine's clock of `time.time`."""
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    times = [entry["time"] for entry in map(json.loads, lines) if any("Form" in action for action in entry.get("actions", ()))]
    return float(times[-1])


def play(variant: Variant, folder: Path, workers: int, kills: int, chance: random.Random, script_args: list[str]) -> None:
    """One run: kill workers one by one, and add what was measured to the variant."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--max-respawns", "1000"]
    command += ["--spares", str(variant.spares), "--run-dir", f"{folder}/run", str(script), str(folder), *script_args]
    with supervised(command, folder):
        for number in range(kills):
            if variant.spares:
                await_spare(folder, variant.spares + number)
            now = settled(folder, workers)
            era = next(iter(now.values()))[-1][1]
            victim = chance.choice(replaceable(folder, now))
            began, at = time.monotonic(), time.time()
            os.kill(victim, signal.SIGKILL)
            later = settled_after(folder, workers, era, victim)
            first = {pid: next(when for when, number in lines if number > era) for pid, lines in later.items()}
            variant.next_s.append(max(first[pid] for pid in later if pid in now) - began)
            variant.joined_s.append(last_formed(folder) - at)
            variant.back_s.append(max(first.values()) - began)


def measure(workers: int, megabytes: int, options: argparse.Namespace) -> list[Variant]:
    """All rounds of all variants."""
    variants = [Variant("started anew", 0), Variant("a spare", 1), Variant("a spare, warmed up", 1, is_warmed_up=True)]
    chance = random.Random(0)
    where = ("cuda", "nccl") if options.gpu else ("cpu", "auto")
    width = max(32, int((megabytes * 1e6 / 4) ** 0.5))
    for variant in variants * options.rounds:
        with tempfile.TemporaryDirectory() as place:
            script_args = [str(width), *where, str(int(variant.is_warmed_up))]
            try:
                play(variant, Path(place), workers, options.kills, chance, script_args)
            except (RuntimeError, OSError) as error:
                log = (Path(place) / "log.txt").read_text()[-3000:]
                print(f"{workers} workers, {megabytes} MB, {variant.name}: {error}\n{log}", flush=True)
    return [variant for variant in variants if variant.back_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="in each round, of each variant")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1], help="of the models")
    parser.add_argument("--gpu", action="store_true", help="over NCCL")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if options.gpu:
        os.environ.update(shared_gpu.environment())
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    rows: list[dict[str, Any]] = []
    for workers in options.workers:
        if options.gpu and (reason := shared_gpu.why_no_nccl(workers, torch.cuda.device_count())):
            print(f"{workers} workers: not measured, {reason}", flush=True)
            continue
        for megabytes in options.megabytes:
            for variant in measure(workers, megabytes, options):
                lines.append(variant.row(workers, f"{megabytes} MB"))
                print(lines[-1], flush=True)
                rows.append({"workers": workers, "megabytes": megabytes, **asdict(variant)})
    given = {"workers": options.workers, "rounds": [options.rounds], "kills": [options.kills], "megabytes": options.megabytes}
    words = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in given.items())
    command = f"python -m benchmarks.spares {'--gpu ' if options.gpu else ''}{words}"
    data = {"machine": machine(gpu=options.gpu), "results": rows}
    write("spares-gpu" if options.gpu else f"spares-{os.cpu_count()}-cores", data, "\n".join(lines), command)


if __name__ == "__main__":
    main()
