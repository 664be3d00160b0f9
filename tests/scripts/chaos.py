"""Trains as people write it, with everything that a fault can disturb: several loops, code between them, an EMA, logged values.

CHAOS_CHECKPOINT: where checkpoints are saved. CHAOS_LOADERS: how many processes load data. CHAOS_SCALER: 1 for a GradScaler that
overflows every few steps. CHAOS_MACHINES: over how many machines the workers pretend to be spread. CHAOS_DIE_IN: worker 1 is
killed in step 6, when it has "logged" or "stepped". The loop is slow until a file named hurry appears: CHAOS_PACE_S is how long
each micro-batch sleeps, and CHAOS_HOLD_AT is a step that waits for the file. raise-<worker>: the worker raises. slow-<worker>:
the worker sleeps once.

It writes pid-<worker>, step (the last one that rank 0 has committed), logged.jsonl (what on_log got), metrics.csv of the tracker,
seen-<worker>.jsonl (run.logged after each step), open-<worker>.jsonl (how many descriptors are open after each loop), and
done-<worker>, a digest of each part of its state.
"""

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.lane_jobs import BATCH, CNN, SAMPLES, Augmented, Average, sgd

import lockstep
from lockstep.comm import open_comm
from lockstep.comm.plain_state import digest, flatten

worker = os.environ.get("LOCKSTEP_WORKER", "0")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
machines = int(os.environ.get("CHAOS_MACHINES", "1"))
if machines > 1:
    open_comm.machine_name = lambda: f"machine {int(worker) % machines}"
checkpoint = os.environ.get("CHAOS_CHECKPOINT")
loaders = int(os.environ.get("CHAOS_LOADERS", "0"))
hold_at = int(os.environ.get("CHAOS_HOLD_AT", "-1"))
pace_s = float(os.environ.get("CHAOS_PACE_S", "0.03"))


def append(name: str, entry: Any) -> None:
    """Write a line at once, as one system call: it is there or not, whenever this process is killed."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(entry).encode() + b"\n")
    os.close(file)


def exact(values: dict[str, float]) -> dict[str, str]:
    return {name: value.hex() for name, value in values.items()}


def obey_files() -> None:
    for file in (Path(f"raise-{worker}"), Path(f"slow-{worker}")):
        if file.exists():
            file.unlink()
            if file.name.startswith("raise"):
                raise RuntimeError("asked to")
            time.sleep(0.4)
    time.sleep(0.001 if Path("hurry").exists() else pace_s)
    while run.step == hold_at and not Path("hurry").exists():
        time.sleep(0.01)


def die_in(place: str) -> None:
    if worker == "1" and os.environ.get("CHAOS_DIE_IN") == place:
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(11)
model = CNN()
opt = sgd(model)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3, enabled=os.environ.get("CHAOS_SCALER") == "1")
run = lockstep.Run(
    *(model, opt, sched, scaler),
    lanes=6,
    seed=3,
    checkpoint=checkpoint,
    every="4 steps",
    verify_every=3,
    log_every=4,
    on_log=lambda step, values: append("logged.jsonl", [step, exact(values)]),
    track=["csv"],
)
ema, is_member = Average(model), False
run.register("ema", ema)


def after_step() -> None:
    """What the loop body does once per step, on every worker."""
    global is_member
    is_member = True  # a newcomer passes loops before
    ema.update(model)
    run.state["updates"] = run.state.get("updates", 0) + 1


def note_step(step: int) -> None:
    append(f"seen-{worker}.jsonl", [step, exact(run.logged)])
    if run.is_main:
        Path("step").write_text(str(step))


def train_in_shards(epochs: int) -> None:
    for x, y in run.shard(Augmented(), global_batch=BATCH, shuffle=True, epochs=epochs, num_workers=loaders):
        obey_files()
        loss = F.cross_entropy(model(x), y)
        run.log(early=loss)
        scaler.scale(loss).backward()
        run.log(loss=loss)
        if run.averaged and run.step == 6:
            die_in("logged")
        scaler.step(opt)
        if run.committed and run.step == 7:
            die_in("stepped")
        scaler.update()
        opt.zero_grad()
        if run.committed:
            after_step()
            note_step(run.step)
        if run.every(7):
            assert run.evaluate(lambda batch: {"n": len(batch[0])}, Augmented(), global_batch=BATCH) == {"n": SAMPLES}


def train_in_phases(epochs: int) -> None:
    """Two phases in each step, and two backwards for each lane of the first."""
    for step in run.steps(Augmented(), global_batch=BATCH, shuffle=True, epochs=epochs, num_workers=loaders):
        for x, y in step:
            obey_files()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.scale(0.1 * model(x).square().mean()).backward()
            run.log(early=loss, loss=loss)
        scaler.step(opt)
        scaler.update()
        sizes = step.gather(lambda batch: len(batch[0]))
        assert sum(sizes) in (BATCH, SAMPLES % BATCH)
        opt.zero_grad()
        for x, _ in step:
            obey_files()
            model(x).square().mean().backward()
        for group in opt.param_groups:
            group["lr"] *= 0.5
        opt.step()
        for group in opt.param_groups:
            group["lr"] *= 2
        opt.zero_grad()
        after_step()
        note_step(run.step + 1)


for stage, epochs in enumerate((1, 1, 2, 1, 1)):
    (train_in_phases if stage in (0, 3) else train_in_shards)(epochs)
    sched.step()
    seen = run.evaluate(lambda batch: {"n": len(batch[0]), "x": batch[0].sum()}, Augmented(), global_batch=BATCH)
    assert seen["n"] == SAMPLES
    if is_member:
        gc.collect()  # what a lost worker has left in a traceback is closed when the traceback is collected
        append(f"open-{worker}.jsonl", [run.step, run.size, len(os.listdir("/proc/self/fd"))])
    if checkpoint and stage != 1:
        run.save()
    if stage == 2:
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
        for group in opt.param_groups:
            group["momentum"] = 0.5
        opt.state.clear()
parts = {
    "model": model.state_dict(),
    "optimizer": opt.state_dict(),
    "scheduler": sched.state_dict(),
    "scaler": scaler.state_dict(),
    "ema": ema.state_dict(),
    "logged": run.logged,
    "state": dict(run.state),
    "evaluated": seen,
}
digests = {name: digest(*flatten(part, name)).hex()[:16] for name, part in parts.items()}
Path(f"done-{worker}").write_text(json.dumps({"step": run.step, **digests}) + "\n")
run.close()
