"""How a process group's work is waited for: gloo's blocks the host and is bounded here, CUDA's blocks a stream.

Knows works, the guard and the clock; not what was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.peer_health import PeerHealth

_SLICE_S = 0.5  # a wait looks up this often, so that Ctrl-C gets through
_GLANCE_S = 0.001  # and this often where another operation may need this thread


def slice_of_wait(left_s: float, busy: bool) -> timedelta:
    """How long to block on a work before looking up. ``busy``: other operations are in flight that need this thread."""
    return timedelta(seconds=max(0.001, min(_GLANCE_S if busy else _SLICE_S, left_s)))


class GlooPending:
    """``meanwhile`` lets other operations go on, and says whether some are left."""

    def __init__(
        self, guard: PeerHealth, timeout_s: float, work: Any, count: int, what: str, meanwhile: Callable[[], bool]
    ) -> None:
        self._guard, self._timeout_s, self._work, self._count, self._what = guard, timeout_s, work, count, what
        self._meanwhile = meanwhile

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            waited_s = time.monotonic() - started
            busy = self._meanwhile()
            try:
                self._work.wait(slice_of_wait(limit_s - waited_s, busy))
                return
            except RuntimeError:
                waited_s = time.monotonic() - started
                if self._work.is_completed():
                    error = _error_of(self._work)
                    if error is None:
                        return  # it ended just after its slice did
                    raise self._guard.explain(self._count, self._what, waited_s, first_line(error)) from error
                if waited_s >= limit_s:
                    raise self._guard.explain(self._count, self._what, waited_s) from None

    def done(self) -> bool:
        return bool(self._work.is_completed())


class CudaPending:
    """``work`` has ``wait``, which lets the current stream wait, and ``is_completed``."""

    def __init__(self, guard: PeerHealth, work: Any, count: int, what: str) -> None:
        self._guard, self._work, self.count, self.what = guard, work, count, what
        self._since: float | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """The current stream waits; the host goes on. The watch thread holds the clock."""
        if self._guard.error is not None:
            raise self._guard.again()
        self._work.wait()
        self._since = time.monotonic()

    def waited_s(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since

    def done(self) -> bool:
        return bool(self._work.is_completed())


class Recorded:
    """What a stream has been given up to now, as a work."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._event, self._device = stream.record_event(), device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


def _error_of(work: Any) -> RuntimeError | None:
    """Of a completed work. (``exception()`` has no Python form in some versions of torch.)"""
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return error
    return None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
