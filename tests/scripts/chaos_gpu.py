"""Trains on the GPU of its local rank, or on the CPU with CHAOS_DEVICE=cpu: two loops, an evaluation between them, logged values.

CHAOS_AWAIT_NCCL=1: gradients wait for the connections of NCCL, as those of a large model do.
CHAOS_PACE_S is how long each micro-batch sleeps until a file named hurry appears. CHAOS_FAULT: what happens in step 6, to worker 1
unless it says another (FAULTS). raise-<worker>: the worker raises. slow-<worker>:
the worker sleeps once.

It writes pid-<worker>, step (the last one that rank 0 has committed), logged.jsonl and seen-<worker>.jsonl (logged values),
memory-<worker>.jsonl (how much memory of the GPU its tensors have after each loop) and done-<worker>, a digest of its state.
"""

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.lane_jobs import BATCH, SAMPLES, Augmented

import lockstep
from lockstep.comm import open_comm, torch_group
from lockstep.comm.plain_state import digest, flatten
from lockstep.comm.torch_group import TorchGroup
from lockstep.world import ask_cublas_to_repeat

worker = os.environ.get("LOCKSTEP_WORKER", "0")
pace_s = float(os.environ.get("CHAOS_PACE_S", "0.01"))
if os.environ.get("CHAOS_AWAIT_NCCL") == "1":
    open_comm._GLOO_MEANWHILE_BYTES = 0
device = torch.device("cpu") if os.environ.get("CHAOS_DEVICE") == "cpu" else lockstep.World.detect().device()
if device.type == "cuda":
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False


def append(name: str, entry: Any) -> None:
    """Write a line at once, as one system call: it is there or not, whenever this process is killed."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(entry).encode() + b"\n")
    os.close(file)


def exact(values: dict[str, float]) -> dict[str, str]:
    return {name: value.hex() for name, value in values.items()}


def obey_files() -> None:
    for file in (Path(f"raise-{worker}"), Path(f"slow-{worker}")):
        if file.exists():
            file.unlink()
            if file.name.startswith("raise"):
                raise RuntimeError("asked to")
            time.sleep(0.4)
    time.sleep(0.001 if Path("hurry").exists() else pace_s)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_back_the_gpu() -> None:
    """Give the GPU something else to do, for about a second: what follows is enqueued, and not done."""
    if device.type == "cuda":
        torch.cuda._sleep(int(2e9))


def die_behind_the_barrier() -> None:
    """What the host has exchanged is complete on all workers, and what the GPU must exchange has not begun here."""
    hold_back_the_gpu()
    TorchGroup.await_device = lambda self: die()  # type: ignore[method-assign]


def die_with_a_fold_pending() -> None:
    hold_back_the_gpu()
    fold = TorchGroup.fold

    def fold_and_die(self: Any, *arguments: Any) -> Any:
        fold(self, *arguments)
        die()

    TorchGroup.fold = fold_and_die  # type: ignore[method-assign]


def break_the_device() -> None:
    """A kernel looks behind the end of a tensor: CUDA reports it at a later call, and at all calls from then on."""
    torch.zeros(4, device=device)[torch.tensor([10], device=device)]
    if device.type == "cpu":
        raise AssertionError("an index is out of range without an IndexError")


FAULTS = {
    "forward": die,
    "fold": die_with_a_fold_pending,
    "barrier": die_behind_the_barrier,
    "assert": break_the_device,
    "assert everywhere": break_the_device,
}
fault = os.environ.get("CHAOS_FAULT", "")
is_faulty = worker == "1" or fault == "assert everywhere"
if fault == "connecting" and is_faulty:  # the others wait in NCCL, or in gloo if there is no GPU
    place = "build_nccl" if device.type == "cuda" else "build_gloo"
    setattr(torch_group, place, lambda *_: die())


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(12, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 4))
    ).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


ask_cublas_to_repeat()
model, opt = build()  # the first use of each kernel takes long, and would look as if this worker hung
F.cross_entropy(model(torch.zeros(4, 12, device=device)), torch.zeros(4, dtype=torch.long, device=device)).backward()
opt.step()
if device.type == "cuda":
    torch.cuda.synchronize()
model, opt = build()
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
run = lockstep.Run(
    *(model, opt),
    lanes=6,
    seed=3,
    verify_every=3,
    log_every=4,
    on_log=lambda step, values: append("logged.jsonl", [step, exact(values)]),
)
is_member = False


def train(epochs: int) -> None:
    global is_member
    for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True, epochs=epochs):
        obey_files()
        if fault in FAULTS and is_faulty and run.step == 6:
            FAULTS[fault]()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        run.log(loss=loss)
        opt.step()
        opt.zero_grad()
        if run.committed:
            is_member = True
            append(f"seen-{worker}.jsonl", [run.step, exact(run.logged)])
            if run.is_main:
                Path("step").write_text(str(run.step))


for epochs in (2, 2):
    train(epochs)
    found = run.evaluate(lambda batch: {"n": len(batch[0]), "x": batch[0].to(device).sum()}, Augmented(), global_batch=BATCH)
    assert found["n"] == SAMPLES
    if is_member and device.type == "cuda":
        gc.collect()
        append(f"memory-{worker}.jsonl", [run.step, run.size, torch.cuda.memory_allocated(device)])
parts = {"model": model.state_dict(), "optimizer": opt.state_dict(), "logged": run.logged, "evaluated": found}
digests = {name: digest(*flatten(part, name)).hex()[:16] for name, part in parts.items()}
Path(f"done-{worker}").write_text(json.dumps({"step": run.step, **digests}) + "\n")
run.close()
