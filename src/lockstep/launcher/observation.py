"""Observation: what the agent knows of the steps of its workers. It writes their records, and answers what happens now.

Workers send what they have recorded twice a second, as packets {"type": "steps", "records": [...], "now": {...}, "sent": ...}.
They may be on other machines. A packet that makes no sense is left out.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.launcher.packets import Packet
from lockstep.launcher.run_folder import RunFolder
from lockstep.recording.records import StepRecord, finite, parse
from lockstep.recording.writer import RecordingWriter

_RECENT, _RECENT_STEPS = 512, 16
_SUSPENDED_S = 0.5
"""If the two clocks of this machine have moved apart by so much, it was suspended or its time was set."""
_OFFSET_S = 60.0
_RESTARTED_S = 10.0
"""If the clock of another machine is behind by so much, it was started again or suspended: no packet takes so long."""
_OWN_CLOCK_S = 60.0
"""If a clock is apart from ours by more than this, it is that of another machine with the same name, as a cloned one has."""


@dataclass(frozen=True)
class WorkerNow:
    """What a worker has said last of itself. ``since`` is when its phase began, in seconds since 1970.

    ``stopped_since``: when SIGSTOP has stopped it; None if it is not stopped.
    """

    step: int
    phase: str
    since: float
    memory_bytes: int
    lanes: tuple[int, int]
    stopped_since: float | None = None


class Observation:
    """``host(worker)`` names the machine of a worker; ``own_host`` is that of this process.

    ``on_step`` is called with each record of a step, when it arrives.
    """

    def __init__(
        self, run_folder: RunFolder, own_host: str, host: Callable[[int], str], on_step: Callable[[StepRecord], None]
    ) -> None:
        self.workers: dict[int, WorkerNow] = {}
        self.recent: deque[StepRecord] = deque()
        """The last records of all workers: of some steps, however many workers there are."""
        self._stopped: dict[int, float] = {}
        self._writer = RecordingWriter(run_folder.path / "recording")
        self._own_host, self._host, self._on_step = own_host, host, on_step
        self._to_unix = time.time() - time.monotonic()
        self._offsets: dict[str, _Offset] = {}

    def on_packet(self, worker: int, packet: Packet) -> None:
        """Write the records of a packet, with times by the clock of this machine. What makes no sense is left out."""
        self._follow_clock()
        try:
            offset = self._offset(self._host(worker), finite(packet["sent"])) + self._to_unix
            records = [each | {"worker": worker, "at": float(each["at"]) + offset} for each in packet["records"]]
            now = replace(_worker_now(packet["now"], offset), stopped_since=self._stopped.get(worker))
            self._take(worker, now, records)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return

    def _take(self, worker: int, now: WorkerNow, records: list[dict[str, Any]]) -> None:
        self.workers[worker] = now
        known = [(each, parsed) for each in records if (parsed := parse(each)) is not None]
        self._writer.write([each for each, _ in known])
        for _, parsed in known:
            if isinstance(parsed, StepRecord):
                self.recent.append(parsed)
                self._on_step(parsed)
        while len(self.recent) > max(_RECENT, _RECENT_STEPS * len(self.workers)):
            self.recent.popleft()

    def on_stopped(self, worker: int, *, is_stopped: bool) -> None:
        """SIGSTOP has stopped the worker, or it has continued."""
        if is_stopped:
            self._stopped[worker] = time.time()
        else:
            self._stopped.pop(worker, None)
        if worker in self.workers:
            self.workers[worker] = replace(self.workers[worker], stopped_since=self._stopped.get(worker))

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._stopped.pop(worker, None)
        self.workers.pop(worker, None)

    @property
    def error(self) -> OSError | None:
        """The first error of writing."""
        return self._writer.error

    def _follow_clock(self) -> None:
        """Events have the time of day. Records must be on the same scale, also after this machine was suspended."""
        to_unix = time.time() - time.monotonic()
        if abs(to_unix - self._to_unix) > _SUSPENDED_S:
            self._to_unix = to_unix

    def close(self) -> None:
        self._writer.close()

    def _offset(self, host: str, sent: float) -> float:
        now = time.monotonic()
        if host == self._own_host and abs(now - sent) < _OWN_CLOCK_S:
            return 0.0  # one clock for all processes of a machine
        return self._offsets.setdefault(host, _Offset(now)).take(now, now - sent)


class _Offset:
    """Our clock minus that of another machine; too large by the shortest way that a packet took in the last one or two minutes.

    Not in the whole run: clocks drift apart by seconds in a day. A machine that was started again or suspended has a new offset.
    """

    def __init__(self, now: float) -> None:
        self._since, self._before, self._least = now, math.inf, math.inf

    def take(self, now: float, offset: float) -> float:
        if offset > min(self._before, self._least) + _RESTARTED_S:
            self._since, self._before, self._least = now, math.inf, math.inf
        elif now - self._since >= _OFFSET_S:
            self._since, self._before, self._least = now, self._least, math.inf
        self._least = min(self._least, offset)
        return min(self._before, self._least)


def _worker_now(now: Any, offset: float) -> WorkerNow:
    first, last = now["lanes"]
    since = finite(now["since"]) + offset
    return WorkerNow(int(now["step"]), str(now["phase"])[:40], since, int(now["memory_bytes"]), (int(first), int(last)))
