"""Trains a small CNN under `lockstep run`; faults are asked for by files in the run folder. argv: the repository."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import torch.nn.functional as F
from tests.lane_jobs import CNN, dataset, sgd

import lockstep
from lockstep.state import digest, flatten

folder, worker = Path(os.environ["LOCKSTEP_RUN_DIR"]), os.environ["LOCKSTEP_WORKER"]
(folder / f"pid-{worker}").write_text(str(os.getpid()))
torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
run = lockstep.Run(model, opt, sched, lanes=8, seed=3)
for x, y in run.shard(dataset(), global_batch=16, shuffle=True, epochs=12):
    time.sleep(0.01)
    if (folder / f"raise-{worker}").exists():
        raise RuntimeError("asked to")
    if (folder / f"slow-{worker}").exists():
        (folder / f"slow-{worker}").unlink()
        time.sleep(0.4)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    run.log(loss=loss)
    opt.step()
    sched.step()
    opt.zero_grad()
    if run.every(20):
        run.evaluate(lambda b: {"n": len(b[0])}, dataset(), global_batch=16)
state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
(folder / f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}")
run.close()
