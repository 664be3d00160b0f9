"""The Comm protocol: what carries bytes between the workers of one generation, and Pending.

Owns no transport. Every implementation passes tests/contract. Rules that all of them keep:

- All ranks issue the same operations in the same order; ``what`` says which one in messages.
- Operations return at once with a ``Pending``; the tensor belongs to the comm until its ``wait`` returns.
- A failure of another worker is a ``PeerError`` from ``wait`` (or from the next operation), on every rank.
- ``abort`` may be called from any thread and breaks every pending wait at once. ``close`` may be called twice.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.plan.tree import Fold

Op = Literal["sum", "mean", "max"]


class Pending(Protocol):
    """Work in flight. ``wait`` is called once, by the thread that issued it."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the result is there (on CUDA: until the current stream will see it).

        ``None`` means the comm's own timeout. Raises ``PeerError``.
        """

    def done(self) -> bool: ...


@runtime_checkable
class Comm(Protocol):
    """One generation's transport. ``rank`` and ``size`` never change in its life."""

    name: str
    rank: int
    size: int
    timeout_s: float

    def averages(self, tensor: Tensor) -> bool:
        """Whether ``reduce(tensor, "mean")`` is cheaper than scaling on the way in and ``"sum"``."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed flat tensor that this comm can reduce with the fewest copies."""

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        """All-reduce a contiguous tensor in place."""

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        """All-reduce along one fixed tree (plan/tree.py): bit-equal for every assignment of lanes.

        ``tensor`` is contiguous and flat, ``fold.width`` rows of n elements, best from ``buffer``. This rank's values of
        ``fold.held[rank]`` are its first rows; what lies in the others does not matter. Afterwards row 0 of every rank
        is the root's value times ``scale`` (None: unscaled), and the other rows are undefined. Every addition is
        rounded in the tensor's own dtype. Give the same ``fold`` from step to step: what it needs is prepared once.
        """

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        """Overwrite a contiguous tensor with the source rank's."""

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        """Stack every rank's ``tensor`` into ``output``, whose first dimension is ``size``."""

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every rank has called it."""

    def progress(self) -> None:
        """Let work in flight go on where that needs this thread. Called between gradients; never waits."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def real(tensor: Tensor) -> Tensor:
    """The same memory as numbers every transport can add: complex as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bits(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for operations that only move it: any dtype, bool and float8 included."""
    return tensor.reshape(-1).view(torch.uint8)
