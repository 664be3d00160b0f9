"""The exception tree, sorted by whose fault it is.

LockstepError
  UsageError       you: an argument, a variable, a model that cannot work as given
  PeerError        another worker: it died, stands still, or left
  CorruptionError  the hardware: replicas that must be equal are not
  InvariantError   us: a state that our own code must never reach
"""

from __future__ import annotations

from collections.abc import Iterable


class LockstepError(Exception):
    """Base of everything Lockstep raises on purpose."""


class UsageError(LockstepError, ValueError):
    """Something the caller can mend; the message says what, the evidence, and what to do."""


class PeerError(LockstepError, RuntimeError):
    """Another worker failed. ``ranks`` holds those that are blamed (empty where none could be named).

    ``hung``: a whole timeout passed without a sign of them; otherwise something broke, which is known at once.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), *, hung: bool = False) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.hung = hung

    def copy(self) -> PeerError:
        """Return an equal exception without a traceback, so that the same failure can be raised in several places."""
        return PeerError(str(self), self.ranks, hung=self.hung)


class CorruptionError(LockstepError, RuntimeError):
    """Replicas that must hold the same bits do not, and which of them is right cannot be told."""


class InvariantError(LockstepError, AssertionError):
    """A bug in Lockstep: please report it with the message."""
