"""Trains as tutorials write it: a plain range of epochs, and code between the loops that changes the state.

EPOCHS_CHECKPOINT: where checkpoints are saved. EPOCHS_HOLD_AT: from this step on the loop is slow until a file named hurry appears.
EPOCHS_DIE_IN: worker 1 is killed at this place, once. It writes pid-<worker>, step, and done-<worker>, the digest of its state.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.lane_jobs import BATCH, CNN, SAMPLES, Augmented, Average, sgd

import lockstep
from lockstep.comm.plain_state import digest, flatten

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
hold_at = int(os.environ.get("EPOCHS_HOLD_AT", "60"))


def die_in(place: str) -> None:
    if worker == "1" and os.environ.get("EPOCHS_DIE_IN") == place and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
run = lockstep.Run(
    model, opt, sched, lanes=6, seed=3, checkpoint=os.environ.get("EPOCHS_CHECKPOINT"), every="4 steps", verify_every=3
)
ema = Average(model)
run.register("ema", ema)
for epoch in range(6):
    for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True):
        time.sleep(0.1 if run.step >= hold_at and not Path("hurry").exists() else 0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.log(loss=loss)
        opt.step()
        opt.zero_grad()
        if run.committed:
            ema.update(model)
        if run.committed and run.step == 17:
            die_in("loop")
        if run.committed and run.is_main:
            Path("step").write_text(str(run.step))
    sched.step()
    if epoch == 3:
        die_in("between")
    seen = run.evaluate(lambda batch: {"n": len(batch[0])}, Augmented(), global_batch=BATCH)["n"]
    assert seen == SAMPLES
    if epoch == 3:
        die_in("evaluated")
    if os.environ.get("EPOCHS_CHECKPOINT"):
        run.save()
    if epoch == 2:
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
        for group in opt.param_groups:
            group["momentum"] = 0.5
        opt.state.clear()
state = {
    "model": model.state_dict(),
    "opt": opt.state_dict(),
    "sched": sched.state_dict(),
    "ema": ema.state_dict(),
    "logged": run.logged,
}
Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}\n")
run.close()
