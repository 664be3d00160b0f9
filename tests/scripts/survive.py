"""Trains a small CNN under `lockstep run`; faults are asked for by files in its folder, or by a variable. argv: the repository."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import torch.nn.functional as F
from tests.lane_jobs import CNN, dataset, sgd

import lockstep
from lockstep.comm.plain_state import digest, flatten

folder, worker = Path(os.environ["LOCKSTEP_RUN_DIR"]), os.environ["LOCKSTEP_WORKER"]
(folder / f"pid-{worker}").write_text(str(os.getpid()))
torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
run = lockstep.Run(model, opt, sched, lanes=8, seed=3)


def die_in(gap: str) -> None:
    """Worker 1 is killed here, if that is what this run is about."""
    if worker == "1" and os.environ.get("SURVIVE_DIE_IN") == gap:
        (folder / f"died-in-{gap}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: object, name: str, gap: str) -> None:
    """Die just before this method runs, in step 25."""
    method = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        if run.step == 25:
            die_in(gap)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


before(run._engine._reducer, "_launch_buckets", "bucket")
before(run._engine._reducer, "end", "end_of_backward")
before(run._engine, "_control_word", "control")
for x, y in run.shard(dataset(), global_batch=16, shuffle=True, epochs=12):
    time.sleep(0.01)
    if (folder / f"raise-{worker}").exists():
        raise RuntimeError("asked to")
    if (folder / f"slow-{worker}").exists():
        (folder / f"slow-{worker}").unlink()
        time.sleep(0.4)
    if run.step == 0:
        die_in("first_step")
    loss = F.cross_entropy(model(x), y)
    if run.step == 25:
        die_in("before_backward")
    loss.backward()
    if run.averaged and run.step == 25:
        die_in("averaged")
    if run.averaged and run.step == 59:
        die_in("last_step")
    run.log(loss=loss)
    opt.step()
    if run.committed and run.step == 26:
        die_in("stepped")
    sched.step()
    opt.zero_grad()

    def count(batch: list[torch.Tensor]) -> dict[str, int]:
        die_in("evaluate")
        return {"n": len(batch[0])}

    if run.every(20):
        assert run.evaluate(count, dataset(), global_batch=16) == {"n": 69}
state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
(folder / f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}")
run.close()
