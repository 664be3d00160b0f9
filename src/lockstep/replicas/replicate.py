"""Replica: one worker's model, hooked in place, kept identical to everybody else's.

Wires hooks, reducer and comm together for one module. Knows nothing of data, optimizers or
process launch. ``replicate`` is the public door; ``replica_of`` gives the handle back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, require_same_model
from lockstep.comm.open_comm import open_comm
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.autograd_hooks import AutogradHooks
from lockstep.gradients.comm_hook import Hook
from lockstep.gradients.ddp_reducer import Averaging, DdpReducer
from lockstep.gradients.module import ForwardHook, HookedModule, device_of

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Settings:
    """What a user may choose of a replica; see ``replicate``."""

    bucket_mb: float = 25
    broadcast_buffers: bool = True
    init_sync: bool = True
    ignore: tuple[str, ...] = ()
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} is not a size. Pass a positive number of megabytes, 25 say.")
        if not self.timeout_s > 0:
            raise UsageError(f"timeout_s={self.timeout_s} is not a time. Pass a positive number of seconds.")


def replicate(
    module: M,
    *,
    comm: Comm | str | None = None,
    bucket_mb: float = 25,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    ignore: Iterable[str] = (),
    timeout_s: float = 600.0,
) -> M:
    """Hook ``module`` in place, so that every backward leaves averaged gradients; return it.

    All ranks must call this, with modules of the same layout: it verifies that, then copies rank
    0's parameters and buffers to all (unless ``init_sync=False``). Without a ``comm`` it finds the
    world by itself (``World.detect``), and a lone process trains as before.

    ``comm``: "shm", "twolevel", "gloo", "nccl" or a Comm of your own instead of the one that fits.
    ``bucket_mb``: gradients travel in messages of about this size. ``broadcast_buffers``: after
    every synced backward rank 0's buffers (BatchNorm statistics) go to all. ``ignore``: names of
    parameters and buffers to leave alone. ``timeout_s``: how long to wait for another rank before
    a ``PeerError`` names it.
    """
    Replica(module, Settings(bucket_mb, broadcast_buffers, init_sync, tuple(sorted(ignore)), timeout_s), comm)
    return module


def replica_of(module: nn.Module) -> Replica:
    """The handle of a replicated module: ``no_sync()``, ``join()``, ``register_comm_hook()``, ``close()``."""
    replica = _find(module)
    if replica is None:
        raise UsageError(f"this {type(module).__name__} is not replicated. Call lockstep.replicate(module) first.")
    return replica


class Replica:
    """The engine behind one replicated module."""

    def __init__(self, module: nn.Module, settings: Settings, comm: Comm | str | None = None, group: Any = None) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"replicate() takes a torch.nn.Module, not {type(module).__name__}.")
        if _find(module) is not None:
            raise UsageError("this module is replicated already; its gradients would be averaged twice. Call it once.")
        self._model = HookedModule(module, settings.ignore)
        self._everything = [p for _, p in self._model.named]
        self._params, self._buffers = self._model.params, self._model.buffers
        self._syncs_buffers = settings.broadcast_buffers
        self._owns_comm = comm is None or isinstance(comm, str)
        if comm is None or isinstance(comm, str):
            trained = sum(p.nbytes for p in self._params if p.requires_grad)
            comm = open_comm(device_of(self._params), group=group, timeout_s=settings.timeout_s, kind=comm, need_bytes=trained)
        self.comm: Comm = comm
        require_same_model(self.comm, self._model.named, self._buffers.named(), asdict(settings))
        if settings.init_sync:
            broadcast_in_place(self.comm, [*self._everything, *self._buffers.tensors()], 0, "the initial parameters")
        self.reducer = DdpReducer(
            self._params, self._model.names, self.comm, int(settings.bucket_mb * (1 << 20)), self._model.sparse
        )
        self._hooks = AutogradHooks(self._params, self._begin, self.reducer.ready, self._end)
        self._joining: _Joining | None = None
        self._model.hook(self)

    @property
    def syncs(self) -> bool:
        """Whether the next backward averages: False inside ``no_sync``."""
        return self._hooks.enabled

    @syncs.setter
    def syncs(self, value: bool) -> None:
        self._hooks.enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside averages the whole window."""
        before, self._hooks.enabled = self._hooks.enabled, False
        try:
            yield
        finally:
            self._hooks.enabled = before

    @contextmanager
    def join(self, divide_by_initial_size: bool = True, enable: bool = True, raise_early: bool = False) -> Iterator[None]:
        """For loops of unequal length: a rank that leaves the block shadows the others until all have.

        All ranks must enter it. The mean is over all ranks, or with ``divide_by_initial_size=False``
        over those that still have data. With ``raise_early`` every rank gets a ``PeerError`` at the
        first backward after some rank ran out. At the end all hold the state of the rank that
        trained longest.
        """
        if not enable:
            yield
            return
        self._joining = _Joining(divide_by_initial_size, raise_early)
        try:
            yield
            self._shadow(self._joining)
        finally:
            self._joining = None

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Replace the all-reduce of each bucket by ``hook(state, bucket)``, as in torch: it must average too."""
        if not callable(hook):
            raise UsageError(f"a communication hook must be callable, not {type(hook).__name__}.")
        self.reducer.set_hook(hook, state)

    def watch_outputs(self, outputs: Any) -> None:
        """Called with what the module's forward returned."""
        if self._hooks.enabled:
            self._hooks.watch_outputs(outputs)

    def close(self) -> None:
        """Unhook the module; it trains alone from here on. May be called twice."""
        self._hooks.remove()
        self._model.unhook()
        if self._owns_comm:
            self.comm.close()

    # -- one backward ------------------------------------------------------------------------

    def _begin(self) -> bytes:
        return self.reducer.begin(Averaging(self.comm.size) if self._joining is None else self._roll_call(self._joining, True))

    def _end(self) -> None:
        self._complete(0 if self._joining is None else self._joining.source)

    def _complete(self, source: int) -> None:
        self.reducer.end()
        broadcast = self._buffers.start_broadcast(self.comm, source, self.reducer.step) if self._syncs_buffers else None
        self.reducer.finish()
        if broadcast is not None:
            self._buffers.finish_broadcast(broadcast)

    # -- join --------------------------------------------------------------------------------

    def _roll_call(self, joining: _Joining, active: bool) -> Averaging:
        """Who still has data? One small message before the first bucket, inside ``join`` only."""
        here = torch.zeros(self.comm.size, 2, dtype=torch.int64)
        what = f"the roll call of step {self.reducer.step}"
        mine = [int(active), int(active and self.reducer.has_unfrozen())]
        self.comm.all_gather(here, torch.tensor(mine), what).wait()
        ranks = [r for r in range(self.comm.size) if here[r, 0]]
        joining.active, joining.source = ranks, ranks[0] if ranks else joining.source
        if joining.raise_early and len(ranks) < self.comm.size:
            gone = [r for r in range(self.comm.size) if r not in ranks]
            raise PeerError(f"rank {', '.join(map(str, gone))} ran out of data at step {self.reducer.step}.", gone)
        divisor = self.comm.size if joining.divide_by_initial_size else max(1, len(ranks))
        return Averaging(divisor, active, joining.source, unfrozen=bool(here[:, 1].any()))

    def _shadow(self, joining: _Joining) -> None:
        """This rank has run out: take part in every backward of the others, then take the last one's state."""
        last = self.comm.rank
        while True:
            averaging = self._roll_call(joining, active=False)
            if not joining.active:
                break
            last = joining.source
            self.reducer.begin(averaging)
            self._complete(joining.source)
        # Ranks that ran out together with the last active one each name themselves; the least of them is right,
        # since all of them took the same steps.
        votes = torch.zeros(self.comm.size, 2, dtype=torch.int64)
        steps = self.reducer.step if last == self.comm.rank else -1
        self.comm.all_gather(votes, torch.tensor([steps, self.comm.rank]), "the end of join").wait()
        source = int(votes[:, 0].argmax())
        broadcast_in_place(self.comm, [*self._everything, *self._buffers.tensors()], source, "the final parameters")


class _Joining:
    """What is known inside a join block."""

    def __init__(self, divide_by_initial_size: bool, raise_early: bool) -> None:
        self.divide_by_initial_size = divide_by_initial_size
        self.raise_early = raise_early
        self.active: list[int] = []
        self.source = 0


def _find(module: nn.Module) -> Replica | None:
    for hook in module._forward_hooks.values():
        if isinstance(hook, ForwardHook) and isinstance(hook.owner, Replica):
            return hook.owner
    return None
