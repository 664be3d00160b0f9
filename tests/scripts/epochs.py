"""Trains as tutorials write it: a plain range of epochs, and code between the loops that changes the state.

What a test may do to it, and what it writes: tests/epochs_training.py.
"""

from tests.epochs_training import count_samples, die_in, disturb, model, note_end, note_step, opt, run, save, sched, train_batch
from tests.lane_jobs import BATCH, Augmented, Average

ema = Average(model)
run.register("ema", ema)
for epoch in range(6):
    for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True):
        train_batch(x, y)
        if run.committed:
            ema.update(model)
        if run.committed and run.step == 17:
            die_in("loop")
        note_step()
    sched.step()
    if epoch == 3:
        die_in("between")
    count_samples()
    if epoch == 3:
        die_in("evaluated")
    save()
    if epoch == 2:
        disturb()
        for group in opt.param_groups:
            group["momentum"] = 0.5
note_end(ema=ema.state_dict())
