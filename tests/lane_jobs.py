"""Training jobs whose result must not depend on who runs them: models, optimizers, data, and the loop. No pytest here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.comm.base import Comm
from lockstep.comm.plain_state import digest, flatten
from tests.models import CNN, MLP, MixedDtypes, UnusedBranch

LANES, BATCH, SAMPLES, EPOCHS = 8, 16, 69, 6  # five steps an epoch, the last of 5 samples: fewer than lanes


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 12, generator=generator), torch.randint(0, 4, (samples,), generator=generator))


class Augmented(Dataset[Any]):
    """Draws from torch and from random for every sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = dataset()[index]
        return x * random.uniform(0.5, 1.5) + 0.1 * torch.randn(12), int(y)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from dataset()


class Dropping(nn.Module):
    """A transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed((x.abs() * 7).long() % 19)).mean(1))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x.abs() * 7).long() % 19).mean(1))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda v: torch.tanh(self.shared(v)), x, use_reentrant=True)
        return self.head(x)


class Average:
    """An exponential moving average of the weights, as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.updates, self.shadow = 0, {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.shadow = state["updates"], {k: v.clone() for k, v in state["shadow"].items()}


def train(
    model: nn.Module,
    *objects: Any,
    data: Any = None,
    loss_of: Callable[..., Tensor] | None = None,
    clip: float | None = None,
    scale: float = 0,
    autocast: torch.dtype | None = None,
    tokens: bool = False,
    comm: Comm | None = None,
    exact: bool = True,
    steps: int = 30,
    workers: int = 0,
    unfreeze_at: int = -1,
    reduce_dtype: torch.dtype | None = None,
) -> str:
    """The loop of the README, with what the scenario adds. Returns the digest of all state."""
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=3) if scale else None
    objects_ = [*objects, *([scaler] if scaler else [])]
    run = lockstep.Run(model, *objects_, lanes=LANES, seed=3, exact=exact, comm=comm, timeout_s=30, reduce_dtype=reduce_dtype)
    optimizers, schedulers = run._parts.gate.optimizers, [o for o in objects if not isinstance(o, torch.optim.Optimizer)]
    data = dataset() if data is None else data
    shuffle = not isinstance(data, IterableDataset)
    seen = 0
    for x, y in run.shard(data, global_batch=BATCH, shuffle=shuffle, epochs=EPOCHS, num_workers=workers):
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(x)
            loss = loss_of(out, x, y) if loss_of else F.cross_entropy(out.float(), y)
        if tokens:
            run.weigh(float(y.sum() + 1))
        (scaler.scale(loss) if scaler else loss).backward()
        run.log(loss=loss)
        for optimizer in optimizers:
            if scaler:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer) if scaler else optimizer.step()
            optimizer.zero_grad()
        if scaler:
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        seen += run.committed
        if run.every(unfreeze_at) if unfreeze_at > 0 else False:
            for param in model.parameters():
                param.requires_grad_(True)
        if run.every("epoch") and run.step == 15:
            run.evaluate(lambda b: {"n": len(b[0])}, data, global_batch=BATCH)
    assert run.step == seen == steps
    everything = {"model": model.state_dict(), "logged": run.logged, **{str(k): o.state_dict() for k, o in enumerate(objects)}}
    if scaler:
        everything["scaler"] = scaler.state_dict()
    result = digest(*flatten(everything, "state")).hex()
    run.close()
    return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


Job = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def job(model: nn.Module, *objects: Any, **options: Any) -> Job:
    """What ``train`` is to be called with."""
    return model, objects, options


def mlp() -> Job:
    model = MLP()
    optimizer = sgd(model)
    return job(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30), clip=0.5)


def cnn() -> Job:
    model = CNN()
    return job(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def transformer() -> Job:
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return job(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7), autocast=torch.bfloat16)


def sparse() -> Job:
    model = Sparse()
    return job(model, torch.optim.SparseAdam(model.embed.parameters()), torch.optim.Adam(model.head.parameters()))


def scaled() -> Job:
    model = MLP()
    return job(model, sgd(model), scale=2.0**20, autocast=torch.float16, clip=0.1)


def augmented() -> Job:
    model = MLP()
    return job(model, sgd(model), data=Augmented())


def augmented_by_loaders() -> Job:
    model = MLP()
    return job(model, sgd(model), data=Augmented(), workers=2)


def streamed() -> Job:
    model = MLP()
    return job(model, sgd(model), data=Stream())


def weighed() -> Job:
    model = CNN()
    return job(model, sgd(model), tokens=True)


def partly_used() -> Job:
    """A branch that only some lanes take, one that none does, and a layer unfrozen in mid-run."""
    model = UnusedBranch()
    model.used.layers[0].requires_grad_(False)
    choose = model.forward
    model.forward = lambda x: choose(x, branch=bool(x[0, 0] > 0))  # type: ignore[method-assign]
    return job(model, sgd(model), unfreeze_at=12)


def mixed() -> Job:
    model = MixedDtypes()
    return job(model, sgd(model))


def halves() -> Job:
    model = MLP().bfloat16()
    return job(model, sgd(model), loss_of=lambda out, x, y: F.cross_entropy(out, y), autocast=torch.bfloat16)


def widened() -> Job:
    """Gradients in bfloat16 are added in float32."""
    model = MLP().bfloat16()
    loss_of = lambda out, x, y: F.cross_entropy(out, y)  # noqa: E731
    return job(model, sgd(model), loss_of=loss_of, autocast=torch.bfloat16, tokens=True, clip=1.0, reduce_dtype=torch.float32)


def widened_sparse() -> Job:
    """Gradients in float16 and bfloat16, sparse and dense, are added in float32."""
    model = Sparse().bfloat16()
    model.head.half()
    model.embed.register_forward_hook(lambda module, args, out: out.half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return job(model, optimizer, reduce_dtype=torch.float32)


def reentrant() -> Job:
    model = Reentrant()
    return job(model, sgd(model), loss_of=lambda out, x, y: F.cross_entropy(out, y))


class Counting(nn.Module):
    """Counts in buffers: integers, floats, and only in batches of more than one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += len(x)
        if len(x) > 1:
            self.seen += x[0, :3].abs()
        return self.body(x)


class Noisy(torch.optim.SGD):
    """Draws in its step."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(1e-3 * torch.randn_like(param))


def noisy(**options: Any) -> Job:
    """Lanes without samples on workers that have no other, weights, counting buffers, random optimizers."""
    model = Counting()
    return job(model, Noisy(model.parameters(), lr=0.05), data=dataset(17), tokens=True, steps=2 * EPOCHS)


SCENARIOS = {
    body.__name__: body
    for body in (
        mlp,
        cnn,
        transformer,
        sparse,
        scaled,
        augmented,
        augmented_by_loaders,
        streamed,
        weighed,
        partly_used,
        mixed,
        noisy,
        halves,
        widened,
        widened_sparse,
        reentrant,
    )
}


def scenario(rank: int, size: int, name: str, device: str = "cpu") -> str:
    torch.manual_seed(11 + rank)  # replicas start as rank 0 has them
    model, objects, options = SCENARIOS[name]()
    model.to(device)
    return train(model, *objects, **options)
