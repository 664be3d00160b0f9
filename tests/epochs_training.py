"""Imported by the scripts tests/scripts/epochs.py and run_epochs.py: the run that both train, and what a test may do to it.

EPOCHS_CHECKPOINT: where checkpoints are saved. EPOCHS_HOLD_AT: from this step on the loop is slow until a file named hurry appears.
EPOCHS_DIE_IN: worker EPOCHS_VICTIM (1) is killed at this place, once. It writes pid-<worker>, step, and done-<worker>, the digest
of its state.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lockstep
from lockstep.comm.plain_state import digest, flatten
from tests.lane_jobs import BATCH, CNN, SAMPLES, Augmented, sgd

worker = os.environ.get("LOCKSTEP_WORKER", "0")
_HOLD_AT = int(os.environ.get("EPOCHS_HOLD_AT", "60"))
_CHECKPOINT = os.environ.get("EPOCHS_CHECKPOINT")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
run = lockstep.Run(model, opt, sched, lanes=6, seed=3, checkpoint=_CHECKPOINT, every="4 steps", verify_every=3)


def die_in(place: str) -> None:
    """Kill this process here, once, if it is the victim and EPOCHS_DIE_IN names this place."""
    if worker == os.environ.get("EPOCHS_VICTIM", "1") and os.environ.get("EPOCHS_DIE_IN") == place and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train_batch(x: torch.Tensor, y: torch.Tensor) -> None:
    """What the loop body does with each micro-batch."""
    if run.step >= _HOLD_AT and not Path("hurry").exists():
        time.sleep(0.1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    run.log(loss=loss)
    opt.step()
    opt.zero_grad()


def note_step() -> None:
    """Called at the end of each iteration."""
    if run.committed and run.is_main:
        Path("step").write_text(str(run.step))


def count_samples() -> None:
    """Evaluate between two loops."""
    seen = run.evaluate(lambda batch: {"n": len(batch[0])}, Augmented(), global_batch=BATCH)["n"]
    assert seen == SAMPLES


def save() -> None:
    if _CHECKPOINT:
        run.save()


def disturb() -> None:
    """Change the state between two loops, as scripts do."""
    with torch.no_grad():
        next(model.parameters()).mul_(0.9)
    opt.state.clear()


def note_end(**more: Any) -> None:
    """Called at the end of the script, with what it has beside the parts of the run."""
    parts = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "logged": run.logged}
    Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten({**parts, **more}, 'state')).hex()}\n")
    run.close()
