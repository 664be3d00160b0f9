"""CudaGraphs: records work on a GPU as CUDA graphs. A replay launches all of it at once. Knows nothing of models and workers.

A recording executes nothing on the GPU: kernels are noted with the addresses that they read and write. So the tensors that the
recorded function returns are written anew by each replay, and everything it reads must stay where it is.

Note: what a failed recording leaves behind
-------------------------------------------
If an operation cannot be recorded (the host waits for the GPU), CUDA invalidates the recording, and torch's ``capture_end`` raises
before it has told the allocators and the random generator that the recording is over. Then ``torch.cuda.empty_cache`` and each
``dropout`` would raise for the rest of the process. ``_mend`` does what ``capture_end`` has left out:

- The allocator of the GPU is told that the recording is over and that its memory is not needed. The allocator of pinned memory
  cannot be told, so later recordings use another pool, and the failed graph, which that allocator asks, is kept. Recordings
  that were made in the same pool before keep it, with the memory of the failed one, until they are closed.
- The random generator forgets the recording at the end of the next one, so one kernel is recorded. If that does not help, the
  generator gets a new state. Recordings that were made before would go on to read the old one: ``generator`` is counted up, and
  they are not replayed any more.

Note: a pool ends with its last recording
-----------------------------------------
torch counts the graphs of each pool of memory, in the allocator of the GPU and in that of pinned memory. Once a count has fallen to
0, a recording into that pool fails in an internal assertion of torch. So a recording takes a new pool if no recording of the
current one is left, and ``_mend`` records its kernel in a pool that nothing else uses.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

Results = list[Tensor | None]


class CannotRecord(Exception):
    """A function cannot be recorded. The text says why, and where in the user's code."""


class Recording(Protocol):
    """A recorded function."""

    results: Results
    """What the function returned. Each replay writes these tensors again."""

    def replay(self) -> None:
        """Do the work of the function again. Does not wait for the device."""

    def close(self) -> None:
        """Release the memory. May be called twice."""


class GraphRecorder(Protocol):
    """Records functions."""

    runs_on_host: bool
    """Whether a recording does its work on the host, as in tests: it may draw random numbers there."""
    generator: int
    """Which random generator recordings read. A recording must not be replayed after this number has changed."""

    def record(self, body: Callable[[], Results]) -> Recording:
        """Call ``body`` and note what it does. What it does on the device is not done before the first replay.

        Raises:
            CannotRecord: It does something that cannot be replayed. Nothing of it was done on the device.
        """

    def rehearse(self, body: Callable[[], Results]) -> None:
        """Call ``body`` as ``record`` does, and keep nothing of it. What it does on the device is never done.

        Raises:
            CannotRecord: As ``record``.
        """

    def watching(self, transparent: str) -> AbstractContextManager[list[str]]:
        """A context manager. At its end the list contains the places at which the user's code has waited for the device.

        Waits of Lockstep do not count, except of user's code that is called through the file ``transparent``.
        """


class CudaGraph:
    """A ``Recording`` of ``CudaGraphs``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results) -> None:
        self.results, self.is_closed, self._graph = results, False, graph

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.is_closed, self.results = True, []
        self._graph.reset()


class CudaGraphs:
    """The ``GraphRecorder`` of one GPU. Its recordings share memory for what they use only while they run."""

    runs_on_host = False

    def __init__(self, device: torch.device) -> None:
        self.generator = 0
        self._device = device
        self._pool: Any = None
        self._in_pool: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._stream: torch.cuda.Stream | None = None

    def record(self, body: Callable[[], Results]) -> CudaGraph:
        with torch.cuda.device(self._device), _no_collection():
            stream = self._ready_stream()
            self._choose_pool()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the memory of eager steps, for the recording
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            results, error = self._try_to_record(graph, stream, body)
            torch.cuda.current_stream().wait_stream(stream)
        if error is None:
            recording = CudaGraph(graph, results)
            self._in_pool.add(recording)
            return recording
        if not isinstance(error, Exception):
            raise error
        raise CannotRecord(_explain(error)) from None

    def rehearse(self, body: Callable[[], Results]) -> None:
        self.record(body).close()

    def _ready_stream(self) -> torch.cuda.Stream:
        """Return the stream for recordings. On a new one cuBLAS is used, forward and backward: its first use cannot be recorded."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            # suppress: if this raises, the recording does too, and says why
            with torch.cuda.stream(self._stream), torch.enable_grad(), suppress(RuntimeError):
                ones = torch.ones(16, 16, device=self._device, requires_grad=True)
                (ones @ ones).sum().backward()
        return self._stream

    def _choose_pool(self) -> None:
        """Take a new pool if no recording of the current one is left. Called when garbage has been collected."""
        if all(recording.is_closed for recording in self._in_pool):
            self._leave_pool()
            self._pool = torch.cuda.graph_pool_handle()

    def _leave_pool(self) -> None:
        """Record no more into the current pool."""
        self._pool = None
        self._in_pool = weakref.WeakSet()

    def _try_to_record(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, body: Callable[[], Results]
    ) -> tuple[Results, BaseException | None]:
        """Return what ``body`` returns, or what it raises. In the latter case nothing of the recording is left."""
        error: BaseException | None = None
        results: Results = []
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                # thread_local: what other threads do meanwhile (a checkpoint is written) does not matter
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                results = body()
            except BaseException as raised:  # noqa: BLE001 - returned
                error = raised
                traceback.clear_frames(raised.__traceback__)  # they hold tensors of the recording
            try:
                graph.capture_end()
            except RuntimeError as raised:
                error, results = error or raised, []
                self._mend(graph)
            else:
                if error is not None:
                    graph.reset()
        return results, error

    def _mend(self, graph: torch.cuda.CUDAGraph) -> None:
        """Do what ``capture_end`` has left out: see the note at the top of this file."""
        _abandon(graph, self._pool)
        self._leave_pool()
        try:
            self._record_one_kernel()
            torch.rand(1, device=self._device)  # raises if the generator believes that it is being recorded
        except RuntimeError:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            self.generator += 1
            self._stream = None

    def _record_one_kernel(self) -> None:
        """Called on the stream for recordings."""
        one = torch.zeros((), device=self._device)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            one.add_(1)
            graph.capture_end()
        except RuntimeError:
            _abandon(graph, pool)
            raise
        graph.reset()

    @contextmanager
    def watching(self, transparent: str) -> Iterator[list[str]]:
        """Let torch warn of operations for which the host waits, and note those of the user. Other warnings are passed on."""
        places: list[str] = []
        others: list[Any] = []
        thread = threading.get_ident()

        def note(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if "synchronizing" not in str(message):
                others.append((message, category, filename, lineno))
            elif threading.get_ident() == thread and "prototype" not in str(message):
                place = _waiting_place(sys._getframe(1), transparent)
                if place is not None:
                    places.append(place)

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for message, category, filename, lineno in others:
            warnings.warn_explicit(message, category, filename, lineno)


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed. torch may still point to them."""


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Tell the allocator of the GPU that a recording into ``pool`` is over, and keep the graph."""
    _abandoned.append(graph)
    native: Any = torch._C
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # raised by the first call if capture_end has come that far
        native._cuda_endAllocateToPool(device, pool)
        native._cuda_releasePool(device, pool)


_TORCH = os.path.dirname(torch.__file__)
_LOCKSTEP = os.path.dirname(os.path.dirname(__file__))
_WARNING_MODULES = ("warnings", "_py_warnings")  # the latter since Python 3.14


def recorder_of(device: torch.device) -> GraphRecorder | None:
    """Returns what records functions on ``device``, or None if nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now and not meanwhile: it may contain graphs of autograd, or objects that CUDA must not destroy now."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explain(error: Exception) -> str:
    """Returns what has failed and where: the first line of the message, and the line of the user's code."""
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, CannotRecord) else f"{type(error).__name__}: "
    reason = f"{kind}{text[0] if text else ''}".rstrip(": ")
    if "accumulate" in reason.lower() or "legacy stream" in reason:
        reason += " (is the loss of an earlier backward() still referenced?)"
    frames = [(f.filename, f.lineno or 0, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    return reason + _describe_place([frame for frame in frames if not frame[0].startswith((_TORCH, _LOCKSTEP))])


def _waiting_place(frame: FrameType | None, transparent: str) -> str | None:
    """Returns where the user's code waits for the device, or None if Lockstep does. Walks from the inside to the captured call.

    ``frame`` is that of the module ``warnings``, which calls ``showwarning``.
    """
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LOCKSTEP) and file != transparent:
            break
        if not file.startswith((_TORCH, _LOCKSTEP)) and frame.f_globals.get("__name__") not in _WARNING_MODULES:
            line = traceback.FrameSummary(file, frame.f_lineno, frame.f_code.co_name).line or ""
            frames.append((file, frame.f_lineno, line))
        frame = frame.f_back
    return _describe_place(frames[::-1]) if frames else None


def _describe_place(frames: Sequence[tuple[str, int, str]]) -> str:
    """Describe the innermost of ``frames``, and the line of the user's file from which it was called."""
    if not frames:
        return ""
    (outer, outer_line, _), (inner, line, text) = frames[0], frames[-1]
    called = f", called from {os.path.basename(outer)}:{outer_line}" if inner != outer else ""
    return f" ({os.path.basename(inner)}:{line}: `{text.strip()}`{called})"
