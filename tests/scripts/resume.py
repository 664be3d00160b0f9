"""Trains a small CNN with checkpoints. argv: the repository, the folder. RESUME_*: loaders, every, keep, a flipped bit, a pause."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import torch.nn.functional as F
from tests.lane_jobs import CNN, Augmented, sgd

import lockstep
from lockstep.comm.plain_state import digest, flatten

folder = sys.argv[2]
worker = os.environ.get("LOCKSTEP_WORKER", "0")
notes = Path(os.environ["RESUME_NOTES"])
(notes / f"pid-{worker}").write_text(str(os.getpid()))
pauses = int(os.environ.get("RESUME_PAUSE_AT", "-1"))
flips = int(os.environ.get("RESUME_FLIP_AT", "-1"))
torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
run = lockstep.Run(
    model,
    opt,
    sched,
    lanes=8,
    seed=3,
    checkpoint=folder,
    every=os.environ.get("RESUME_EVERY", "7 steps"),
    keep=int(os.environ.get("RESUME_KEEP", "3")),
    verify_every=5,
)
loaders = int(os.environ.get("RESUME_LOADERS", "0"))
for x, y in run.shard(Augmented(), global_batch=16, shuffle=True, epochs=12, num_workers=loaders):
    time.sleep(0.005)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()
    if run.committed and run.step == flips and worker == "1":
        bits = next(model.parameters()).detach().view(torch.int32).view(-1)
        bits[5] ^= 1 << 11
    if run.committed and run.is_main:
        (notes / "step").write_text(str(run.step))
    while run.committed and run.step == pauses and not (notes / "continue").exists():
        time.sleep(0.01)
state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
(notes / f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}")
run.close()
