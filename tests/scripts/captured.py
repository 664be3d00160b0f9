"""Trains a CNN with dropout in captured functions for 60 steps, with the recorder of tests/fake_graphs.py, or on a GPU.

CAPTURED_DEVICE: "cuda" uses the GPU of the local rank, and NCCL from the first step if LOCKSTEP_COMM is nccl.
CAPTURED: "" runs the functions as they are. CAPTURED_HOLD_AT: from this step on the loop is slow until a file named hurry appears.
CAPTURED_DIE_IN: worker 1 is killed in this gap of step 25. It writes pid-<worker>, step, replays-<worker> and done-<worker>.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.fake_graphs import FakeRecording, capture_on_host
from tests.lane_jobs import BATCH, CNN, LANES, Augmented, sgd
from torch import nn

import lockstep
from lockstep.comm import open_comm
from lockstep.comm.plain_state import digest, flatten
from lockstep.gradients.cuda_graph import CudaGraph

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
hold_at = int(os.environ.get("CAPTURED_HOLD_AT", "60"))


def before(owner: object, name: str, gap: str) -> None:
    """Die just before this method runs."""
    method = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        if worker == "1" and run.step == 25 and os.environ.get("CAPTURED_DIE_IN") == gap and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


device = torch.device("cpu")
if os.environ.get("CAPTURED_DEVICE") == "cuda":
    device = lockstep.World.detect().device()
    torch.cuda.set_device(device)
    if os.environ.get("LOCKSTEP_COMM") == "nccl":
        open_comm._GLOO_MEANWHILE_BYTES = 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(11)
model = nn.Sequential(CNN(), nn.Dropout(0.1)).to(device)
opt = sgd(model)
sched = torch.optim.lr_scheduler.StepLR(opt, 12)
run = lockstep.Run(model, opt, sched, lanes=LANES, seed=3, verify_every=5)
if not os.environ.get("CAPTURED"):
    run._parts.captures.recorder = None
elif device.type == "cpu":
    capture_on_host(run)
before(FakeRecording if device.type == "cpu" else CudaGraph, "replay", "replay")
before(run._engine._reducer, "_launch_buckets", "bucket")
before(run._engine, "_control_word", "control")
before(run._engine, "confirm", "averaged")
before(run._parts.commit, "commit_phase", "stepped")


@run.capture
def forward_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@run.capture
def update() -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True, epochs=12):
    time.sleep(0.05 if run.step >= hold_at and not Path("hurry").exists() else 0)
    loss = forward_backward(x, y)
    run.log(loss=loss)
    update()
    sched.step()
    opt.zero_grad()
    if run.committed and run.is_main:
        Path("step").write_text(str(run.step))
state = {"model": model.state_dict(), "opt": opt.state_dict(), "logged": run.logged}
Path(f"replays-{worker}").write_text(f"{forward_backward.replays} {update.replays}\n")
Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}\n")
run.close()
