"""Recorder: notes on a worker how its steps pass, and sends the records to the agent. Costs a few microseconds per step.

The main thread calls ``enter`` when a phase begins, and ``end_step`` when a step is over. What it notes goes into a ring in memory:
the oldest records are lost if the agent does not take them. A thread makes records of it twice a second, and sends them.

    main thread   enter(DATA) .. enter(FORWARD) .. enter(BACKWARD) .. enter(EXCHANGE) .. end_step       notes: a tuple per phase
    thread                                                        every half second: records -> packet -> agent

All workers of a machine do this at the same moments. So it delays them together, and once, instead of one after the other.

If steps are short, only each second, fourth, eighth, ... step is recorded: at most about 20 in a second, or less of more than 100
workers.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.recording.records import BETWEEN, DATA, OUTSIDE, OWN_WORK, UNKNOWN, BucketTimes, Metrics, Span, StepRecord

_FLUSH_S = 0.5
_MIN_PERIOD_NS = 50_000_000
"""Between two recorded steps, if the steps are short."""
_PERIOD_PER_WORKER_NS = 500_000
"""The same for each worker of the run: one process handles the records of all of them, at most 2000 in a second."""
_LONGEST_STRIDE = 1 << 12
_RING = 4096
_PACKET_ITEMS = 1000
"""Spans, buckets and values in one packet: about 30 kB."""
_LONGEST_RECORD = 50_000
"""Bytes. A longer one may not fit into a packet."""
_SENDING_S = 1.0
"""The main thread waits no longer for the recorder's thread, which may hang in a driver."""
_QUEUE_NS = 500_000
"""If a phase has waited longer than this without using the CPU, the kernel is asked how long the thread waited for a core."""


class WorkerState(NamedTuple):
    """Which part this worker has in the run now."""

    rank: int
    size: int
    generation: int
    lanes: tuple[int, int]


@dataclass(frozen=True)
class RecorderCallbacks:
    """What the recorder asks of its owner."""

    send: Callable[..., bool]
    """Sends a packet without waiting; returns False if it could not be sent. Called in the recorder's thread."""
    state: Callable[[], WorkerState]
    """Called for each recorded step, and in the recorder's thread."""
    gpu_percent: Callable[[], int] = lambda: -1
    """Returns the utilisation of this worker's GPU, or -1. It may hang. Called in the recorder's thread."""
    gpu_memory_bytes: Callable[[], int] = lambda: 0
    """Returns how much memory of its GPU this worker uses. Called in the main thread, at the end of a step, twice a second."""
    notify: Callable[[str], None] = lambda text: None
    """Shows a sentence to the user."""
    link_us: Callable[[], int] = lambda: 0
    """How long the data of this worker has been on its way since it began: see ``StepRecord.link_us``."""


class _Mark(NamedTuple):
    phase: str
    at_ns: int
    cpu_ns: int
    queue_ns: int


class _Noted(NamedTuple):
    """What the main thread has noted of one step."""

    kind: str
    step: int
    epoch: int
    samples: int
    committed: bool
    stride: int
    state: WorkerState
    marks: list[_Mark]
    end: _Mark
    sent: list[tuple[int, int, int]]
    done: dict[int, int]
    page_faults: int
    link_us: int


class Usage(NamedTuple):
    """What this worker uses. ``gpu_percent`` is -1 if it is not known."""

    memory_bytes: int
    gpu_memory_bytes: int = 0
    gpu_percent: int = -1


class Recorder:
    """Records the steps of one worker. ``callbacks`` is None if there is no agent: then nothing is recorded.

    The methods belong to the main thread, and may be called in the threads of autograd while the main thread waits for them.
    """

    def __init__(self, worker: int = 0, callbacks: RecorderCallbacks | None = None) -> None:
        self._worker, self._callbacks = worker, callbacks
        self.is_on = callbacks is not None
        """Whether this step is recorded."""
        self.enabled = self.is_on
        """False: from the next step on nothing is recorded or sent, until it is True again (benchmarks/observe.py)."""
        self.phase = OUTSIDE
        self._since_ns = time.monotonic_ns()
        self._step, self._epoch, self._stride = 0, 0, 1
        self._recorded_ns, self._recorded_step = self._since_ns, 0
        self._main = threading.get_ident()
        self._ring: deque[_Noted | Metrics] = deque(maxlen=_RING)
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._gpu_memory, self._gpu_percent, self._memory_is_due = 0, -1, True
        self._room = _PACKET_ITEMS
        """Of the next packet. It halves while packets are not taken: a packet may be too long for the socket."""
        self._schedstat = self._statm = -1
        self._last_faults = self._last_link_us = self._last_step = 0
        self._state = WorkerState(0, 1, 0, (0, 0))
        if callbacks is not None:
            self._schedstat = _open(f"/proc/self/task/{threading.get_native_id()}/schedstat")
            self._statm = _open("/proc/self/statm")
            self._thread = threading.Thread(target=self._run, name="lockstep-recorder", daemon=True)
        self._begin(self._mark(OUTSIDE, None))
        if callbacks is not None:
            self._thread.start()

    # -- what the main thread notes ------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """From now on this worker is in ``phase``."""
        self.phase = phase
        if self.is_on:
            mark = self._mark(phase, self._marks[-1])
            self._since_ns = mark.at_ns
            self._marks.append(mark)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """In this context the worker is in ``phase``, and afterwards in the phase that it was in before.

        This is recorded in every step; if the step itself is not, as a pause.
        """
        before, is_pause = self.phase, not self.is_on and self.enabled
        if is_pause:
            self.is_on, self.phase = True, phase
            self._begin(self._mark(phase, None))
        else:
            self.enter(phase)
        try:
            yield
        finally:
            if is_pause:
                self._note("pause", self._step)
                self.is_on, self.phase = False, before
            else:
                self.enter(before)

    def bucket_sent(self, bucket: int, nbytes: int) -> None:
        """This worker has deposited its part of a bucket."""
        if self.is_on:
            self._latest[bucket] = len(self._sent)
            self._sent.append((bucket, time.monotonic_ns(), nbytes))

    def bucket_done(self, bucket: int, done_ns: int) -> None:
        """The bucket that was deposited last under this number is complete since ``done_ns`` (time.monotonic_ns; 0: not known)."""
        if self.is_on and bucket in self._latest:
            self._done[self._latest.pop(bucket)] = done_ns

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context the worker waits for the other workers, unless it is outside of a loop or in an evaluation."""
        before = self.phase
        if before not in OWN_WORK:
            yield
            return
        self.enter(BETWEEN)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def lanes(self) -> tuple[int, int]:
        """The lanes that this worker had when the step began."""
        return self._state.lanes

    def start_step(self) -> None:
        """A step begins whose first micro-batch is loaded. The workers may have changed meanwhile."""
        if self.is_on:
            self._take_state()

    def end_step(self, step: int, epoch: int, samples: int, *, committed: bool = True) -> None:
        """Step number ``step`` is over, and the worker waits for its next micro-batch. ``samples``: of this worker."""
        self.phase = DATA
        self._step, self._epoch = step if committed else step - 1, epoch
        if self.is_on:
            end = self._note("step", step, samples, committed=committed)
            if committed:
                self._adapt_stride(end.at_ns, step)
        self.is_on = self.enabled and (step + committed) % self._stride == 0
        if self.is_on:
            self._begin(self._mark(DATA, None))

    def end_pause(self, epoch: int) -> None:
        """A loop begins: what happened since the last one is a record of its own."""
        self._epoch = epoch
        if not self.enabled:
            return
        if self.is_on:
            self._note("pause", self._step)
        self.is_on, self.phase = True, DATA
        self._begin(self._mark(DATA, None))

    def begin_pause(self) -> None:
        """A loop is over. What happened since its last step is a record of its own. Sends all, because the script may end."""
        if self.enabled and self.is_on:
            self._note("pause", self._step)
        self.phase = OUTSIDE
        if self.enabled:
            self.is_on = True
            self._begin(self._mark(OUTSIDE, None))
            self.flush()

    def note_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The averages of what was logged in a step. Rank 0 calls it."""
        if self.enabled:
            self._ring.append(Metrics(step, time.monotonic(), dict(values)))

    def close(self) -> None:
        """Send what was noted, and end the thread. It may be called twice."""
        if self._callbacks is None or self._closed.is_set():
            return
        self._closed.set()
        if self.is_on and self.phase == OUTSIDE:
            self._note("pause", self._step)
        self.is_on = False
        self._thread.join(timeout=5.0)
        if self.enabled:
            self.flush()
        for descriptor in (self._schedstat, self._statm):
            if descriptor >= 0:
                os.close(descriptor)
        self._schedstat = self._statm = -1

    def _mark(self, phase: str, last: _Mark | None) -> _Mark:
        now = time.monotonic_ns()
        if threading.get_ident() != self._main:  # a thread of autograd: the main thread waits for it
            return _Mark(phase, now, 0 if last is None else last.cpu_ns, 0 if last is None else last.queue_ns)
        cpu = time.thread_time_ns()
        if last is not None and now - last.at_ns - (cpu - last.cpu_ns) < _QUEUE_NS:
            return _Mark(phase, now, cpu, last.queue_ns)
        return _Mark(phase, now, cpu, self._queue_ns())

    def _queue_ns(self) -> int:
        """How long the main thread has been ready to run without a core, since it began."""
        return _number_in(self._schedstat)

    def _resident_bytes(self) -> int:
        return _number_in(self._statm) * resource.getpagesize()

    def _begin(self, mark: _Mark) -> None:
        self._marks, self._since_ns = [mark], mark.at_ns
        self._sent: list[tuple[int, int, int]] = []
        self._latest: dict[int, int] = {}  # bucket -> its last deposit, as a place in self._sent
        self._done: dict[int, int] = {}  # deposit -> when the average was complete; 0: not known
        self._take_state()

    def _take_state(self) -> None:
        if self._callbacks is not None:
            self._state = self._callbacks.state()

    def _note(self, kind: str, step: int, samples: int = 0, *, committed: bool = True) -> _Mark:
        """Put what was noted since ``_begin`` into the ring."""
        assert self._callbacks is not None
        end = self._mark("", self._marks[-1])
        if self._memory_is_due:
            self._memory_is_due = False
            self._gpu_memory = self._callbacks.gpu_memory_bytes()
        steps = min(max(1, self._step - self._last_step), self._stride)  # since the last note, also if a run was resumed
        self._last_step = self._step
        faults, link_us = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, self._callbacks.link_us()
        new_faults, rest = divmod(faults - self._last_faults, steps)
        self._last_faults = faults - rest
        new_link_us, self._last_link_us = max(0, link_us - self._last_link_us) // steps, link_us
        self._ring.append(
            _Noted(
                kind,
                step,
                self._epoch,
                samples,
                committed,
                self._stride,
                self._state,
                self._marks,
                end,
                self._sent,
                self._done,
                new_faults,
                new_link_us,
            )
        )
        return end

    def _adapt_stride(self, now_ns: int, step: int) -> None:
        """Choose how many steps pass between two that are recorded. All workers choose the same."""
        steps = step - self._recorded_step
        per_step = (now_ns - self._recorded_ns) / steps if steps > 0 else 0.0
        self._recorded_ns, self._recorded_step = now_ns, step
        if not per_step:
            return
        period_ns = max(_MIN_PERIOD_NS, self._state.size * _PERIOD_PER_WORKER_NS)
        if per_step * self._stride < period_ns and self._stride < _LONGEST_STRIDE:
            self._stride *= 2
        while self._stride > 1 and per_step * self._stride > 4 * period_ns:
            self._stride //= 2

    # -- the thread --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what was noted. Keeps what the agent does not take. Any thread may call it. Never raises.

        If another thread has been sending for a second, this one does not: what was noted is sent later.
        """
        if not self._sending.acquire(timeout=_SENDING_S):
            return
        try:
            while self._send_packet() and self._ring:
                pass
        except Exception as error:  # noqa: BLE001 - training does not depend on the recording
            self._give_up(error)
        finally:
            self._sending.release()

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        why = f"{type(error).__name__}: {error}"
        assert self._callbacks is not None
        self._callbacks.notify(f"the recording of worker {self._worker} has ended ({why}). Training continues.")

    def _run(self) -> None:
        assert self._callbacks is not None
        while not self._closed.wait(_FLUSH_S - time.monotonic() % _FLUSH_S):
            if not self.enabled:
                continue
            try:
                self._gpu_percent = self._callbacks.gpu_percent()
            except Exception as error:  # noqa: BLE001 - training does not depend on the recording
                self._give_up(error)
            else:
                self.flush()
                self._memory_is_due = True

    def _send_packet(self) -> bool:
        """Send one packet, also if there is nothing new but what this worker does now. Returns whether the agent took it."""
        assert self._callbacks is not None
        lanes, usage = self._callbacks.state().lanes, Usage(self._resident_bytes(), self._gpu_memory, self._gpu_percent)
        taken: list[_Noted | Metrics] = []
        items = 0
        while self._ring and items < self._room:
            noted = self._ring.popleft()
            items += 1 + (len(noted.values) if isinstance(noted, Metrics) else len(noted.marks) + len(noted.sent))
            taken.append(noted)
        records = [(each if isinstance(each, Metrics) else record_of(each, self._worker, usage)).to_json() for each in taken]
        now = {"phase": self.phase, "since": self._since_ns / 1e9, "step": self._step, "lanes": lanes, **usage._asdict()}
        if self._callbacks.send(type="steps", records=records, now=now, sent=time.monotonic()):
            self._room = min(_PACKET_ITEMS, 2 * self._room)
            return True
        self._room = max(1, self._room // 2)
        if len(taken) == 1 and len(json.dumps(records)) > _LONGEST_RECORD:
            return True  # thousands of values: this record alone is left out
        room = _RING - len(self._ring)
        self._ring.extendleft(reversed(taken[-room:] if room else []))
        return False


def record_of(noted: _Noted, worker: int, usage: Usage) -> StepRecord:
    """The record of what was noted of one step. Its ``at`` is by time.monotonic."""
    begin_ns, state = noted.marks[0].at_ns, noted.state
    spans = tuple(
        Span(
            mark.phase,
            (mark.at_ns - begin_ns) // 1000,
            (after.at_ns - begin_ns) // 1000,
            max(0, after.cpu_ns - mark.cpu_ns) // 1000,
            max(0, after.queue_ns - mark.queue_ns) // 1000,
        )
        for mark, after in zip(noted.marks, [*noted.marks[1:], noted.end], strict=True)
        if after.at_ns - mark.at_ns >= 1000
    )
    return StepRecord(
        noted.step,
        worker,
        state.rank,
        state.size,
        state.generation,
        state.lanes,
        begin_ns / 1e9,
        spans,
        tuple(_bucket_times(noted, begin_ns)),
        samples=noted.samples,
        epoch=noted.epoch,
        committed=noted.committed,
        stride=noted.stride,
        page_faults=noted.page_faults,
        link_us=noted.link_us,
        memory_bytes=usage.memory_bytes,
        gpu_memory_bytes=usage.gpu_memory_bytes,
        gpu_percent=usage.gpu_percent,
        kind=noted.kind,
    )


def _bucket_times(noted: _Noted, begin_ns: int) -> Iterator[BucketTimes]:
    """A step with several phases sends each bucket several times. Deposits that a broken phase has left are left out."""
    for place, (bucket, sent_ns, nbytes) in enumerate(noted.sent):
        done_ns = noted.done.get(place)
        if done_ns is not None:
            done_us = (done_ns - begin_ns) // 1000 if done_ns else UNKNOWN
            yield BucketTimes(bucket, (sent_ns - begin_ns) // 1000, done_us, nbytes)


def _number_in(descriptor: int) -> int:
    """The second number in a file of the kernel that is read anew; 0 if there is none."""
    if descriptor < 0:
        return 0
    try:
        return int(os.pread(descriptor, 100, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no such file in this container
        return -1
