"""Trains a small CNN for 60 steps, and does to itself what TRAIN_* and files in its working directory ask for.

TRAIN_CHECKPOINT, TRAIN_EVERY, TRAIN_KEEP: where and how often checkpoints are saved, and how many of them are kept.
TRAIN_LOADERS: how many processes load data.
TRAIN_PACE_S: every micro-batch sleeps this many seconds.
TRAIN_HOLD_AT: from this step on every micro-batch sleeps TRAIN_HOLD_S (0.1 s) until there is a file named hurry: a test has
time to act.
TRAIN_HALVES: 1 for a model in bfloat16 whose gradients are added in float32.
TRAIN_FLIP_AT: after this step one bit of worker 1's parameters is flipped.
TRAIN_DIE_IN: worker 1 is killed at this point of a step, see die_in. "exchange": while the workers exchange what was logged and
another worker, or the whole run, is about to end; worker 0 notices the death there, and all others behind it.
raise-<worker>: the worker raises. slow-<worker>: the worker sleeps once. hang-<worker>: the worker sleeps for ever.
It writes pid-<worker>, step (the last one that rank 0 has committed), died-in-<point>, and done-<worker>, the digest of its state.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.lane_jobs import BATCH, CNN, LANES, SAMPLES, Augmented, sgd

import lockstep
from lockstep.comm.plain_state import digest, flatten
from lockstep.errors import PeerError
from lockstep.gradients.control_word import CHANGE, STOP

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
pace_s = float(os.environ.get("TRAIN_PACE_S", "0"))
hold_at = int(os.environ.get("TRAIN_HOLD_AT", "60"))
hold_s = float(os.environ.get("TRAIN_HOLD_S", "0.1"))
checkpoint = os.environ.get("TRAIN_CHECKPOINT")
every = os.environ.get("TRAIN_EVERY", "7 steps")
keep = int(os.environ.get("TRAIN_KEEP", "3"))
loaders = int(os.environ.get("TRAIN_LOADERS", "0"))
flip_at = int(os.environ.get("TRAIN_FLIP_AT", "-1"))
torch.manual_seed(11)
dtype = torch.bfloat16 if os.environ.get("TRAIN_HALVES") == "1" else torch.float32
model = CNN().to(dtype)  # channels_last: the state that a newcomer receives must have these strides too
opt = sgd(model)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
run = lockstep.Run(
    *(model, opt, sched),
    lanes=LANES,
    seed=3,
    reduce_dtype=torch.float32 if dtype is torch.bfloat16 else None,
    checkpoint=checkpoint,
    log_every=1 if os.environ.get("TRAIN_DIE_IN") == "exchange" else 10,
    every=every,
    keep=keep,
    verify_every=5,
)


def die_in(gap: str) -> None:
    """Kill this process here if it is worker 1 and TRAIN_DIE_IN names this gap."""
    if worker == "1" and os.environ.get("TRAIN_DIE_IN") == gap:
        Path(f"died-in-{gap}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: object, name: str, gap: str) -> None:
    """Die just before this method runs, in step 25."""
    method = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        if run.step == 25:
            die_in(gap)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def die_in_exchange() -> None:
    exchange = run._loop._between_steps._exchange
    perform = exchange.perform

    def wrapped() -> object:
        found = perform()
        is_ending = any(request & (CHANGE | STOP) for request in run._engine.requests_of_all)
        if worker == "0" and is_ending and not Path("died-in-exchange").exists():
            Path("died-in-exchange").touch()
            os.kill(int(Path("pid-1").read_text()), signal.SIGKILL)
            raise PeerError("worker 1 was lost, as far as worker 0 knows, before the exchange was complete")
        return found

    exchange.perform = wrapped


def count(batch: list[torch.Tensor]) -> dict[str, int]:
    die_in("evaluate")
    return {"n": len(batch[0])}


def obey_files() -> None:
    """Raise, be slow or hang if a file asks for it."""
    if Path(f"raise-{worker}").exists():
        raise RuntimeError("asked to")
    if Path(f"slow-{worker}").exists():
        Path(f"slow-{worker}").unlink()
        time.sleep(0.4)
    while Path(f"hang-{worker}").exists():
        time.sleep(0.05)
    time.sleep(hold_s if run.step >= hold_at and not Path("hurry").exists() else pace_s)


before(run._engine._reducer, "_launch_buckets", "bucket")
before(run._engine._reducer, "end", "end_of_backward")
before(run._engine, "_control_word", "control")
if os.environ.get("TRAIN_DIE_IN") == "exchange":
    die_in_exchange()
for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True, epochs=12, num_workers=loaders):
    obey_files()
    if run.step == 0:
        die_in("first_step")
    loss = F.cross_entropy(model(x.to(dtype)).float(), y)
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
    if run.committed and run.step == flip_at and worker == "1":
        bits = next(model.parameters()).detach().view(torch.int32).view(-1)
        bits[5] ^= 1 << 11
    if run.committed and run.is_main:
        Path("step").write_text(str(run.step))
    if run.every(20):
        assert run.evaluate(count, Augmented(), global_batch=BATCH) == {"n": SAMPLES}
state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}\n")
run.close()
