"""What a checkpoint costs: how long training stands still for it, how long loading takes, and what comparing replicas takes.

    python -m benchmarks.checkpoint [--megabytes 1000] [--rounds 7] [--gpu]

One process, one state (a model and its AdamW), in turns: the memcpy of its bytes, Lockstep's snapshot, torch.save, and
torch.distributed.checkpoint.async_save. A stall is the time until training could go on: the call has returned, and the device has
done what its stream of training was given. What goes on on other streams, and writing, is waited for outside of it. With --gpu,
the parts of Lockstep's stall follow, and how long the first small copy to the host (a ``loss.item()``) takes after it. Then
the same with two workers that hold the same state (the longer of both counts). Loading is compared with reading the bytes of the
same files by one thread, into new memory and into memory that was touched before; all from the page cache. Last, two workers
train the 5 M GPT of benchmarks/step.py and time the comparison of replicas against their steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import lockstep
from benchmarks.report import machine, write
from lockstep.checkpoint import in_flight

WIDTH = 1024


def make(megabytes: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a stack of square layers and its AdamW. Parameters and optimizer state have ``megabytes`` together."""
    layers = max(1, round(megabytes * 1e6 / 3 / 4 / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
    opt = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    opt.zero_grad()
    return model, opt


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(act: Callable[[], Any], device: str) -> float:
    sync(device)
    began = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


class PartsOfStall:
    """Times the functions that ``Checkpoints.begin`` calls."""

    def __init__(self) -> None:
        self.spent_s: dict[str, list[float]] = {}

    def watch(self, owner: Any, name: str, label: str) -> None:
        real, spent_s = getattr(owner, name), self.spent_s.setdefault(label, [])

        def timing(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **named)
            finally:
                spent_s.append(time.perf_counter() - began)

        setattr(owner, name, timing)

    def lines(self, rounds: int) -> list[str]:
        """The last ``rounds`` calls of each; the first ones get memory."""
        rows = [f"| {label} | {1e3 * statistics.median(spent[-rounds:]):.2f} |" for label, spent in self.spent_s.items()]
        return ["| parts of Lockstep's stall | ms, median |", "|---|---|", *rows]


class Stalls:
    """Each way to save, its time until training may go on; ``after`` waits for the rest of it."""

    def __init__(self, model: nn.Module, opt: torch.optim.Optimizer, folder: Path, device: str) -> None:
        self._model, self._opt, self._folder, self._device = model, opt, folder, device
        self.run = lockstep.Run(model, opt, checkpoint=folder / "lockstep", every="1000h", keep=1)
        assert self.run._checkpoints is not None
        self._checkpoints = self.run._checkpoints
        held = [*model.parameters(), *(v for s in opt.state.values() for v in s.values() if v.numel() > 1)]
        self.bytes = sum(tensor.nbytes for tensor in held)
        self._from = [tensor.detach() for tensor in held]
        pin = device == "cuda"
        self._to = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).zero_() for tensor in held]
        self.parts = PartsOfStall()
        self.parts.watch(self._checkpoints._run_state, "capture", "capture")
        self.parts.watch(in_flight, "lay_out_state", "layout")
        self.parts.watch(in_flight, "_agree_on_folder", "agreement on the folder")
        self.parts.watch(self._checkpoints._snapshot, "copy", "copy, as long as the host waits")
        self.parts.watch(self._checkpoints, "begin", "all of begin")
        self._loss = torch.zeros((), device=device)
        self._number = 0
        self._future: Any = None

    def ways(self) -> dict[str, Callable[[], float]]:
        return {"memcpy": self.memcpy, "Lockstep": self.ours, "torch.save": self.torch_save, "async_save": self.async_save}

    def memcpy(self) -> float:
        return timed(lambda: torch._foreach_copy_(self._to, self._from, non_blocking=True), self._device)  # on the same stream

    def ours(self) -> float:
        self._number += 1
        took_s = timed(lambda: self._checkpoints.begin(self._number), self._device)
        began = time.perf_counter()
        self._loss.item()
        self.parts.spent_s.setdefault("a loss.item() right after the stall", []).append(time.perf_counter() - began)
        self._checkpoints.wait_until_idle()
        return took_s

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "opt": self._opt.state_dict()}

    def torch_save(self) -> float:
        return timed(lambda: torch.save(self._state(), self._folder / "state.pt"), self._device)

    def async_save(self) -> float:
        place = self._folder / f"dcp-{self._number}"
        self._number += 1

        def save() -> None:
            self._future = dcp.async_save(self._state(), checkpoint_id=place)

        took_s = timed(save, self._device)
        getattr(self._future, "upload_completion", self._future).result()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        return took_s


def loads(model: nn.Module, opt: torch.optim.Optimizer, folder: Path, device: str) -> dict[str, float]:
    """Seconds: to read the bytes, and to resume."""
    (place,) = list((folder / "lockstep").iterdir())
    files = list(place.iterdir())

    def read() -> None:
        kept = [path.read_bytes() for path in files]
        assert kept

    took = {"reading the bytes": timed(read, device)}
    warm = bytearray(max(path.stat().st_size for path in files))

    def read_warm() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(warm):
                    pass

    took["reading them into touched memory"] = timed(read_warm, device)
    began = time.perf_counter()
    run = lockstep.Run(model, opt, checkpoint=folder / "lockstep", every="1000h")
    sync(device)
    took["Lockstep: verify, load and resume"] = time.perf_counter() - began
    run.close()

    def load() -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])

    took["torch.load, unverified"] = timed(load, device)
    return took


def two_workers(rank: int, size: int, out: str, megabytes: int, rounds: int) -> None:
    """Each way in turn on both at once; the longer stall of a round counts."""
    os.environ.update(LOCKSTEP_RANK=str(rank), LOCKSTEP_SIZE=str(size), LOCKSTEP_STORE=f"file://{out}/store-of-two")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store-of-dist", rank=rank, world_size=size)
    model, opt = make(megabytes, "cpu")
    stalls = Stalls(model, opt, Path(out, "two"), "cpu")
    ways = {name: way for name, way in stalls.ways().items() if name != "torch.save"}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            longest = torch.tensor([way()])
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            times[name].append(longest.item())
    if rank == 0:
        Path(out, "two-stalls").write_text(json.dumps({name: found[1:] for name, found in times.items()}))
    dist.barrier()
    os._exit(0)


def show(title: str, times: dict[str, list[float]]) -> list[str]:
    base = statistics.median(times["memcpy"])
    lines = [f"| {title} | training stands still, s (quartiles) | x memcpy |", "|---|---|---|"]
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        lines.append(f"| {name} | {middle:.3f} ({low:.3f}-{high:.3f}) | {middle / base:.2f} |")
    return lines


def verification(rank: int, size: int, out: str) -> None:
    """Two workers: a step, and what comparing replicas takes once in a hundred of them."""
    os.environ.update(LOCKSTEP_RANK=str(rank), LOCKSTEP_SIZE=str(size), LOCKSTEP_STORE=f"file://{out}/store")
    from examples.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=256, context=64, layers=6, heads=8, width=256))
    opt = torch.optim.AdamW(model.parameters())
    run = lockstep.Run(model, opt, lanes=size, verify_every=10)
    task = run._loop._between_steps._tasks[0]
    perform, spent, steps = task.perform, [], []

    def timed_perform(now: Any) -> Any:
        began = time.perf_counter()
        result = perform(now)
        spent.append(time.perf_counter() - began)
        return result

    task.perform = timed_perform  # type: ignore[method-assign]
    tokens = torch.randint(0, 256, (512, 65))
    began = time.perf_counter()
    for (batch,) in run.shard(torch.utils.data.TensorDataset(tokens), global_batch=8 * size, epochs=2):
        model(batch).backward()
        opt.step()
        opt.zero_grad()
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
    if rank == 0:
        Path(out, "verify").write_text(f"{statistics.median(spent)} {statistics.median(steps)}")
    run.close()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    device = "cuda" if given.gpu else "cpu"
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        verified, two = "", {}
        if not given.gpu:
            from benchmarks.report import run_workers

            run_workers(verification, 2, place)
            verified = Path(place, "verify").read_text()
            Path(place, "two").mkdir()
            run_workers(two_workers, 2, place, given.megabytes, given.rounds)
            two = json.loads(Path(place, "two-stalls").read_text())
            shutil.rmtree(Path(place, "two"))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{place}/store-alone", rank=0, world_size=1)
        model, opt = make(given.megabytes, device)
        stalls = Stalls(model, opt, Path(place), device)
        ways = stalls.ways()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds + 1):
            for name, way in ways.items():
                took_s = way()
                if number:  # the first of each gets its memory
                    times[name].append(took_s)
        stalls.run.close()
        lines += show(f"{stalls.bytes / 1e9:.2f} GB of state, 1 worker", times)
        if given.gpu:
            lines += ["", *stalls.parts.lines(given.rounds)]
        if two:
            lines += ["", *show(f"{stalls.bytes / 1e9:.2f} GB of state, 2 workers", two)]
        rounds = [loads(model, opt, Path(place), device) for _ in range(given.rounds)]
        loaded = {name: [each[name] for each in rounds] for name in rounds[0]}
        base = statistics.median(loaded["reading the bytes"])
        lines += ["", "| loading | s, median | x reading |", "|---|---|---|"]
        for name, found in loaded.items():
            lines.append(f"| {name} | {statistics.median(found):.3f} | {statistics.median(found) / base:.2f} |")
    if verified:
        once_s, step_s = map(float, verified.split())
        share = once_s / (100 * step_s)
        lines += ["", "| comparing replicas, 5 M GPT, 2 workers | |", "|---|---|"]
        lines += [f"| once | {once_s * 1000:.1f} ms |", f"| a step | {step_s * 1000:.1f} ms |"]
        lines.append(f"| every 100 steps, of training time | {share:.2%} |")
    table = "\n".join(lines)
    print(table)
    suffix = "gpu" if given.gpu else f"{os.cpu_count()}-cores"
    command = (
        f"python -m benchmarks.checkpoint --megabytes {given.megabytes} --rounds {given.rounds}{' --gpu' if given.gpu else ''}"
    )
    data = {
        "machine": machine(given.gpu),
        "stalls_s": times,
        "parts_s": stalls.parts.spent_s,
        "stalls_of_two_s": two,
        "loads_s": loaded,
        "verify": verified,
    }
    write(f"checkpoint-{suffix}", data, table, command)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
