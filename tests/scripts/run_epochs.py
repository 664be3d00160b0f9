"""Trains with run.epochs, run.state and run.epoch_means: two loops, an evaluation and plain code in each epoch, and early stopping.

What a test may do to it, and what it writes: tests/epochs_training.py. EPOCHS_STALL_UNTIL: at step 15 all wait until a replacement
has begun, and the replacement waits in its first epoch until this step is committed. It also writes ran-<worker>: the epochs whose
code this worker has run.
"""

import os
import time
from pathlib import Path

import torch
from tests.epochs_training import count_samples, die_in, disturb, note_end, note_step, opt, run, save, sched, train_batch, worker
from tests.lane_jobs import BATCH, Augmented


def stall() -> None:
    until = int(os.environ.get("EPOCHS_STALL_UNTIL", "0"))
    while until and int(worker) > 2 and int(Path("step").read_text() or 0) < until:
        time.sleep(0.01)
    while until and run.step == 15 and not Path("ran-3").exists():
        time.sleep(0.01)


def train(samples: torch.utils.data.Dataset, epochs: int = 1) -> None:
    for x, y in run.shard(samples, global_batch=BATCH, shuffle=True, epochs=epochs):
        stall()
        train_batch(x, y)
        if run.committed:
            run.state["steps"] = run.state.get("steps", 0) + 1
            run.log(lr=opt.param_groups[0]["lr"])
        if run.committed and run.step in (14, 17):
            die_in("first loop" if run.step == 14 else "second loop")
        note_step()


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
    count_samples()
    if epoch == 2:
        die_in("evaluated")
    run.state["history"] = torch.cat([run.state["history"], torch.tensor([run.epoch_means["loss"], run.epoch_means["lr"]])])
    if epoch % 2 == 0:
        train(torch.utils.data.Subset(Augmented(), range(BATCH)))
        run.state["bad"] = run.state.get("bad", 0) + run.mean(1)
    save()
    if epoch == 1:
        disturb()
    noise = torch.rand(1)
    if run.state["bad"] >= 3:
        break
run.state["left_at"] = run.state["steps"]
die_in("left")
assert set(run.gather(worker)) <= {str(number) for number in range(9)}
train(Augmented(), epochs=2)
note_end(state=dict(run.state), means=run.epoch_means, first=first)
