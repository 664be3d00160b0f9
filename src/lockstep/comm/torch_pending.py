"""The Pendings of torch works: a gloo work blocks the host, in bounded slices; a CUDA work blocks a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.operation import Driver
from lockstep.comm.peer_health import PeerHealth

_SLICE_S = 0.5  # a wait returns to Python this often, so that Ctrl-C works
_SUCCESS = 0  # of torch's WorkResult
_BUSY_SLICE_S = 0.001  # and this often if another operation may need this thread


def slice_of_wait(left_s: float, busy: bool) -> timedelta:
    """How long to block on a work at once. ``busy``: other operations in flight need this thread."""
    return timedelta(seconds=max(0.001, min(_BUSY_SLICE_S if busy else _SLICE_S, left_s)))


class GlooPending:
    """A gloo work. While it waits, ``driver`` advances the other operations."""

    def __init__(self, driver: Driver, timeout_s: float, work: Any, number: int, what: str) -> None:
        self._driver, self._timeout_s, self._work, self._number, self._what = driver, timeout_s, work, number, what

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            busy = self._driver.advance()
            try:
                self._work.wait(slice_of_wait(self._driver.health.time_left_s(started, limit_s), busy))
                return
            except RuntimeError:
                waited_s = time.monotonic() - started
                if self._work.is_completed():
                    error = _error_of(self._work)
                    if error is None:
                        return  # the work completed just after its slice of the wait
                    raise self._driver.health.explain(self._number, self._what, waited_s, error) from error
                if self._driver.health.time_left_s(started, limit_s) <= 0:
                    raise self._driver.health.explain(self._number, self._what, waited_s) from None
                self._driver.health.compare_calls(self._number, waited_s)

    def done(self) -> bool:
        return bool(self._work.is_completed())


class CudaPending:
    """A work with ``wait``, which makes the current stream wait, and ``is_completed``.

    ``wait`` does not block the host: the thread of ``PeerHealth`` finds a work that never completes. ``explaining(number, what)``
    is a context in which errors become the error of the comm.
    """

    def __init__(
        self, health: PeerHealth, work: Any, explaining: Callable[[int, str], AbstractContextManager[None]], number: int, what: str
    ) -> None:
        self._health, self._work, self._explaining, self.number, self.what = health, work, explaining, number, what
        self._waiting_since: float | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        self._health.raise_if_failed()
        with self._explaining(self.number, self.what):
            self._work.wait()
        self._waiting_since = time.monotonic()

    def waited_s(self) -> float:
        return 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since

    def is_overdue(self, timeout_s: float) -> bool:
        return self._waiting_since is not None and self._health.time_left_s(self._waiting_since, timeout_s) < 0

    def done(self) -> bool:
        """Raises RuntimeError if NCCL or the device has reported an error."""
        return bool(self._work.is_completed())


class IssuedWork:
    """A work of torch's NCCL backend.

    ``calls`` is held by the thread that calls NCCL or aborts it: to ask a work during an abort would block the interpreter.
    ``is_ours``: the group was built for blocking waits (comm/nccl_connect.py), so ``wait`` must not be used.
    """

    def __init__(self, work: Any, calls: threading.RLock, *, is_ours: bool) -> None:
        self._work, self._calls, self._is_ours = work, calls, is_ours

    def wait(self) -> None:
        """Make the current stream wait."""
        if not self._is_ours:
            self._work.wait()
        elif hasattr(self._work, "block_current_stream"):  # torch 2.9: the same as synchronize, which prints that it is deprecated
            self._work.block_current_stream()
        else:
            self._work.synchronize()

    def is_completed(self) -> bool:
        if not self._calls.acquire(blocking=False):
            return False
        try:
            is_completed = bool(self._work.is_completed())  # also if NCCL has reported an error: then nothing is complete
            if is_completed and self.has_failed():
                raise RuntimeError("NCCL reported an error of a connection; see the end of this worker's log")
            return is_completed
        finally:
            self._calls.release()

    def has_failed(self) -> bool:
        """Whether ``is_completed`` has found an error of NCCL."""
        result = self._work.get_future_result()
        return bool(result.done() and result.value() != _SUCCESS)


class StreamWork:
    """All that a CUDA stream has been given until now, in the form of a work."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._event, self._device = stream.record_event(), device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


def _error_of(work: Any) -> RuntimeError | None:
    """The error of a completed work. (Some versions of torch have no ``Work.exception()`` in Python.)"""
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return error
    return None
