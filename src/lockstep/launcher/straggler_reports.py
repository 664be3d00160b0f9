"""StragglerReports: says during a run which worker the others wait for. Writes verdicts and stops to events.jsonl.

A verdict is written when it begins, when its cause changes and when it ends. While it stays, its numbers are shown as they change,
and written again after 5, 10, 20, ... seconds: a straggler that stays for weeks does not fill the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from lockstep.launcher.event_thinning import Spacing
from lockstep.recording.causes import Stop
from lockstep.recording.records import StepRecord
from lockstep.recording.stragglers import Straggler, StragglerWatch

_LOOK_S = 0.25
"""The least time between two looks, besides ``_MAX_LOAD``."""
_MAX_LOAD = 0.003
"""The part of a core that looks may use."""
_MAX_RECORDS = 300
"""Per second. Of more records, only those of steps whose number is divisible by a power of two are looked at."""
_FIRST_NUMBERS_S, _LAST_NUMBERS_S = 5.0, 600.0
"""The numbers of a verdict that stays are written again after these times, if they have changed."""
_STOPS_S = 1.0
"""A worker that is stopped often makes one event in this time, or in a longer one if there were many (event_thinning.py)."""


class StragglerReports:
    """Give it every record (``add``) and stop (``add_stop``), and call ``on_time`` often.

    ``record(kind, **facts)`` writes a line of events.jsonl. ``show(sentence, is_new)`` shows the sentence of a verdict, an empty
    one if it is over. It is called after every look; ``is_new``: the verdict names another worker or cause than the last one.
    """

    def __init__(self, record: Callable[..., None], show: Callable[[str, bool], None]) -> None:
        self._record, self._show = record, show
        self._watch = StragglerWatch()
        self._verdict: Straggler | None = None
        self._written: Straggler | None = None  # the numbers that were written last
        self._write_at, self._write_again_s = 0.0, _FIRST_NUMBERS_S
        self._look_at = 0.0
        self._stride = 1
        self._records, self._counted_since = 0, float("inf")
        self._newest_step = 0
        self._stops: dict[int, Stop] = {}  # worker -> its stops that were not written yet
        self._write_stops_at, self._stops_spacing = 0.0, Spacing()

    @property
    def verdict(self) -> Straggler | None:
        """What the last look has found; None if no worker is slower than the others."""
        return self._verdict

    def add(self, record: StepRecord) -> None:
        self._records += 1
        if record.step % self._stride == 0:
            self._watch.add(record)
            self._newest_step = max(self._newest_step, record.step)

    def add_stop(self, worker: int, seconds: float) -> None:
        """A worker has continued after it was stopped by SIGSTOP."""
        stop = Stop(worker, time.time(), seconds)
        self._watch.add_stop(stop)
        before = self._stops.get(worker)
        if before is not None:
            stop = replace(stop, seconds=before.seconds + seconds, times=before.times + 1)
        self._stops[worker] = stop

    def on_time(self, now: float) -> None:
        if self._stops and now >= self._write_stops_at:
            self.write_stops()
            self._write_stops_at = now + max(_STOPS_S, self._stops_spacing.seconds)
        if self._watch.has_new_steps and now >= self._look_at:
            began = time.thread_time()
            self._look(now)
            self._look_at = now + max(_LOOK_S, (time.thread_time() - began) / _MAX_LOAD)
        self._counted_since = min(self._counted_since, now)
        if now - self._counted_since >= 2.0:
            self._choose_stride(self._records / (now - self._counted_since))
            self._records, self._counted_since = 0, now

    def _look(self, now: float) -> None:
        verdict, before = self._watch.verdict(), self._verdict
        self._verdict = verdict
        if verdict is None:
            if before is not None:
                self._record("verdict", sentence="", rank=before.rank, worker=before.worker, cause=before.cause)
                self._show("", False)
            return
        is_new = before is None or (verdict.worker, verdict.cause) != (before.worker, before.cause)
        if is_new:
            self._write(verdict, now + _FIRST_NUMBERS_S, _FIRST_NUMBERS_S)
        elif now >= self._write_at and _differs(verdict, self._written):
            again_s = min(_LAST_NUMBERS_S, 2 * self._write_again_s)
            self._write(verdict, now + again_s, again_s)
        self._show(f"{verdict.sentence()}.", is_new)

    def _write(self, verdict: Straggler, again_at: float, again_s: float) -> None:
        self._written, self._write_at, self._write_again_s = verdict, again_at, again_s
        facts = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(verdict).items()}
        self._record("verdict", sentence=verdict.sentence(), step=self._newest_step, **facts)

    def write_stops(self) -> None:
        """Write the stops that were added up since the last line."""
        for worker, stop in self._stops.items():
            facts = {"at": round(stop.at, 3), "seconds": round(stop.seconds, 4), "times": stop.times}
            self._record("stopped", worker=worker, **facts)
        self._stops_spacing.count(len(self._stops))
        self._stops.clear()

    def _choose_stride(self, records_per_s: float) -> None:
        """A step is looked at on all workers or on none."""
        while records_per_s / self._stride > _MAX_RECORDS:
            self._stride *= 2
        while self._stride > 1 and records_per_s / self._stride < _MAX_RECORDS / 4:
            self._stride //= 2


def _differs(one: Straggler, other: Straggler | None) -> bool:
    return other is None or abs(one.speedup - other.speedup) >= 0.02 or abs(one.share - other.share) >= 0.1
