"""The Comm protocol: the operations that carry bytes between the workers of one generation.

Contains no transport. Every implementation passes tests/contract and keeps these rules:

- All ranks issue the same operations in the same order. ``what`` names an operation; it is a noun phrase that completes "rank 2
  never sent ...", for example "bucket 3 of step 41". The same operation has the same ``what`` on every rank.
- If ranks issue different operations, every rank raises the same ``UsageError``, which says what each rank is in. An ``all_gather``
  or a ``barrier`` compares ``what`` and the size before the data is used. Other operations that wait for each other are found
  after about a second.
- An operation returns a ``Pending`` at once. The tensor belongs to the comm until ``Pending.wait`` returns.
- If another worker fails, ``wait`` (or the next operation) raises ``PeerError`` on every rank.
- ``abort`` may be called from any thread and ends every pending wait at once. ``close`` may be called twice.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.plan.tree import Fold

Op = Literal["sum", "mean"]


class Pending(Protocol):
    """An operation in flight. The thread that issued the operation calls ``wait`` once."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the result is in the tensor (on CUDA: make the current stream wait for it).

        Args:
            timeout_s: Longest wait in seconds; ``None`` means the comm's own timeout.

        Raises:
            PeerError: Another worker failed, or did not send its part within the timeout.
        """

    def done(self) -> bool: ...


@runtime_checkable
class Comm(Protocol):
    """The transport of one generation. ``rank`` and ``size`` never change."""

    name: str
    rank: int
    size: int
    timeout_s: float

    def averages(self, tensor: Tensor) -> bool:
        """Whether ``reduce(tensor, "mean")`` is cheaper than scaling the values first and then ``reduce(tensor, "sum")``."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed flat tensor that this comm reduces with the fewest copies. All ranks must call it.

        The tensor may be in one operation at a time.
        """

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        """All-reduce a contiguous tensor in place. The result has the same bits on every rank, whatever the timing."""

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        """All-reduce along one fixed tree (plan/tree.py): the result has the same bits for every assignment of lanes.

        Every addition is rounded in the tensor's own dtype.

        Args:
            tensor: Contiguous and flat, ``fold.width`` rows of n elements, best from ``buffer``. The first rows contain this
                rank's values, one for each node of ``fold.held[rank]``; the contents of the other rows are ignored. When the
                operation is done, row 0 contains the scaled total on every rank, and the other rows are undefined.
            fold: Which rank has which nodes of the tree. Pass the same object in every step: what it needs is prepared once.
            scale: Factor for the total; ``None`` leaves the total unscaled.
            what: Name of the operation in error messages.
        """

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        """Overwrite a contiguous tensor with the tensor of rank ``source``."""

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        """Copy every rank's ``tensor`` into ``output``, which is contiguous and whose first dimension is ``size``."""

    def barrier(self, what: str = "a barrier") -> None:
        """Block until every rank has called it."""

    def await_device(self) -> None:
        """Block until the results of all operations so far are in the memory of the device.

        ``Pending.wait`` on CUDA only makes a stream wait, and an operation that is aborted ends there as if it were complete. A
        worker that is about to tell others that it has a result calls this first. Not collective. Results on the host are there.

        Raises:
            PeerError: The comm has failed, so the results must not be used; or they were not there within the timeout.
        """

    def progress(self) -> None:
        """Advance the operations in flight that need this thread. Called between gradients; never blocks."""

    def abort(self, reason: str) -> None:
        """End every pending wait with a ``PeerError(reason)``. Any thread may call it."""

    def postpone_timeouts(self, until: float) -> None:
        """Let no wait time out before ``until`` (time.monotonic). Then its timeout begins anew. Any thread may call it.

        A later call may lower ``until``. Other failures (a dead rank, ``abort``) end waits as always.
        """

    def link_us(self) -> int:
        """Return how long the data of this worker has been on its way to other machines, in microseconds, since the comm began.

        Added over all connections. Time in which a peer did not read counts for nothing: that is not the link. Any thread may call
        it, also after ``close``. 0 if there are no such sockets, or if the kernel does not tell.
        """

    def close(self) -> None:
        """End the comm. After a failure, wait until the device has ended what the comm had begun there.

        Raises:
            DeviceError: The device of this worker failed too, or does not end it.
        """


def real(tensor: Tensor) -> Tensor:
    """View the tensor as real numbers, which every transport can add; a complex number becomes a pair of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bits(tensor: Tensor) -> Tensor:
    """View the tensor as bytes, for operations that only move memory: works for any dtype, including bool and float8."""
    return tensor.reshape(-1).view(torch.uint8)
