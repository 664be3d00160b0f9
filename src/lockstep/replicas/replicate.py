"""replicate() and Replica: hooks one module in place and keeps it identical on every rank.

A Replica connects the autograd hooks, the reducer and the comm of one module. Knows nothing of data, optimizers or how
processes are started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, require_same_model
from lockstep.comm.open_comm import open_comm
from lockstep.errors import PeerError, TorchUsageError, UsageError
from lockstep.gradients.autograd_hooks import AutogradHooks
from lockstep.gradients.comm_hook import Hook
from lockstep.gradients.ddp_reducer import Averaging, DdpReducer
from lockstep.gradients.module import ForwardHook, HookedModule, device_of
from lockstep.gradients.user_hooks import UserHooks, prepare

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of ``replicate``, which must be equal on every rank."""

    bucket_mb: float = 25
    broadcast_buffers: bool = True
    init_sync: bool = True
    ignore: tuple[str, ...] = ()
    timeout_s: float = 600.0
    init_buffers: bool = True
    """Whether ``init_sync`` copies buffers too."""
    reduce_dtype: torch.dtype | None = None
    """Gradients are sent in this dtype (None: in their own)."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} is not a size. Pass a positive number of megabytes, for example 25.")
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
    """Hook ``module`` in place, so that every ``backward()`` leaves gradients averaged over all ranks.

    For training loops of your own. All ranks must call this with modules of the same layout, and then run the same number of
    backwards (or use ``Replica.join``). The ranks are found from the default process group of ``torch.distributed`` if there is
    one, otherwise from the launcher's variables (``World.detect``). A process alone trains as without ``replicate``.

    Args:
        module: The model. It is not wrapped: the names in its ``state_dict`` do not change.
        comm: How the ranks exchange gradients: "shm", "twolevel", "gloo", "nccl", or a ``Comm`` object. By default the value of
            ``LOCKSTEP_COMM``, or else the fastest way that the devices and machines allow.
        bucket_mb: Gradients are sent in buckets of about this many megabytes.
        broadcast_buffers: Whether to copy rank 0's buffers (BatchNorm statistics) to all ranks after each averaged backward.
        init_sync: Whether to copy rank 0's parameters and buffers to all ranks now. If not, they must be equal already.
        ignore: Names of parameters and buffers that are neither averaged nor copied.
        timeout_s: How long to wait for another rank before a ``PeerError`` names it.

    Returns:
        ``module`` itself.

    Raises:
        UsageError: If the module or an option cannot be used, or differs between ranks (then on every rank).
        PeerError: If another rank does not call this within ``timeout_s``.

    Example:
        Started by ``lockstep run -n 4 train.py`` or ``torchrun``::

            model = lockstep.replicate(Net())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader:                        # a part of the data of its own on each rank
                F.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
    """
    Replica(module, ReplicaOptions(bucket_mb, broadcast_buffers, init_sync, tuple(sorted(ignore)), timeout_s), comm)
    return module


def replica_of(module: nn.Module) -> Replica:
    """Return the Replica of a module that ``replicate`` has hooked. May be called on any rank.

    Args:
        module: What was passed to ``replicate``.

    Returns:
        The Replica, with ``no_sync()``, ``join()``, ``register_comm_hook()`` and ``close()``.

    Raises:
        UsageError: If the module is not replicated (a copy of a replicated module is not).

    Example:
        Gradient accumulation over two batches::

            with lockstep.replica_of(model).no_sync():
                loss(model, first).backward()
            loss(model, second).backward()
    """
    replica = find_replica(module)
    if replica is None:
        raise UsageError(f"this {type(module).__name__} is not replicated. Call lockstep.replicate(module) first.")
    return replica


class Replica:
    """One rank's copy of a model, hooked in place. Made by ``replicate``, and returned by ``replica_of``."""

    def __init__(self, module: nn.Module, options: ReplicaOptions, comm: Comm | str | None = None, group: Any = None) -> None:
        """All ranks must call this. ``group``: the torch process group whose members are the ranks (None: the default group)."""
        if not isinstance(module, nn.Module):
            raise UsageError(f"replicate() takes a torch.nn.Module, not {type(module).__name__}.")
        if find_replica(module) is not None:
            raise UsageError("this module is replicated already; its gradients would be averaged twice. Call replicate() once.")
        self._model = HookedModule(module, options.ignore)
        params, self._buffers = self._model.params, self._model.buffers
        self.broadcasts_buffers = options.broadcast_buffers
        """Whether rank 0's buffers are copied to all ranks after each averaged backward. May be set; equal on all ranks."""
        self._owns_comm = comm is None or isinstance(comm, str)
        if comm is None or isinstance(comm, str):
            need_bytes = sum(p.nbytes for p in params if p.requires_grad)
            comm = open_comm(device_of(params), group=group, timeout_s=options.timeout_s, kind=comm, need_bytes=need_bytes)
        self.comm: Comm = comm
        require_same_model(self.comm, self._model.named, self._buffers.named(), asdict(options))
        if options.init_sync:
            self._copy_from(0, "the initial parameters", with_buffers=options.init_buffers)
        self.reducer = DdpReducer(
            params, self._model.names, self.comm, int(options.bucket_mb * (1 << 20)), self._model.sparse, options.reduce_dtype
        )
        prepare(params)
        self._hooks = AutogradHooks(params, self._begin_backward, self.reducer.ready, self._end_backward)
        self._user_hooks = UserHooks(params, self._hooks.keys)
        self._join: _Join | None = None
        self.is_wrapped = False
        """Whether a DistributedDataParallel has made this Replica."""
        self.replaced = False
        """Whether a later DistributedDataParallel has hooked the module in place of this Replica."""
        self._model.hook(self)

    @property
    def syncs(self) -> bool:
        """Whether the next ``backward()`` averages gradients. False inside ``no_sync()``. May be set; equal on all ranks."""
        return self._hooks.enabled

    @syncs.setter
    def syncs(self, value: bool) -> None:
        self._hooks.enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them: for gradient accumulation.

        A ``backward()`` inside the block adds to ``param.grad`` and sends nothing. The next ``backward()`` outside averages the
        accumulated sum. Unlike in torch, it does not matter whether ``forward`` ran inside the block. All ranks must use it for
        the same backwards.
        """
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    @contextmanager
    def join(self, divide_by_initial_size: bool = True, enable: bool = True, raise_early: bool = False) -> Iterator[None]:
        """Train with a different number of batches on each rank. All ranks must enter the block.

        A rank that reaches the end of the block continues to take part in the averages of the others, with zeros, until all ranks
        have reached the end. Then all ranks receive the parameters and buffers of a rank that trained longest.

        Args:
            divide_by_initial_size: Whether gradients are divided by the number of all ranks, or only of those that have data.
            enable: If False, the block does nothing.
            raise_early: Whether to stop all ranks as soon as one has no more data.

        Raises:
            PeerError: With ``raise_early``, on every rank at its first backward after a rank ran out of data.

        Example:
            A loop over a loader that is longer on some ranks::

                with lockstep.replica_of(model).join():
                    for x, y in loader:
                        loss(model(x), y).backward()
                        opt.step()
                        opt.zero_grad()
        """
        if not enable:
            yield
            return
        self._join = _Join(divide_by_initial_size, raise_early)
        try:
            yield
            self._follow_active_ranks(self._join)
        finally:
            self._join = None

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Replace the all-reduce of each bucket by a communication hook of torch's DDP. All ranks must call it, once.

        Args:
            state: Passed to the hook as its first argument.
            hook: ``hook(state, bucket)`` returns a ``torch.futures.Future`` of the averaged bucket. The hook divides by the number
                of ranks itself. ``bucket`` has the methods of ``torch.distributed.GradBucket``.

        Raises:
            UsageError: If ``hook`` is not callable, or a hook is registered already.
        """
        if not callable(hook):
            raise TorchUsageError(f"a communication hook must be callable, not {type(hook).__name__}.")
        self.reducer.set_hook(hook, state)

    def watch_outputs(self, outputs: Any) -> None:
        """Called by the module's forward hook with what ``forward`` returned."""
        self._user_hooks.collect()
        if self.syncs:
            self._hooks.watch_outputs(outputs)

    def enter_backward(self) -> None:
        """Called inside a backward that has reached an output of the module, if the Replica is younger than the forward."""
        self._hooks.enter_backward()

    def close(self) -> None:
        """Remove all hooks from the module, which trains alone from then on, and close the connections. May be called twice."""
        self._user_hooks.restore()
        self._hooks.remove()
        self._model.unhook()
        if self._owns_comm:
            self.comm.close()

    # -- one backward ------------------------------------------------------------------------

    def _begin_backward(self) -> bytes:
        late = self._user_hooks.collect()
        if late:  # autograd is about to call the hook of the parameter that it is at
            raise TorchUsageError(
                f"a post-accumulate-grad hook was registered on {self._model.names[late[0]]} after forward, so it would see a "
                "gradient that is not averaged. Register hooks before forward; if the model is compiled, before replicate(...) or "
                "DistributedDataParallel(...)."
            )
        everyone = Averaging(self.comm.size)
        return self.reducer.begin(everyone if self._join is None else self._gather_active_ranks(self._join, is_active=True))

    def _end_backward(self) -> None:
        self._complete_backward(0 if self._join is None else self._join.source)
        self._user_hooks.run()

    def _complete_backward(self, source: int) -> None:
        """Send what is left and wait for the averages. ``source`` is the rank whose buffers go to all ranks."""
        self.reducer.end()
        broadcast = self._buffers.start_broadcast(self.comm, source, self.reducer.step) if self.broadcasts_buffers else None
        self.reducer.finish()
        if broadcast is not None:
            self._buffers.finish_broadcast(broadcast)

    def _copy_from(self, source: int, what: str, with_buffers: bool = True) -> None:
        buffers = self._buffers.tensors() if with_buffers else []
        broadcast_in_place(self.comm, [*(p for _, p in self._model.named), *buffers], source, what)

    # -- join --------------------------------------------------------------------------------

    def _gather_active_ranks(self, join: _Join, is_active: bool) -> Averaging:
        """Find out which ranks still have data: one small message before the first bucket, sent only inside ``join``."""
        ranks = torch.zeros(self.comm.size, 2, dtype=torch.int64)
        mine = [int(is_active), int(is_active and self.reducer.has_unfrozen())]
        self.comm.all_gather(ranks, torch.tensor(mine), f"which ranks have data for step {self.reducer.step}").wait()
        join.active = [r for r in range(self.comm.size) if ranks[r, 0]]
        join.source = join.active[0] if join.active else join.source
        if join.raise_early and len(join.active) < self.comm.size:
            ended = [r for r in range(self.comm.size) if r not in join.active]
            raise PeerError(
                f"rank {', '.join(map(str, ended))} ran out of data at step {self.reducer.step}, and raise_early (or "
                "throw_on_early_termination) stops all ranks then. Leave it out to continue with the ranks that have data.",
                ended,
            )
        divisor = self.comm.size if join.divide_by_initial_size else max(1, len(join.active))
        return Averaging(divisor, is_active, join.source, unfrozen=bool(ranks[:, 1].any()))

    def _follow_active_ranks(self, join: _Join) -> None:
        """Take part in every backward of the ranks that have data, then copy the state of the rank that trained longest."""
        last_source = self.comm.rank
        while True:
            averaging = self._gather_active_ranks(join, is_active=False)
            if not join.active:
                break
            last_source = join.source
            self.reducer.begin(averaging)
            self._complete_backward(join.source)
        # Only the ranks that ran out last have followed no other rank, so only they vote. They took the same steps: the first of
        # them is as good as any.
        votes = torch.zeros(self.comm.size, 1, dtype=torch.int64)
        steps = self.reducer.step if last_source == self.comm.rank else -1
        self.comm.all_gather(votes, torch.tensor([steps]), "the end of join").wait()
        self._copy_from(int(votes.argmax()), "the final parameters")


@dataclass
class _Join:
    """What is known inside a ``join`` block."""

    divide_by_initial_size: bool
    raise_early: bool
    active: list[int] = field(default_factory=list)
    """The ranks that had data at the last backward."""
    source: int = 0
    """The first of the active ranks: its buffers and bucket order count."""


def find_replica(module: nn.Module) -> Replica | None:
    """Return the Replica of ``module``, or None if the module is not replicated."""
    for hook in module._forward_hooks.values():
        if isinstance(hook, ForwardHook) and isinstance(hook.owner, Replica):
            return hook.owner
    return None
