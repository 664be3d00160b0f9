"""Several machines, each a network namespace (tests/hosts.py): recovery, two levels against torch DDP, and a thousand agents.

    python -m benchmarks.machines [--only recovery link agents] [--rounds 10]

recovery: 3 hosts with 2 workers each. From cutting a machine off without a word, or kill -9 of its agent, to the next committed
step of the workers on the other machines. A step takes 20 ms (it sleeps).
link: 2 hosts with 2 workers each, a link that carries 1 or 10 Gbit/s, and a model with many parameters and little to compute.
torch DDP over gloo and Lockstep over two levels run interleaved in the same processes. The bytes are those that the kernel has
counted on the link, with headers.
agents: connections to one head that behave as agents with one worker each, from 4 processes (tests/many_agents.py).
Needs root, as the tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.cluster import Cluster
from tests.hosts import Hosts, missing
from tests.many_agents import ManyAgents
from tests.waiting import wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from benchmarks.recovery import OURS, alive, commits
from benchmarks.report import machine, write
from lockstep.cluster.token import write_token

DEADLINE_S = 60.0
PORT = 29500
LAYERS, WIDTH = 24, 1024
MBITS = (1000, 10000)
TORCH, OURS_NAME = "torch DDP, gloo", "Lockstep, two levels"
AGENTS, PROCESSES = 1000, 4


# -- recovery ------------------------------------------------------------------------------------------


class Recovery:
    """Three hosts, and the commits of their workers."""

    def __init__(self, hosts: Hosts, cluster: Cluster) -> None:
        self._hosts, self._cluster = hosts, cluster

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Seconds from each fault to the next commit of the last worker on the other machines."""
        found: dict[str, list[float]] = {"machine cut off silently": [], "agent killed": []}
        for _ in range(rounds):
            found["machine cut off silently"].append(self._fault(lambda: self._hosts.cut("c", silently=True)))
            self._hosts.restore("c")
            found["agent killed"].append(self._fault(lambda: self._cluster.kill_agent("c")))
            self._cluster.start_agent("c")
        return found

    def _fault(self, strike: Callable[[], None]) -> float:
        wait_until(lambda: self._settled(6) is not None, "all six workers commit", DEADLINE_S)
        era, others = self._settled(6) or 0, self._pids("ab")
        began = time.monotonic()
        strike()
        wait_until(lambda: len(self._first_after(era, others)) == len(others), "the other machines commit", DEADLINE_S)
        return max(self._first_after(era, others)) - began

    def _settled(self, workers: int) -> int | None:
        """The generation in which ``workers`` live processes have committed more than three steps; None if there is none."""
        now = {pid: lines for pid, lines in commits(self._cluster.folder).items() if lines and alive(pid)}
        eras = {lines[-1][1] for lines in now.values()}
        era = max(eras, default=-1)
        enough = [pid for pid, lines in now.items() if sum(number == era for _, number in lines) > 3]
        return era if len(enough) == workers and len(eras) == 1 else None

    def _pids(self, hosts: str) -> set[int]:
        on_hosts = {pid for host in hosts for pid in self._hosts.pids(host)}
        return {pid for pid, lines in commits(self._cluster.folder).items() if lines and pid in on_hosts and alive(pid)}

    def _first_after(self, era: int, pids: set[int]) -> list[float]:
        found = commits(self._cluster.folder)
        times = [[when for when, number in found[pid] if number > era] for pid in pids]
        return [each[0] for each in times if each]


def recovery(rounds: int) -> tuple[list[dict[str, Any]], str]:
    with tempfile.TemporaryDirectory() as place, Hosts(3) as hosts:
        folder = Path(place)
        (folder / "train.py").write_text(OURS)
        with Cluster(hosts, folder / "cluster", folder / "train.py", args=[str(folder / "cluster")]) as cluster:
            cluster.start("--max-respawns", "1000", hang_timeout_s=30.0)
            results = Recovery(hosts, cluster).measure(rounds)
    lines = ["| fault | next commit, median s | worst s | goal s | times |", "|---|---|---|---|---|"]
    goals = {"machine cut off silently": "2.5", "agent killed": "0.3"}
    lines += [f"| {name} | {statistics.median(s):.3f} | {max(s):.3f} | {goals[name]} | {len(s)} |" for name, s in results.items()]
    return [{"fault": name, "next_s": seconds} for name, seconds in results.items()], "\n".join(lines)


# -- two levels ----------------------------------------------------------------------------------------


def link_worker(rank: int, size: int, address: str, rounds: int, folder: str) -> None:
    """One of the processes on the hosts."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=size)
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        TORCH: lambda model: TorchDDP(model, gradient_as_bucket_view=True),
        OURS_NAME: lambda model: lockstep.DistributedDataParallel(model, comm="twolevel"),
    }
    trainers = {}
    for name, wrap in wraps.items():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        trainers[name] = model, torch.optim.SGD(model.parameters(), lr=0.01)
    x, found = torch.randn(1, WIDTH), []
    for number in range(rounds + 1):
        names = list(trainers) if number % 2 else list(reversed(trainers))
        for name in names:
            model, opt = trainers[name]
            dist.barrier()
            before, began = _bytes_sent(), time.perf_counter()
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            dist.barrier()
            found.append({"variant": name, "round": number, "s": time.perf_counter() - began, "bytes": _bytes_sent() - before})
    Path(folder, f"link-{rank}.json").write_text(json.dumps([each for each in found if each["round"] > 0]))
    os._exit(0)  # torch's reducer may deadlock when the last owner of a gloo group is destroyed


def _bytes_sent() -> int:
    """What this host has sent so far, as its kernel counts it."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


def link(rounds: int) -> tuple[list[dict[str, Any]], str]:
    rows: list[dict[str, Any]] = []
    for mbit in MBITS:
        with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
            for host in hosts.names:
                hosts.limit(host, mbit)
            body = (
                "import sys; from benchmarks.machines import link_worker as w; a = sys.argv; w(int(a[1]), 4, a[2], int(a[3]), a[4])"
            )
            processes = []
            for rank in range(4):
                given = [str(rank), hosts.address("a"), str(rounds), folder]
                processes.append(hosts.run("ab"[rank // 2], [sys.executable, "-c", body, *given], env={"OMP_NUM_THREADS": "1"}))
            for process in processes:
                if process.wait(60 + 20 * rounds) != 0:
                    raise RuntimeError(f"a worker ended with code {process.returncode}")
            per_rank = [json.loads(Path(folder, f"link-{rank}.json").read_text()) for rank in range(4)]
        rows.append({"mbit": mbit, "variants": {name: _link_figures(per_rank, name) for name in (TORCH, OURS_NAME)}})
    head = "| link | variant | MB sent per host and step | bytes x torch DDP | s per step (quartiles) | time x torch DDP |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in rows:
        base = row["variants"][TORCH]
        for name, v in row["variants"].items():
            lines.append(
                f"| {row['mbit'] // 1000} Gbit/s | {name} | {v['mb']:.1f} | {v['mb'] / base['mb']:.3f} "
                f"| {v['s']:.3f} ({v['p25_s']:.3f}-{v['p75_s']:.3f}) | {v['s'] / base['s']:.3f} |"
            )
    return rows, "\n".join(lines)


def _link_figures(per_rank: list[list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Of each step: the time of the slowest worker, and the mean of the bytes of the two hosts."""
    chosen = [[each for each in found if each["variant"] == name] for found in per_rank]
    seconds = sorted(max(each["s"] for each in steps) for steps in zip(*chosen, strict=True))
    sent = [(steps[0]["bytes"] + steps[2]["bytes"]) / 2 for steps in zip(*chosen, strict=True)]
    quarter = (len(seconds) - 1) // 4
    middle = statistics.median(seconds)
    return {"mb": statistics.median(sent) / 1e6, "s": middle, "p25_s": seconds[quarter], "p75_s": seconds[-1 - quarter]}


# -- many agents -----------------------------------------------------------------------------------------


def agents(rounds: int) -> tuple[list[dict[str, Any]], str]:
    rows = [_agents_once() for _ in range(rounds)]
    lines = [f"| {AGENTS} agents, {rounds} times | median s | worst s | goal s |", "|---|---|---|---|"]
    texts = {
        "joined_s": ("all have joined", "2"),
        "formed_s": ("all belong to a generation", "-"),
        "told_s": ("all know of a death", "0.2"),
    }
    for key, (text, goal) in texts.items():
        lines.append(f"| {text} | {statistics.median(r[key] for r in rows):.3f} | {max(r[key] for r in rows):.3f} | {goal} |")
    return rows, "\n".join(lines)


def _agents_once() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        token, run_dir = folder / "token", folder / "run"
        write_token(token)
        command = ["--listen", "127.0.0.1:0", "--token-file", str(token), "--run-dir", str(run_dir), "--min-workers", str(AGENTS)]
        head = subprocess.Popen([sys.executable, "-m", "lockstep", "head", *command], stderr=subprocess.DEVNULL)
        try:
            wait_until((run_dir / "head.address").exists, "the head listens", DEADLINE_S)
            with ManyAgents((run_dir / "head.address").read_text().strip(), token, AGENTS, PROCESSES) as many:
                many.wait("ready", DEADLINE_S)
                many.connect()
                found = {"joined_s": many.wait("running", DEADLINE_S), "formed_s": many.wait("formed", DEADLINE_S)}
                many.lose_one()
                return found | {"told_s": many.wait("told", DEADLINE_S)}
        finally:
            head.kill()
            head.wait()


PARTS = {"recovery": recovery, "link": link, "agents": agents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        parser.error(reason)
    for part in options.only:
        about = {**machine(), "load before": round(os.getloadavg()[0], 1)}
        results, text = PARTS[part](options.rounds)
        print(text, flush=True)
        command = f"python -m benchmarks.machines --only {part} --rounds {options.rounds}"
        write(f"machines-{part}", {"machine": about, "results": results}, text, command)


if __name__ == "__main__":
    main()
