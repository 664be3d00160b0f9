"""The loops that are compared, as people write them. Each is a generator that trains one step per ``next``.

Some ask for deterministic kernels: ``lockstep.Run`` does so by default, since its result has the same bits on any number of
workers. They are compared with a bare loop and with torch DDP under the same kernels. Bare loops average nothing: they are the
floor. All batches are on the device before the measurement. A ``Run`` gets them through its own loader, the others from a list.

No agent starts the ranks, so a ``Run`` does not recover. Under `lockstep run` the host waits in each step until the averages are in
the memory of the GPU: the variants called "confirmed" do that too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import Dataset

import lockstep
from benchmarks.gpu.models import BATCHES, Batch, Case
from lockstep.errors import PeerError

STEPS_PER_EPOCH = 1000
CAPTURED_AT = 7
"""The number of a step in which captured functions must have been replayed: ``run.capture`` runs some steps eagerly first."""


class Kernels(Enum):
    """Which kernels torch may take."""

    ANY = "any"
    DETERMINISTIC = "deterministic"

    def ask(self) -> None:
        """Set what torch asks of kernels in this process. ``Run`` with ``exact=True`` sets the same as DETERMINISTIC."""
        torch.use_deterministic_algorithms(self is Kernels.DETERMINISTIC)
        torch.backends.cudnn.benchmark = self is Kernels.ANY
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False


@dataclass(frozen=True)
class Site:
    """Where a variant runs."""

    device: torch.device
    rank: int
    size: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.is_cuda else nullcontext()


@dataclass(frozen=True)
class Variant:
    """One loop. ``name`` is unique."""

    name: str
    kernels: Kernels
    loop: Callable[[Case, Site], Iterator[None]]
    is_ours: bool = False
    is_captured: bool = False
    averages: bool = True
    """Whether gradients are averaged over the ranks. A bare loop does not."""
    confirms: bool = False
    """Whether each step waits as a run that recovers does. Without other ranks none does."""

    def why_not(self, site: Site) -> str | None:
        """Why this variant cannot be measured here, or None."""
        if self.is_captured and not self.averages and not site.is_cuda:
            return "CUDA graphs need a GPU"
        if self.is_captured and self.is_ours and not hasattr(lockstep.Run, "capture"):
            return "this Lockstep has no run.capture"
        return None


class ReadyBatches(Dataset[Any]):
    """A dataset whose batches are on the device already: a loader costs what its own work costs."""

    def __init__(self, batches: list[Batch], samples: int) -> None:
        self._batches, self._samples = batches, samples

    def __len__(self) -> int:
        return self._samples * STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self[indices[0]]


def as_it_is(batch: Batch) -> Batch:
    """The collate function of a dataset that has batches already."""
    return batch


def _model(case: Case, site: Site) -> nn.Module:
    torch.manual_seed(0)
    with site.device:  # torch fills 124 million parameters at once on a GPU, but takes seconds on a CPU
        return case.build()


def _batches(case: Case, site: Site) -> list[Batch]:
    torch.manual_seed(1 + site.rank)
    with site.device:
        return [case.batch(case.samples) for _ in range(BATCHES)]


def _wrapping(wrap: Callable[[nn.Module, Site], nn.Module]) -> Callable[[Case, Site], Iterator[None]]:
    """The plain loop, with the model that ``wrap`` returns."""

    def loop(case: Case, site: Site) -> Iterator[None]:
        model = wrap(_model(case, site), site)
        opt = case.optimizer(model, False)
        for batch in itertools.cycle(_batches(case, site)):
            with site.autocast():
                loss = case.loss(model, batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            yield

    return loop


def _device_ids(site: Site) -> list[int] | None:
    return [site.device.index] if site.is_cuda else None


def _torch_ddp(model: nn.Module, site: Site) -> nn.Module:
    return TorchDDP(model, gradient_as_bucket_view=True, device_ids=_device_ids(site))


def _lockstep_ddp(model: nn.Module, site: Site) -> nn.Module:
    return lockstep.DistributedDataParallel(model, gradient_as_bucket_view=True, device_ids=_device_ids(site))


def _captured(case: Case, site: Site) -> Iterator[None]:
    """Forward and backward as one CUDA graph, the optimizer as another, without Lockstep."""
    model = _model(case, site)
    opt = case.optimizer(model, True)
    batches = _batches(case, site)
    inputs = tuple(tensor.clone() for tensor in batches[0])

    def forward_backward() -> Tensor:
        with site.autocast():
            loss = case.loss(model, inputs)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_backward()
            opt.step()
            opt.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    # thread_local: the threads of process groups query events, which must not break the capture
    local, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(local, capture_error_mode="thread_local"):
        _loss = forward_backward()  # kept: its memory belongs to the graph
    with torch.cuda.graph(update, pool=local.pool(), capture_error_mode="thread_local"):
        opt.step()
    for batch in itertools.cycle(batches):
        for mine, given in zip(inputs, batch, strict=True):
            mine.copy_(given)
        local.replay()
        update.replay()
        yield


def _shard(run: Any, case: Case, site: Site) -> Any:
    data = ReadyBatches(_batches(case, site), case.samples * site.size)
    batch = case.samples * site.size
    loop = run.shard(data, global_batch=batch, shuffle=True, epochs=1000, collate_fn=as_it_is, pin_memory=False)
    return closing(iter(loop))


def _confirm_steps(run: Any) -> None:
    """Let each step wait as under `lockstep run`: for the averages in the memory of the GPU, then for all ranks to say so.

    Nobody recovers here. A lost rank ends the benchmark.
    """

    def lost(error: PeerError) -> None:
        raise error

    run._engine._callbacks = replace(run._engine._callbacks, on_peer_lost=lost)


def _run(case: Case, site: Site, *, confirms: bool = False) -> Iterator[None]:
    model = _model(case, site)
    opt = case.optimizer(model, False)
    run = lockstep.Run(model, opt, lanes=site.size)
    if confirms:
        _confirm_steps(run)
    with closing(run), _shard(run, case, site) as batches:
        for batch in batches:
            with site.autocast():
                loss = case.loss(model, batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            yield


def _run_captured(case: Case, site: Site, *, confirms: bool = False) -> Iterator[None]:
    model = _model(case, site)
    opt = case.optimizer(model, False)
    run: Any = lockstep.Run(model, opt, lanes=site.size)
    if confirms:
        _confirm_steps(run)

    @run.capture  # type: ignore[untyped-decorator]
    def forward_backward(*batch: Tensor) -> Tensor:
        with site.autocast():
            loss = case.loss(model, batch)
        loss.backward()
        return loss

    @run.capture  # type: ignore[untyped-decorator]
    def update() -> None:
        opt.step()

    with closing(run), _shard(run, case, site) as batches:
        for step, batch in enumerate(batches):
            forward_backward(*batch)
            update()
            opt.zero_grad()
            if step == CAPTURED_AT and site.is_cuda:
                _require_captured(forward_backward, update)
            yield


def _require_captured(*functions: Any) -> None:
    """A figure of a step that fell back to eager would be called that of a captured one."""
    for function in functions:
        if not function.replays:
            raise RuntimeError(f"{function.__name__} was not captured: {'; '.join(function.reasons) or 'no reason was given'}")


BARE, TORCH = _wrapping(lambda model, site: model), _wrapping(_torch_ddp)
VARIANTS = [
    Variant("bare", Kernels.ANY, BARE, averages=False),
    Variant("bare captured", Kernels.ANY, _captured, is_captured=True, averages=False),
    Variant("torch DDP", Kernels.ANY, TORCH),
    Variant("Lockstep DDP", Kernels.ANY, _wrapping(_lockstep_ddp), is_ours=True),
    Variant("bare, deterministic", Kernels.DETERMINISTIC, BARE, averages=False),
    Variant("bare captured, deterministic", Kernels.DETERMINISTIC, _captured, is_captured=True, averages=False),
    Variant("torch DDP, deterministic", Kernels.DETERMINISTIC, TORCH),
    Variant("Lockstep Run", Kernels.DETERMINISTIC, _run, is_ours=True),
    Variant("Lockstep Run captured", Kernels.DETERMINISTIC, _run_captured, is_ours=True, is_captured=True),
    Variant("Lockstep Run, confirmed", Kernels.DETERMINISTIC, partial(_run, confirms=True), is_ours=True, confirms=True),
    Variant(
        *("Lockstep Run captured, confirmed", Kernels.DETERMINISTIC, partial(_run_captured, confirms=True)),
        *(True, True),
        confirms=True,
    ),
]


def variants_for(size: int) -> list[Variant]:
    """What is measured with so many ranks. A captured step without averages is the floor of one rank only."""
    if size == 1:
        return [variant for variant in VARIANTS if not variant.confirms]
    return [variant for variant in VARIANTS if variant.averages or not variant.is_captured]
