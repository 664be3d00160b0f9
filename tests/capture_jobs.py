"""Loops with captured functions, as users write them. Each must have the bits of the same loop without ``run.capture``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.comm.plain_state import digest, flatten
from tests.lane_jobs import Dropping, dataset
from tests.models import CNN, MLP, UnusedBranch

LANES, BATCH, EPOCHS = 4, 16, 3  # 69 samples: five steps an epoch, the last of 5 samples, in lanes of 2, 1, 1 and 1


class Result:
    """What a job returns: the digest of all state, what was logged, and how often the captured functions were replayed."""

    def __init__(self, run: lockstep.Run, objects: tuple[Any, ...], captured: dict[str, Any]) -> None:
        state = {"model": run.model.state_dict(), "logged": run.logged, **{str(k): o.state_dict() for k, o in enumerate(objects)}}
        self.digest = digest(*flatten(state, "state")).hex()
        self.replays = {name: getattr(each, "replays", 0) for name, each in captured.items()}
        self.reasons = {name: list(getattr(each, "reasons", [])) for name, each in captured.items()}
        run.close()

    def __repr__(self) -> str:
        return f"{self.digest[:12]} replays={self.replays} reasons={self.reasons}"


Prepare = Callable[[lockstep.Run], Any]
"""Called with the run before its loop: installs tests/fake_graphs.py on a machine without a GPU."""


def in_shards(
    model: nn.Module,
    opt: Any,
    *others: Any,
    capture: bool,
    prepare: Prepare,
    autocast: bool,
    clip: bool,
    lanes: int,
    scaler: Any = None,
) -> Result:
    """The loop of the README."""
    device = next(model.parameters()).device
    objects = (opt, *others, *([scaler] if scaler else []))
    run = lockstep.Run(model, *objects, lanes=lanes, seed=3, timeout_s=60)
    prepare(run)
    wrap = run.capture if capture else lambda function: function

    @wrap
    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16 if scaler is None else torch.float16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        return loss

    @wrap
    def update() -> None:
        if scaler:
            scaler.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()

    losses = []
    for x, y in run.shard(dataset(), global_batch=BATCH, shuffle=True, epochs=EPOCHS):
        if not capture:
            x, y = x.to(device), y.to(device)
        losses.append(forward_backward(x, y))
        update()
        opt.zero_grad()
        for other in others:
            other.step()
        run.log(loss=losses[-1])
    assert run.step == 5 * EPOCHS
    assert len({loss.item() for loss in losses}) > len(losses) // 2, "losses must not share memory"
    return Result(run, objects, {"forward_backward": forward_backward, "update": update})


def in_steps(model: nn.Module, opt: Any, *others: Any, capture: bool, prepare: Prepare, lanes: int, scaler: Any) -> Result:
    """nanoGPT's loop: a scaler, gradient accumulation, clipping, a learning rate for each step."""
    device = next(model.parameters()).device
    objects = (opt, *others, scaler)
    run = lockstep.Run(model, *objects, lanes=lanes, seed=3, timeout_s=60)
    prepare(run)
    wrap = run.capture if capture else lambda function: function

    @wrap
    def forward_backward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        return loss, logits.argmax(1).eq(y).sum()

    @wrap
    def update() -> Tensor:
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return norm

    for step in run.steps(dataset(64), global_batch=BATCH, shuffle=True, epochs=4):
        for x, y in step:
            if not capture:
                x, y = x.to(device), y.to(device)
            loss, correct = forward_backward(x, y)
            run.log(loss=loss, correct=correct)
        norm = update()
        for other in others:
            other.step()
        run.log(norm=norm)
    assert run.step == 16
    return Result(run, objects, {"forward_backward": forward_backward, "update": update})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module, lr: Any = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def mlp(device: str, **options: Any) -> Result:
    model = MLP().to(device)
    return in_shards(model, sgd(model), autocast=False, clip=True, **options)


def cnn(device: str, **options: Any) -> Result:
    model = CNN().to(device)
    return in_shards(model, sgd(model), autocast=False, clip=False, **options)


def transformer(device: str, **options: Any) -> Result:
    model = Dropping().to(device)
    return in_shards(model, adamw(model), autocast=True, clip=True, **options)


def partly_used(device: str, **options: Any) -> Result:
    model = UnusedBranch().to(device)
    return in_shards(model, adamw(model), autocast=False, clip=False, **options)


def scaled(device: str, **options: Any) -> Result:
    """The scale begins so high that the first steps are skipped."""
    model = MLP().to(device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=3)
    return in_shards(model, adamw(model), autocast=True, clip=True, scaler=scaler, **options)


def accumulated(device: str, **options: Any) -> Result:
    """The learning rate is a tensor, which the scheduler changes in place."""
    model = Dropping().to(device)
    opt = adamw(model, torch.tensor(1e-3, device=device))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=3)
    return in_steps(model, opt, scheduler, scaler=scaler, **options)


JOBS = {job.__name__: job for job in (mlp, cnn, transformer, partly_used, scaled, accumulated)}


def do_nothing(run: lockstep.Run) -> None: ...


def job(rank: int, size: int, name: str, device: str, lanes: int = LANES, prepare: Prepare = do_nothing) -> tuple[Result, Result]:
    """Run a job as it is, and captured. Returns both results."""
    results = []
    for capture in (False, True):
        torch.manual_seed(11)
        results.append(JOBS[name](device, capture=capture, prepare=prepare, lanes=lanes))
    return results[0], results[1]
