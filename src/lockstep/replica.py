"""Replica: one worker's model, hooked in place, kept identical to everybody else's.

Wires hooks, reducer and comm together for one module. Knows nothing of data, optimizers or
process launch. ``replicate`` is the public door; ``replica_of`` gives the handle back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.base import Comm
from lockstep.comm.choose import open_comm
from lockstep.comm.exchange import Broadcast, broadcast_in_place
from lockstep.errors import PeerError, UsageError
from lockstep.grads.comm_hook import Hook
from lockstep.grads.hooks import GradHooks
from lockstep.grads.reducer import Reducer, Share
from lockstep.same import require_same

M = TypeVar("M", bound=nn.Module)

_claimed: Any = WeakIdKeyDictionary()  # parameters of live replicas


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
        named = _parameters(module, settings.ignore)
        self._everything = [p for _, p in named]
        trainable = [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]
        self._params = [p for _, p in trainable]
        self._buffers = _Buffers(module, settings.ignore)
        self._syncs_buffers = settings.broadcast_buffers
        self._owns_comm = comm is None or isinstance(comm, str)
        if comm is None or isinstance(comm, str):
            trained = sum(p.nbytes for p in self._params if p.requires_grad)
            comm = open_comm(_device(self._params), group=group, timeout_s=settings.timeout_s, kind=comm, need_bytes=trained)
        self.comm: Comm = comm
        require_same(self.comm, named, self._buffers.named(), asdict(settings))
        if settings.init_sync:
            broadcast_in_place(self.comm, [*self._everything, *self._buffers.tensors()], 0, "the initial parameters")
        names = [name for name, _ in trainable]
        self.reducer = Reducer(self._params, names, self.comm, int(settings.bucket_mb * (1 << 20)), _sparse(module, self._params))
        self._hooks = GradHooks(self._params, self._begin, self.reducer.ready, self._end)
        for param in self._everything:
            _claimed[param] = True
        self._joining: _Joining | None = None
        self._mark = module.register_forward_hook(_Mark(self))

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
        self._mark.remove()
        for param in self._everything:
            _claimed.pop(param, None)
        if self._owns_comm:
            self.comm.close()

    # -- one backward ------------------------------------------------------------------------

    def _begin(self) -> bytes:
        self.reducer.begin(Share(self.comm.size) if self._joining is None else self._roll_call(self._joining, True))
        return self.reducer.looks_at

    def _end(self) -> None:
        self._complete(0 if self._joining is None else self._joining.source)

    def _complete(self, source: int) -> None:
        self.reducer.launch_rest()
        broadcast = self._buffers.start(self.comm, source, self.reducer.step) if self._syncs_buffers else None
        self.reducer.finish()
        if broadcast is not None:
            self._buffers.finish(broadcast)

    # -- join --------------------------------------------------------------------------------

    def _roll_call(self, joining: _Joining, active: bool) -> Share:
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
        return Share(divisor, active, joining.source, unfrozen=bool(here[:, 1].any()))

    def _shadow(self, joining: _Joining) -> None:
        """This rank has run out: take part in every backward of the others, then take the last one's state."""
        last = self.comm.rank
        while True:
            share = self._roll_call(joining, active=False)
            if not joining.active:
                break
            last = joining.source
            self.reducer.begin(share)
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


class _Buffers:
    """The module's buffers, rewritten from one rank after every synced backward.

    Torch rewrites them before each forward, which breaks a step with two forwards: the first
    one's saved tensors have changed. At the end of backward those are gone; where a graph is still
    alive (a second backward to come) the buffer is replaced by a new tensor instead, and the graph
    keeps the old.
    """

    def __init__(self, module: nn.Module, ignore: Sequence[str]) -> None:
        homes: dict[int, list[tuple[nn.Module, str]]] = {}
        self._names: list[str] = []
        for prefix, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in ignore:
                    if id(buffer) not in homes:
                        self._names.append(full)
                    homes.setdefault(id(buffer), []).append((owner, name))
        self._homes = list(homes.values())

    def tensors(self) -> list[Tensor]:
        found = (owner._buffers[name] for ((owner, name), *_) in self._homes)
        return [tensor for tensor in found if tensor is not None]

    def named(self) -> list[tuple[str, Tensor]]:
        return list(zip(self._names, self.tensors(), strict=True))

    def start(self, comm: Comm, source: int, step: int) -> Broadcast | None:
        if comm.size == 1 or not self._homes:
            return None
        with torch.no_grad():
            return Broadcast(comm, self.tensors(), source, f"the buffers after step {step}")

    def finish(self, broadcast: Broadcast) -> None:
        with torch.no_grad():
            broadcast.finish(self._write)

    def _write(self, old: Tensor, value: Tensor) -> None:
        if old._use_count() == 1:  # type: ignore[attr-defined]
            old.copy_(value)
            return
        fresh = value.clone()
        for home in self._homes:
            for owner, name in home:
                if owner._buffers[name] is old:
                    owner._buffers[name] = fresh


class _Mark:
    """The forward hook by which a module is known as a replica, and its outputs to autograd.

    It copies and pickles as nothing: a deep copy of the model is not a replica.
    """

    def __init__(self, replica: Replica | None = None) -> None:
        self.replica = replica

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or self.replica is None:
            return
        self.replica.watch_outputs(outputs)

    def __deepcopy__(self, memo: Any) -> _Mark:
        return _Mark()

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def _find(module: nn.Module) -> Replica | None:
    for hook in module._forward_hooks.values():
        if isinstance(hook, _Mark) and hook.replica is not None:
            return hook.replica
    return None


def _parameters(module: nn.Module, ignore: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once (tied ones have several names), in registration order."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(ignore) - known)
    if unknown:
        some = ", ".join(sorted(known)[:8])
        raise UsageError(f"ignore names {unknown[0]!r}, which this module does not have. It has: {some}, ...")
    found = []
    for name, param in module.named_parameters():
        if name in ignore:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name} has no shape yet (a lazy module). Run one batch through it before replicate().")
        if type(param.data) is not Tensor and type(param.data) is not nn.Parameter:
            raise UsageError(f"parameter {name} is a {type(param.data).__name__}; only plain tensors can be replicated.")
        if param in _claimed:
            raise UsageError(
                f"parameter {name} belongs to another replicated module already; it would be averaged twice. "
                "Replicate the one module that contains both."
            )
        found.append((name, param))
    if not any(param.is_floating_point() or param.is_complex() for _, param in found):
        raise UsageError(f"this {type(module).__name__} has no parameters to train. Pass the model itself, not a loss.")
    return found


def _device(params: Sequence[Tensor]) -> torch.device:
    """Where most of the work is: the first CUDA device among the parameters, else the CPU."""
    return next((p.device for p in params if p.is_cuda), params[0].device)


def _sparse(module: nn.Module, params: Sequence[Tensor]) -> frozenset[int]:
    """Numbers of the parameters that will get sparse gradients."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    return frozenset(i for i, p in enumerate(params) if id(p) in weights)
