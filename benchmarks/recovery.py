"""From kill -9 of one worker to the survivors' next committed step and its replacement's first: `lockstep run`, torchrun, torchft.

    python -m benchmarks.recovery [--workers 2 4] [--kills 20]
    python -m benchmarks.recovery --gpu [--workers 2 3 4] [--megabytes 1 100]   over NCCL (tests/shared_gpu.py)

A step takes 20 ms (it sleeps). Workers write a line for every commit; the clock is the machine's. torchrun restarts
everybody, each from a checkpoint of the last step (written every step, which is not counted); 5 kills of it.

torchft is measured where it is installed. It has no supervisor: this starts a lighthouse and the replicas, and a new process,
which imports torch first, right after each kill. Its heartbeats are every 5 ms with 50 ms of patience and a quorum is looked for
every 5 ms, the fastest of the settings that were tried (with its defaults it took seconds). 0.2.0 does not get far: its survivors
die too (an AssertionError in DistributedDataParallel) when the kill falls into an all-reduce; the nightly of 2026-10-26 has that
corrected.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tests import shared_gpu

from benchmarks.report import machine, write

NCCL = "lockstep run, NCCL"

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
ON_GPU = (
    BODY
    + """
import lockstep
device, width = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}", int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 2))
model.to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
run = lockstep.Run(model, opt, lanes=12, comm="nccl")
for a, b in run.shard(data, global_batch=48, shuffle=True, epochs=10000):
    F.cross_entropy(model(a.to(device)), b.to(device)).backward()
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
DIES_WITH_US = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
"""
LIGHTHOUSE = (
    DIES_WITH_US
    + """
import os, sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=50, quorum_tick_ms=5)
place = f"{sys.argv[1]}/lighthouse"
with open(place + ".new", "w") as out: out.write("http://127.0.0.1:" + server.address().rpartition(":")[2])
os.replace(place + ".new", place)
while True: time.sleep(60)
"""
)
TORCHFT = (
    DIES_WITH_US
    + """
import os, socket
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
socket.gethostname = lambda: "127.0.0.1"  # what checkpoints are fetched from, whatever this machine's name resolves to
"""
    + BODY
    + """
import datetime, torchft, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def load(state): model.load_state_dict(state["model"]); opt.load_state_dict(state["opt"])
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(), load_state_dict=load, min_replica_size=1, rank=0, world_size=1, hostname="127.0.0.1",
    state_dict=lambda: {"model": model.state_dict(), "opt": opt.state_dict()}, store_addr="127.0.0.1", store_port=store.port,
    lighthouse_addr=open(f"{folder}/lighthouse").read(), heartbeat_interval=datetime.timedelta(milliseconds=5),
)
ddp = torchft.DistributedDataParallel(manager, model)
wrapped = torchft.Optimizer(manager, opt)
while True:
    i = torch.randint(4096, (64,))
    wrapped.zero_grad()
    F.cross_entropy(ddp(data.tensors[0][i]), data.tensors[1][i]).backward()
    step = manager.current_step()  # after the backward pass: a replica that is healed has been given the others' by now
    wrapped.step()
    if manager.current_step() > step:
        time.sleep(0.02)
        note(manager._quorum_id)
"""
)


def commits(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Process id -> (when, era) of its commits. An era is a generation, the number of restarts, or a quorum's id."""
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
    """Wait until ``workers`` live processes commit in one era."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        now = {pid: lines for pid, lines in commits(folder).items() if lines and alive(pid)}
        if len(now) == workers and len({lines[-1][1] for lines in now.values()}) == 1 and min(map(len, now.values())) > 3:
            return now
        time.sleep(0.02)
    raise RuntimeError("the workers did not settle within 30 s")


def spawn(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A process with one thread of its own, that writes to the folder's log."""
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})


@contextmanager
def supervised(command: list[str], folder: Path) -> Iterator[Callable[[], None]]:
    """Workers below a supervisor, which replaces them itself: what it yields does nothing."""
    process = spawn(command, folder)
    try:
        yield lambda: None
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        sweep(folder)


def sweep(folder: Path) -> None:
    """Kill what still runs this folder's script: a supervisor that had to be killed leaves its workers."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended


@contextmanager
def replicas(folder: Path, workers: int) -> Iterator[Callable[[], None]]:
    """torchft's lighthouse and one process per replica; it has no supervisor, so what it yields starts a replacement."""
    (folder / "lighthouse.py").write_text(LIGHTHOUSE)
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> None:
        started.append(spawn([sys.executable, str(folder / script), str(folder)], folder))

    try:
        start("lighthouse.py")
        appears(folder / "lighthouse")
        for _ in range(workers):
            start("train.py")
        yield lambda: start("train.py")
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(20)


def appears(path: Path, deadline_s: float = 30.0) -> None:
    """Wait for a file that another process writes."""
    end = time.monotonic() + deadline_s
    while not path.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"no {path.name} within {deadline_s:.0f} s")
        time.sleep(0.02)


def measure(
    launch: AbstractContextManager[Callable[[], None]], folder: Path, workers: int, kills: int, survivors_live: bool
) -> tuple[list[float], list[float]]:
    """(seconds to the survivors' next commit, seconds to the replacement's first) of each kill."""
    chance = random.Random(0)
    next_s, back_s = [], []
    with launch as replace:
        for _ in range(kills):
            now = settled(folder, workers)
            era = next(iter(now.values()))[-1][1]
            victim = chance.choice(sorted(now))
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            replace()
            later = settled_after(folder, workers, era, victim)
            old = [pid for pid in later if pid in now] if survivors_live else list(later)
            first = {pid: next(when for when, number in lines if number > era) for pid, lines in later.items()}
            next_s.append(max(first[pid] for pid in old) - began)
            back_s.append(max(first.values()) - began)
    return next_s, back_s


def settled_after(folder: Path, workers: int, era: int, victim: int) -> dict[int, list[tuple[float, int]]]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        now = {pid: lines for pid, lines in commits(folder).items() if lines and pid != victim and alive(pid)}
        if len(now) == workers and all(lines[-1][1] > era for lines in now.values()):
            return now
        time.sleep(0.02)
    raise RuntimeError("did not come back within 30 s")


def launchers(alone: bool) -> tuple[str, ...]:
    """torchft where it is installed."""
    if alone:
        return ("lockstep run",)
    return ("lockstep run", "torchrun", *(["torchft"] if importlib.util.find_spec("torchft") else []))


def prepare(name: str, folder: Path, workers: int, script_args: tuple[str, ...] = ()) -> AbstractContextManager[Callable[[], None]]:
    """Write the launcher's training script; what comes back starts it."""
    script = folder / "train.py"
    script.write_text({"lockstep run": OURS, NCCL: ON_GPU, "torchrun": THEIRS, "torchft": TORCHFT}[name])
    if name == "torchft":
        return replicas(folder, workers)
    if name in ("lockstep run", NCCL):
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--max-respawns", "1000"]
        command += ["--run-dir", f"{folder}/run"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command += ["--max-restarts=1000"]
    return supervised([*command, str(script), str(folder), *script_args], folder)


def width_of(megabytes: int) -> int:
    """The width of the model of ``ON_GPU`` that has so many megabytes of parameters."""
    return max(32, int((megabytes * 1e6 / 4) ** 0.5))


def on_gpu(options: argparse.Namespace) -> None:
    """Measure recovery over NCCL for each number of workers and each size of the model."""
    os.environ.update(shared_gpu.environment())
    rows: list[dict[str, Any]] = []
    head = "| workers | model | next commit, median s | worst s | replacement back, median s | worst s | kills |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    began = time.monotonic()
    for size in options.workers or [2, 3, 4]:
        if reason := shared_gpu.why_no_nccl(size, torch.cuda.device_count()):
            print(f"{size} workers: not measured, {reason}", flush=True)
            continue
        for megabytes in options.megabytes:
            if time.monotonic() - began > options.deadline_s:
                print(f"{size} workers, {megabytes} MB: not measured, {options.deadline_s:g} s are over", flush=True)
                continue
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                launch = prepare(NCCL, folder, size, (str(width_of(megabytes)),))
                try:
                    next_s, back_s = measure(launch, folder, size, options.kills or 3, survivors_live=True)
                except RuntimeError as error:
                    print(f"{size} workers, {megabytes} MB: {error}\n{(folder / 'log.txt').read_text()[-3000:]}", flush=True)
                    continue
            rows.append({"workers": size, "megabytes": megabytes, "next_s": next_s, "back_s": back_s})
            middle, back = statistics.median(next_s), statistics.median(back_s)
            figures = f"{middle:.3f} | {max(next_s):.3f} | {back:.2f} | {max(back_s):.2f}"
            lines.append(f"| {size} | {megabytes} MB | {figures} | {len(next_s)} |")
            print(lines[-1], flush=True)
    arguments = f"--workers {' '.join(map(str, options.workers or [2, 3, 4]))} --megabytes {' '.join(map(str, options.megabytes))}"
    command_text = f"python -m benchmarks.recovery --gpu {arguments} --kills {options.kills or 3}"
    write("recovery-gpu", {"machine": machine(gpu=True), "results": rows}, "\n".join(lines), command_text)


def about(names: tuple[str, ...]) -> dict[str, Any]:
    """The machine, and which torchft was measured, released or nightly."""
    version = metadata.version(metadata.packages_distributions()["torchft"][0]) if "torchft" in names else None
    return {**machine(), "torchft": version}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", help="2 4, with --gpu 2 3 4")
    parser.add_argument("--kills", type=int, help="of each number of workers: 20, with --gpu 3")
    parser.add_argument("--deadline-s", type=float, default=70.0, help="begin no measurement after so many seconds, with --gpu")
    parser.add_argument("--alone", action="store_true", help="without torchrun and torchft")
    parser.add_argument("--gpu", action="store_true", help="over NCCL, a GPU per worker if there are as many")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100], help="of the models, with --gpu")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if options.gpu:
        on_gpu(options)
        return
    options.workers, options.kills = options.workers or [2, 4], options.kills or 20
    names = launchers(options.alone)
    rows: list[dict[str, Any]] = []
    head = "| workers | launcher | next commit, median s | worst s | replacement back, median s | kills |"
    lines = [head, "|---|---|---|---|---|---|"]
    for size in options.workers:
        for name in names:
            kills = min(5, options.kills) if name == "torchrun" else options.kills
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                launch = prepare(name, folder, size)
                try:
                    next_s, back_s = measure(launch, folder, size, kills, name != "torchrun")
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
    data = {"machine": about(names), "results": rows}
    write(f"recovery-{os.cpu_count()}-cores", data, "\n".join(lines), command_text)


if __name__ == "__main__":
    main()
