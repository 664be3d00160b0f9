"""Trains a small model in steps of LAG_STEP_MS (90), in which one worker is slow for a while, as LAG_PLAN says.

LAG_PLAN: a JSON list of [first step, last step, worker, cause, ms, every]: in every such step from the first to the last, this
worker needs so many milliseconds more. Causes: "loader" (the dataset sleeps), "parse" (the dataset computes), "forward" (a module
computes), "body" (the loop computes before opt.step), "wait" (a module sleeps). Others are up to the test.
LAG_STEPS: how many steps. LAG_PARAMETERS: how many parameters the model has (100 000), in thousands.
LAG_LANES: how many lanes; by default one for each worker.
It writes pid-<worker>, and step: the last one that rank 0 has committed.
"""

import json
import os
import time
from pathlib import Path

import torch

import lockstep

worker = int(os.environ.get("LOCKSTEP_WORKER", "0"))
size = int(os.environ.get("LOCKSTEP_SIZE", "1"))
steps = int(os.environ.get("LAG_STEPS", "100"))
step_s = float(os.environ.get("LAG_STEP_MS", "90")) / 1e3
plan = json.loads(os.environ.get("LAG_PLAN", "[]"))
lanes = int(os.environ.get("LAG_LANES", size))
width = int(float(os.environ.get("LAG_PARAMETERS", "100")) * 1000) // 64
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
torch.manual_seed(0)
torch.set_num_threads(1)


def compute(seconds: float) -> None:
    """Use the CPU for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def work(seconds: float) -> None:
    """As a step of a real model: waiting for a device, and a little on the CPU."""
    began = time.monotonic()
    compute(0.03 * seconds)
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def lag(*causes: str) -> float:
    """Seconds by which this worker is late in this step for one of these causes."""
    now = run.step + 1
    mine = [row for row in plan if row[0] <= now <= row[1] and row[2] == worker and row[3] in causes]
    return sum(row[4] for row in mine if (now - row[0]) % row[5] == 0) / 1e3


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return steps * lanes

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.03 * step_s + lag("loader"))
        compute(lag("parse"))
        return torch.full((64,), index / 100), torch.tensor([float(index % 2)])


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        work(0.35 * step_s)
        compute(lag("forward"))
        if seconds := lag("wait"):
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        work(0.5 * step_s)
        return gradient


model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
run = lockstep.Run(model, opt, lanes=lanes, seed=3, bucket_mb=1)
note = os.open("step", os.O_WRONLY | os.O_CREAT, 0o600)
loader = run.shard(Numbers(), global_batch=lanes, epochs=1)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(Work.apply(model(x)), y)
    loss.backward()
    if seconds := lag("body"):
        compute(seconds)
    opt.step()
    opt.zero_grad()
    if worker == 0:
        os.pwrite(note, f"{run.step:8d}\n".encode(), 0)
