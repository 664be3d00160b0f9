"""Trains a generator and a critic in turn, as tutorials write it: two phases in each step of a loop over run.steps.

PHASES_CHECKPOINT: where checkpoints are saved. PHASES_HOLD_AT: from this step on the loop is slow until a file named hurry appears.
PHASES_DIE_IN: worker 1 is killed in this gap of this phase of step 9, once: "control 1". PHASES_STREAM: the dataset is a stream.
It writes pid-<worker>, step, code-<worker> (the code between phases, as it runs) and done-<worker>, the digest of its state.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.lane_jobs import Average
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.comm.plain_state import digest, flatten

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
hold_at = int(os.environ.get("PHASES_HOLD_AT", "60"))
KILLED_IN = 9
place = ""


def die_in(gap: str) -> None:
    is_here = run.step == KILLED_IN and os.environ.get("PHASES_DIE_IN") == f"{gap} {place}"
    if worker == "1" and is_here and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: object, name: str, gap: str) -> None:
    """Die just before this method runs."""
    method = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        die_in(gap)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def note(text: str) -> None:
    with open(f"code-{worker}", "a") as file:
        file.write(f"{run.step} {text}\n")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data.tensors, strict=True))


torch.manual_seed(5)
data = TensorDataset(torch.randn(51, 6))
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 6))
critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))
opt_g, opt_c = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
checkpoint = os.environ.get("PHASES_CHECKPOINT")
models = {"generator": generator, "critic": critic}
run = lockstep.Run(models, opt_g, opt_c, lanes=5, seed=3, checkpoint=checkpoint, every="3 steps", verify_every=2, log_every=4)
average = Average(generator)
run.register("average", average)
before(run._engine._reducer, "_launch_buckets", "bucket")
before(run._engine, "_fold_lane", "end_of_lane")
before(run._engine, "_control_word", "control")
before(run._engine, "confirm", "averaged")
before(run._parts.commit, "commit_phase", "confirmed")
is_stream = bool(os.environ.get("PHASES_STREAM"))
for step in run.steps(Stream() if is_stream else data, global_batch=20, shuffle=not is_stream, epochs=6):
    time.sleep(0.1 if run.step >= hold_at and not Path("hurry").exists() else 0)
    place = "0"
    die_in("before")
    opt_c.zero_grad()
    for (real,) in step:
        F.softplus(-critic(real)).mean().backward()
        die_in("between_backwards")
        fake = generator(torch.randn(len(real), 4)).detach()
        loss_c = F.softplus(critic(fake)).mean()
        loss_c.backward()
        run.log(critic=loss_c)
    die_in("before_step")
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    opt_c.step()
    note("critic")
    place = "1"
    critic.requires_grad_(False)
    features = step.gather(lambda batch: critic(batch[0]).mean())
    for (real,) in step:
        loss_g = F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean() + 0.01 * features[0]
        loss_g.backward()
        run.log(generator=loss_g)
    critic.requires_grad_(True)
    die_in("before_step")
    opt_g.step()
    opt_g.zero_grad()
    note("generator")
    average.update(generator)
    assert step.means["generator"] > 0
    if run.every(5):
        assert run.evaluate(lambda batch: {"n": len(batch[0])}, data, global_batch=20) == {"n": 51}
    run.log(norm=generator[0].weight.norm())
    die_in("end")
    if run.is_main:
        Path("step").write_text(str(run.step))
state = {
    "model": run.model.state_dict(),
    "optimizers": [opt_g.state_dict(), opt_c.state_dict()],
    "average": average.state_dict(),
    "logged": run.logged,
}
Path(f"done-{worker}").write_text(f"{run.step} {digest(*flatten(state, 'state')).hex()}\n")
run.close()
