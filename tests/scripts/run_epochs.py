"""Trains with run.epochs, run.state and run.epoch_means: two loops, an evaluation and plain code in each epoch, and early stopping.

EPOCHS_CHECKPOINT: where checkpoints are saved. EPOCHS_HOLD_AT: from this step on the loop is slow until a file named hurry appears.
EPOCHS_DIE_IN: worker EPOCHS_VICTIM (1) is killed at this place, once. EPOCHS_STALL_UNTIL: at step 15 all wait until a replacement
has begun, and the replacement waits in its first epoch until this step is committed. It writes pid-<worker>, step, done-<worker>,
the digest of its state, and ran-<worker>: the epochs whose code this worker has run.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.lane_jobs import BATCH, CNN, SAMPLES, Augmented, sgd

import lockstep
from lockstep.comm.plain_state import digest, flatten

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
hold_at = int(os.environ.get("EPOCHS_HOLD_AT", "60"))


def die_in(place: str) -> None:
    if worker == os.environ.get("EPOCHS_VICTIM", "1") and os.environ.get("EPOCHS_DIE_IN") == place and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    until = int(os.environ.get("EPOCHS_STALL_UNTIL", "0"))
    while int(worker) > 2 and int(Path("step").read_text() or 0) < until:
        time.sleep(0.01)
    while until and run.step == 15 and not Path("ran-3").exists():
        time.sleep(0.01)


def train(samples: torch.utils.data.Dataset, epochs: int = 1) -> None:
    for x, y in run.shard(samples, global_batch=BATCH, shuffle=True, epochs=epochs):
        stall()
        time.sleep(0.1 if run.step >= hold_at and not Path("hurry").exists() else 0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.log(loss=loss)
        opt.step()
        opt.zero_grad()
        if run.committed:
            run.state["steps"] = run.state.get("steps", 0) + 1
            run.log(lr=opt.param_groups[0]["lr"])
        if run.committed and run.step in (14, 17):
            die_in("first loop" if run.step == 14 else "second loop")
        if run.committed and run.is_main:
            Path("step").write_text(str(run.step))


torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
run = lockstep.Run(
    model, opt, sched, lanes=6, seed=3, checkpoint=os.environ.get("EPOCHS_CHECKPOINT"), every="4 steps", verify_every=3
)
run.state.setdefault("history", torch.zeros(0))
first = run.broadcast([worker, 1.5], source=0)[1]
for epoch in run.epochs(50):
    assert run.epoch == epoch
    with Path(f"ran-{worker}").open("a") as file:
        file.write(f"{epoch}\n")
    stall()
    train(Augmented())
    sched.step()
    if epoch == 2:
        die_in("between")
    seen = run.evaluate(lambda batch: {"n": len(batch[0])}, Augmented(), global_batch=BATCH)["n"]
    if epoch == 2:
        die_in("evaluated")
    assert seen == SAMPLES
    run.state["history"] = torch.cat([run.state["history"], torch.tensor([run.epoch_means["loss"], run.epoch_means["lr"]])])
    if epoch % 2 == 0:
        train(torch.utils.data.Subset(Augmented(), range(BATCH)))
        run.state["bad"] = run.state.get("bad", 0) + run.mean(1)
    if os.environ.get("EPOCHS_CHECKPOINT"):
        run.save()
    if epoch == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
        opt.state.clear()
    noise = torch.rand(1)
    if run.state["bad"] >= 3:
        break
run.state["left_at"] = run.state["steps"]
die_in("left")
assert set(run.gather(worker)) <= {str(number) for number in range(9)}
train(Augmented(), epochs=2)
state = {
    "model": model.state_dict(),
    "opt": opt.state_dict(),
    "sched": sched.state_dict(),
    "state": dict(run.state),
    "logged": run.logged,
    "means": run.epoch_means,
    "first": first,
}
Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}\n")
run.close()
