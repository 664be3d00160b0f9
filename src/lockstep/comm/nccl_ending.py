"""Ending: the end of one NCCL communicator, which other threads wait for until a limit, and never again after that.

Knows nothing of NCCL. The thread that ends the communicator may be blocked for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL_S = 0.02
_underway: set[Ending] = set()


class Ending:
    """A thread that ends the communicator calls ``begin`` before and ``finish`` afterwards. Each thread has its limit."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._limit = 0.0  # of the monotonic clock

    def begin(self, limit_s: float) -> None:
        self._limit = time.monotonic() + limit_s
        _underway.add(self)

    def finish(self) -> None:
        self._ended.set()
        _underway.discard(self)

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def wait(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Block until the communicator has ended, until the limit, or until ``is_interrupted()``."""
        while (left_s := self._limit - time.monotonic()) > 0 and not is_interrupted():
            if self._ended.wait(min(_POLL_S, left_s)):
                return


def await_endings() -> None:
    """Block until all communicators of this process that end have ended: then their memory is free. Each has its own limit."""
    for ending in list(_underway):
        ending.wait()
