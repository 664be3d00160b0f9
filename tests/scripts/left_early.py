"""Trains with a CSV tracker and ends before the end of its data, between two exchanges of logged values.

HOW: how it ends, at step 15 of 40: "break", "break and close", "break and with", "break in epochs", "exit", "raise" (in the loop
body), "raise before" (in the next step, before its commit) or "wait" (for a signal).
DIES: where the first rank 0 is killed: "before the break", "before the write" of the last exchange, or "after the write".

It writes pid-<worker>, done-<worker> with the fingerprint, and the lines that on_log gets: on-log.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.observe.tracker_csv import Csv

how, dies, worker = os.environ["HOW"], os.environ.get("DIES", ""), os.environ.get("LOCKSTEP_WORKER", "0")
LAST = 15


def die(place: str) -> None:
    if dies == place and run.is_main and run.generation == first:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingCsv(Csv):
    def flush(self) -> None:
        if run.step == LAST:
            die("before the write")
        super().flush()
        if run.step == LAST:
            die("after the write")


def keep(step: int, values: dict[str, float]) -> None:
    with Path("on-log").open("a") as file:
        file.write(f"{step}\n")


def step_of(x: Any) -> bool:
    """Make a step. Return whether to leave the loop."""
    if how == "raise before" and run.step == LAST:
        raise RuntimeError("before the commit")
    loss = model(x).square().mean()
    run.log(loss=loss)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if run.committed:
        if how != "raise before":
            run.log(learning_rate=0.1 / run.step)
        if run.step == LAST:
            die("before the break")
            if how == "raise":
                raise RuntimeError("after the commit")
            if how == "exit":
                sys.exit()
            if how == "wait":
                Path(f"waits-{worker}").touch()
                while not Path("go").exists():
                    time.sleep(0.01)
    return bool(run.committed and run.step == LAST and how.startswith("break"))


def train() -> None:
    for (x,) in run.shard(data, global_batch=6, shuffle=True):
        if step_of(x):
            break


Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
torch.manual_seed(3)
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(6 * 40, 8))
run = lockstep.Run(model, opt, lanes=6, log_every=10, track=[DyingCsv()], on_log=keep)
first = run.generation
if how == "break and with":
    with run:
        train()
elif how == "break in epochs":
    for _ in run.epochs(3):
        train()
        break
else:
    train()
if how == "break and close":
    run.close()
Path(f"done-{worker}").write_text(f"{run.fingerprint()}\n")
