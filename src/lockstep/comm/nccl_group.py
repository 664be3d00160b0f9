"""NcclGroup: the NCCL communicator of one TorchGroup: built, used, watched and ended without ever blocking a thread for long.

    connecting   a thread builds the communicator (comm/nccl_connect.py); other operations go on meanwhile
    ready        this rank can use it
    ended        it was aborted because the comm failed, or shut down

A call of NCCL may block the host for as long as another rank does not answer, and only an abort from another thread ends it. So a
thread of its own aborts (``_end``), and nobody waits for it without a limit. A thread that builds a communicator with a rank that
is dead cannot be ended at all: it is left alone, and ends what it has built if it ever returns.

A shutdown may block too, if another rank dies just then. So it begins when the device has ended all operations: nothing is left to
wait for another rank. If it takes too long nevertheless, or if the comm fails meanwhile, the communicator is aborted.

Every failure of a call, of a wait or of the device becomes the error of the comm (``PeerHealth.explain``). An operation that was
aborted looks complete on the device; ``await_device`` says how that is told from one that is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.fold_nccl import fold_on_stream
from lockstep.comm.nccl_connect import warm_up
from lockstep.comm.nccl_ending import Ending, await_endings
from lockstep.comm.peer_health import PeerHealth
from lockstep.comm.torch_pending import CudaPending, IssuedWork, StreamWork
from lockstep.errors import PeerError, UsageError
from lockstep.plan.tree import Fold

_log = logging.getLogger("lockstep")
END_S = 10.0
"""How long an abort may take: then the communicator is left alone, with its memory. Also how long ``close`` waits for the device to
complete one more operation."""
SHUTDOWN_S = 3.0
"""How long a shutdown may take. Then the communicator is aborted."""
CONNECT_S = 60.0
"""How long ranks may take to connect while gloo serves them. An operation that needs the connection has its own timeout."""
_CALL_S = 0.2
"""How long an abort waits for a call of NCCL to return by itself. A call that was issued before the failure takes microseconds."""
_KEPT = 32
_fold_streams: dict[torch.device, torch.cuda.Stream] = {}
"""One for all communicators of a device, one after the other: torch keeps free memory for each stream."""


class NcclGroup:
    """A communicator among the ranks of ``health``, for tensors on ``device``.

    Args:
        health: The health of the comm.
        rank, size: This worker's number, and how many workers there are.
        device: The CUDA device of this worker.
        timeout_s: How long a wait may take.
        build: Builds the communicator, a torch backend, and blocks until all ranks have. Called in a thread of its own.
        backend: A communicator that the script has made, instead of ``build``. It is aborted only if an operation hangs on it:
            nothing else would let the device go on.
    """

    def __init__(
        self,
        health: PeerHealth,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        *,
        build: Callable[[], Any] | None = None,
        backend: Any = None,
    ) -> None:
        self._health, self._rank, self._size, self._device, self._timeout_s = health, rank, size, device, timeout_s
        self._backend, self._is_ours = backend, build is not None
        self._calls = threading.RLock()  # held during each call of NCCL
        self._pendings: deque[CudaPending] = deque()
        self._pendings_lock = threading.Lock()
        self._ready, self._ending = threading.Event(), Ending()
        self._is_over = self._is_aborted = False
        self._began = time.monotonic()
        self._probe: Any = None  # a small work, which knows whether NCCL has reported an error
        if build is None:
            self._ready.set()
        else:
            threading.Thread(target=self._build, args=(build,), name=f"lockstep-nccl-build-{rank}", daemon=True).start()
        health.on_failure(self.abort)
        health.on_poll(self._watch)

    # -- building ----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether this rank is connected with all others."""
        return self._ready.is_set()

    def await_ready(self, number: int, what: str) -> None:
        """Block until this rank is connected with all others. ``number`` and ``what``: the operation that needs it.

        Raises:
            PeerError: The comm has failed meanwhile, or the ranks did not connect within the timeout.
        """
        while not self._ready.wait(0.02):
            self._health.raise_if_failed()
            self._require_building_in_time(number, what, self._timeout_s)
        self._health.raise_if_failed()

    def _require_building_in_time(self, number: int, what: str, limit_s: float) -> None:
        waited_s = time.monotonic() - self._began
        if self._health.time_left_s(self._began, limit_s) < 0:
            raise self._health.explain(number, what, waited_s, f"NCCL did not connect the ranks within {waited_s:.0f} s")

    def _build(self, build: Callable[[], Any]) -> None:
        """Build and warm up the communicator. Runs in a thread of its own, which may be blocked for ever."""
        await_endings()
        if self._health.error is not None:
            return
        try:
            backend = build()
            with self._calls:
                if self._is_over:
                    backend.abort()
                    return
                self._backend = backend
            self._warm_up()
        except (RuntimeError, UsageError) as error:
            self._building_failed(error)

    def _warm_up(self) -> None:
        calls = _Calls(self, self._health.count, "the connections of NCCL")
        if self._size > 1 and self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._probe = warm_up(calls, self._size, self._device)
                event = torch.cuda.current_stream().record_event()
                while not event.query() and self._health.error is None:
                    time.sleep(0.001)
        self._ready.set()

    def _building_failed(self, error: Exception) -> None:
        if self._health.error is not None:
            return
        if "Duplicate GPU" in str(error):
            text = "two workers share one GPU, which this version of NCCL refuses. Choose comm='gloo', or one worker per GPU."
            self._health.fail(UsageError(text))
        elif isinstance(error, UsageError):
            self._health.fail(error)
        else:
            self._health.explain(self._health.count, "its connections over NCCL", time.monotonic() - self._began, error)

    # -- operations --------------------------------------------------------------------------

    def issue(self, operation: str, arguments: tuple[Any, ...], number: int, what: str) -> CudaPending:
        """Issue an operation of the backend."""
        self.await_ready(number, what)
        return self._track(_Calls(self, number, what).call(operation, *arguments), number, what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, number: int, what: str) -> CudaPending:
        """Enqueue a fold on a stream of its own: a backward is not delayed."""
        self.await_ready(number, what)
        calls = _Calls(self, number, what)
        with self._explaining(number, what), torch.cuda.device(tensor.device):
            stream = fold_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                fold_on_stream(calls, self._rank, self._size, tensor, fold, scale)
            tensor.record_stream(stream)
            work = StreamWork(stream, tensor.device)
        return self._track(work, number, what)

    def await_device(self) -> None:
        """Block until every operation so far is complete in the memory of the device.

        An operation that was aborted ends on the device as if it were complete. But the comm fails before anything is aborted
        (``PeerHealth.fail``). So what is complete while the comm has not failed is complete indeed: the order of the two questions
        in ``_oldest`` and ``raise_if_failed`` matters.
        """
        began, polls = time.monotonic(), 0
        while (oldest := self._explained_oldest()) is not None:
            self._health.raise_if_failed()
            waited_s = time.monotonic() - began
            if self._health.time_left_s(began, self._timeout_s) <= 0:
                raise self._health.explain(oldest.number, oldest.what, waited_s)
            self._health.compare_calls(oldest.number, waited_s)
            polls += 1
            _pause(polls, waited_s)
        self._health.raise_if_failed()

    def _track(self, work: Any, number: int, what: str) -> CudaPending:
        pending = CudaPending(self._health, work, self._explaining, number, what)
        with self._pendings_lock:
            self._pendings.append(pending)
        if len(self._pendings) > _KEPT:  # a work keeps its tensors alive
            self._explained_oldest()
        return pending

    def _oldest(self) -> CudaPending | None:
        """Forget completed operations. Returns the oldest operation that is not complete."""
        with self._pendings_lock:
            while self._pendings and self._pendings[0].done():
                self._pendings.popleft()
            return self._pendings[0] if self._pendings else None

    def _explained_oldest(self) -> CudaPending | None:
        with self._explaining(self._health.count, "the operations on the device"):
            return self._oldest()

    @contextmanager
    def _explaining(self, number: int, what: str) -> Iterator[None]:
        """In this context every error of NCCL or CUDA becomes the error of the comm."""
        try:
            yield
        except (PeerError, UsageError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._health.explain(number, what, 0.0, error) from error

    # -- watching (the thread of PeerHealth) ---------------------------------------------------

    def _watch(self) -> None:
        """A CUDA wait does not block the host, so it cannot time out itself, and NCCL reports errors to nobody."""
        if self._health.error is not None or self._is_over:
            return
        try:
            if not self.is_ready:
                self._require_building_in_time(self._health.count, "its connections over NCCL", max(CONNECT_S, self._timeout_s))
                return
            oldest = self._oldest()
            self._require_no_error_of_nccl()
        except (PeerError, UsageError):
            return  # the comm has failed, which is all that matters here
        except RuntimeError as error:
            self._health.explain(self._health.count, "the operations on the device", 0.0, error)
            return
        if oldest is not None and oldest.is_overdue(self._timeout_s):
            self._health.explain(oldest.number, oldest.what, oldest.waited_s())
        elif oldest is not None:
            self._health.compare_calls(oldest.number, oldest.waited_s())

    def _require_no_error_of_nccl(self) -> None:
        """Raises what NCCL has found in its own threads, for example that the connection to another machine is closed."""
        if self._probe is None or not self._calls.acquire(blocking=False):
            return
        try:
            if not self._is_over:
                self._probe.is_completed()
        finally:
            self._calls.release()

    # -- the end -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Begin to end the communicator: what waits for other ranks on the device, or in a call of NCCL, comes to an end.

        Returns at once; any thread may call it, and twice.
        """
        self._begin_end(gracefully=False)

    def close(self) -> None:
        """End the communicator, and wait for it for a limited time. Does nothing to a communicator of the script.

        If the comm works, this waits until the device has ended all operations, and then shuts the communicator down.
        """
        if self.is_ready and self._is_drained():  # else operations of its warm-up may be under way
            self._begin_end(gracefully=True)
            self._ending.wait(lambda: self._health.error is not None)
        self.abort()  # does nothing if it has ended
        self._ending.wait()

    def _is_drained(self) -> bool:
        """Block until the device has ended all operations. False if it cannot, or has not ended another one within ``END_S``."""
        began, last, polls = time.monotonic(), None, 0
        while self._health.error is None and not self._is_over:
            try:
                oldest = self._oldest() if self._is_ours else None
            except RuntimeError:
                return False
            if oldest is None:
                return True
            if oldest is not last:
                began, last = time.monotonic(), oldest
            waited_s = time.monotonic() - began
            if waited_s > END_S:
                _log.warning("%s is aborted: the device has not completed it within %.0f s", oldest.what, waited_s)
                return False
            polls += 1
            _pause(polls, waited_s)
        return False

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """The streams on which operations were enqueued, besides those that were current."""
        stream = _fold_streams.get(self._device)
        return [stream] if stream is not None else []

    def _begin_end(self, *, gracefully: bool) -> None:
        with self._pendings_lock:
            if self._is_aborted or (gracefully and self._is_over) or self._ending.is_over:
                return
            self._is_over, self._is_aborted = True, not gracefully
            self._ending.begin(SHUTDOWN_S if gracefully else END_S)
        end = threading.Thread(target=self._end, args=(gracefully,), name=f"lockstep-nccl-end-{self._rank}", daemon=True)
        end.start()

    def _end(self, gracefully: bool) -> None:
        """Shut down, or abort, perhaps while another thread shuts down. Runs in a thread of its own."""
        has_lock = self._calls.acquire(timeout=_CALL_S)  # otherwise a call is blocked, which the abort ends
        try:
            backend = self._backend
            if backend is not None and (self._is_ours or (not gracefully and self._hangs())):
                (backend.shutdown if gracefully else backend.abort)()
        except RuntimeError:
            pass  # it has failed before, or the device has: device_check.py finds that out
        finally:
            self._backend = self._probe = None
            if has_lock:
                self._calls.release()
            self._ending.finish()

    def _hangs(self) -> bool:
        try:
            return self._oldest() is not None
        except RuntimeError:
            return False  # the device has failed: there is nothing to let go on


class _Calls:
    """The backend as comm/fold_nccl.py and comm/nccl_connect.py see it. A failure of a call becomes the error of the comm."""

    def __init__(self, group: NcclGroup, number: int, what: str) -> None:
        self._group, self._number, self._what = group, number, what

    def __getattr__(self, operation: str) -> Callable[..., IssuedWork | None]:
        return lambda *arguments: self.call(operation, *arguments)

    def call(self, operation: str, *arguments: Any) -> IssuedWork | None:
        """Returns None if the backend does: the operation is then on the current stream, and there is no work to wait for."""
        group = self._group
        with group._explaining(self._number, self._what), group._calls:
            group._health.raise_if_failed()  # no call of NCCL may begin once the communicator is about to be aborted
            if group._backend is None:
                raise RuntimeError("the communicator was closed")
            work = getattr(group._backend, operation)(*arguments)
            return None if work is None else IssuedWork(work, group._calls, is_ours=group._is_ours)


def fold_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _fold_streams:
        _fold_streams[device] = torch.cuda.Stream(device)
    return _fold_streams[device]


def _pause(polls: int, waited_s: float) -> None:
    """Between two looks at the device: yield the core at first, then sleep for a small part of the time waited so far."""
    if polls < 64 or waited_s < 0.001:
        os.sched_yield()
    else:
        time.sleep(min(0.0005, waited_s / 20))
