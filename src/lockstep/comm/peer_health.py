"""What every comm of real processes needs around its transport: one error for all, and who is to blame.

Knows nothing of how bytes travel. The transport calls ``enter`` before each operation, ``explain``
when a wait ran out or broke, and is told through ``on_break`` to end all its waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lockstep.comm.watch import Watch
from lockstep.errors import PeerError, UsageError


class PeerHealth:
    """The health of one comm on one rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, on_break: Callable[[], None]) -> None:
        self.rank = rank
        self.error: PeerError | None = None
        self.closed = False
        self._breaks = [on_break]
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        # its own connection: a store client serves one caller at a time, and the watch must never wait for the worker
        self.watch = Watch(dist.PrefixStore("watch", own), rank, size, self.fail)

    def enter(self, what: str) -> int:
        """Before an operation: its number, or the error that ended this comm."""
        if self.error is not None:
            raise self.again()
        if self.closed:
            raise UsageError(f"rank {self.rank} used its comm for {what} after closing it.")
        return self.watch.launched(what)

    def again(self) -> PeerError:
        """The error that ended this comm, as a new exception."""
        assert self.error is not None
        return self.error.copy()

    def explain(self, count: int, what: str, waited_s: float, cause: str = "") -> PeerError:
        """A wait for operation ``count`` was in vain: find out why, once for all."""
        if self.error is None:
            verdict = self.watch.alarm(count, what, waited_s, cause)
            self.error = self.error or verdict
        return self.again()

    def fail(self, error: PeerError) -> None:
        """End the comm with ``error`` (the first one counts). Any thread."""
        self.error = self.error or error
        self.watch.settle()
        for end_waits in self._breaks:
            end_waits()

    def also_break(self, end_waits: Callable[[], None]) -> None:
        """Another part of this comm whose waits must end with it."""
        self._breaks.append(end_waits)

    def close(self) -> None:
        self.closed = True
        self.watch.close()
        self._breaks = []  # what they hold may go now
