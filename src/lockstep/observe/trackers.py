"""Trackers: hands the averages of logged values to CSV files, TensorBoard, Weights & Biases, MLflow and objects of the user.

Rank 0 alone opens trackers. tracker_backlog.py says why each step arrives exactly once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.observe.tracker_backlog import TrackerBacklog, TrackerReport

_LIMIT_S = 300.0
_RETRY_S = 30.0
_PAUSE_FACTOR = 20.0
"""A tracker that has failed is tried again after this many times as long as the failed try took: the tries take 5% of the time."""
_MOMENT_S = 0.5


@runtime_checkable
class Tracker(Protocol):
    """What ``Run(track=...)`` takes: any object with ``log(step, values)``. All methods are called on rank 0, by its main thread.

    These methods are optional, and called if the object has them:

    - ``open(run_id, folder)``: before anything else, whenever this worker becomes rank 0, and some time after a method has raised,
      without ``close`` in between. ``run_id`` names the curves of the run:
      it stays the same after a resume. ``folder`` is where they may be written; it need not exist. The other workers wait
      meanwhile, so give a connection a timeout: the agent takes this worker for hung after 300 s.
    - ``last_step() -> int``: after ``open``. Returns the last step that the tracker holds, 0 if it holds none. Steps up to it are
      not handed over. Without this method, some steps come twice if another worker becomes rank 0.
    - ``flush()``: after the steps of each exchange. When it returns, the steps survive this process.
    - ``held() -> int``: for a tracker that writes in the background: the last step that survives this process. Without this method
      that is so for every step whose ``log`` and ``flush`` have returned.
    - ``settle()``: at the end of each loop. It may wait, for a limited time, until ``held()`` is the last step.
    - ``close()``: when this worker is not rank 0 any more, and at the end of the run, also if a method has raised before, such as
      ``open``. ``open`` may follow.
    """

    def log(self, step: int, values: dict[str, float]) -> None: ...


@dataclass
class _OpenTracker:
    tracker: Any
    name: str
    last: int = 0
    """The last step that was handed over, or that it held when it was opened."""
    flushed: int = 0
    """The last step that was handed over and flushed."""
    is_open: bool = False
    must_close: bool = False
    """Whether ``open`` was called: if it has raised, it may have opened a part."""
    has_failed: bool = False
    """Whether it has failed, and has not worked again."""
    next_try: float = 0.0
    """When it is opened again (time.monotonic)."""

    @property
    def held(self) -> int:
        return int(self.tracker.held()) if hasattr(self.tracker, "held") else self.last


class Trackers:
    """The trackers of a run. ``announce(what, limit_s)`` tells the agent that the others must wait for this worker.

    ``made()`` is the number of steps that the run has made.

    A tracker that raises is opened again after a pause: training does not depend on it, and does not wait for it more than a small
    part of the time. The backlog keeps the steps that it lacks, up to a limit.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        backlog: TrackerBacklog,
        folder: Path,
        notify: Callable[[str], None],
        announce: Callable[[str, float], AbstractContextManager[None]],
        made: Callable[[], int],
    ) -> None:
        self._given, self._backlog, self._folder, self._notify, self._announce = trackers, backlog, folder, notify, announce
        self._made = made
        self._open: list[_OpenTracker] | None = None
        """None if this worker is not rank 0."""

    @property
    def are_configured(self) -> bool:
        return bool(self._given)

    def enter_generation(self, *, is_main: bool) -> None:
        """Open the trackers and hand over the backlog if this worker is rank 0 of the new generation, else close them."""
        if is_main:
            self.hand_over()
        else:
            self.close()

    def hand_over(self) -> None:
        """Hand the steps of the backlog to the trackers. Rank 0 calls it."""
        if self._open is None:
            self._open = [self._not_open(tracker, index) for index, tracker in enumerate(self._given)]
        for each in self._open:
            if each.is_open or time.monotonic() >= each.next_try:
                self._attempt(each, lambda each=each: self._bring_up_to_date(each))  # type: ignore[misc]
            if each.is_open and each.has_failed:
                each.has_failed = False
                self._notify(f"{each.name} works again, and has got the steps up to {each.last}.")

    def report(self) -> TrackerReport | None:
        """Return what rank 0 tells all workers in each exchange; None if this worker is not rank 0."""
        if self._open is None:
            return None
        held = [self._backlog.last_step]
        for each in self._open:
            if each.is_open:
                self._attempt(each, lambda each=each: held.append(each.held))  # type: ignore[misc]
        if not all(each.is_open for each in self._open):
            held.append(max(self._backlog.held, self._backlog.kept_after()))
        now = time.monotonic()
        return min(held), [0.0 if each.is_open else max(0.0, each.next_try - now) for each in self._open]

    def settle(self, *, is_last: bool = False) -> TrackerReport | None:
        """Let trackers that write in the background write everything. Returns what ``report`` returns.

        ``is_last``: the script ends. Then trackers that fail are tried once more, before their pause is over.
        """
        if is_last and self._open is not None:
            for each in self._open:
                each.next_try = 0.0
            self.hand_over()
        for each in self._open or []:
            if each.is_open and hasattr(each.tracker, "settle"):
                self._attempt(each, lambda each=each: self._call(each, each.tracker.settle))  # type: ignore[misc]
        return self.report()

    def close(self) -> None:
        """Close the trackers that are open, also in part. May be called twice."""
        opened, self._open = self._open or [], None
        for each in opened:
            if each.has_failed and each.last < self._backlog.last_step:
                self._notify(f"{each.name} has not worked again. It lacks the steps after step {each.last}.")
            if each.must_close and hasattr(each.tracker, "close"):
                self._attempt(each, lambda each=each: self._call(each, each.tracker.close))  # type: ignore[misc]

    def _not_open(self, tracker: Any, index: int) -> _OpenTracker:
        """Return a tracker that this worker has not opened yet. If it has failed on an earlier rank 0, the pause continues."""
        held, next_try = self._backlog.held, self._backlog.next_try(index)
        has_failed = next_try > time.monotonic()
        return _OpenTracker(tracker, _name_of(tracker), last=held, flushed=held, has_failed=has_failed, next_try=next_try)

    def _bring_up_to_date(self, each: _OpenTracker) -> None:
        """Open the tracker if it is not open, and hand over the steps that it lacks."""
        if not each.is_open:
            each.must_close = True
            with self._announce(f"opening {each.name}", _LIMIT_S):
                self._begin(each)
            each.is_open = True
        if self._backlog.last_step > each.last:
            self._call(each, lambda: self._hand_over_to(each))

    def _begin(self, opened: _OpenTracker) -> None:
        tracker, backlog = opened.tracker, self._backlog
        if hasattr(tracker, "open"):
            tracker.open(backlog.run_id, self._folder / backlog.run_id)
        if not hasattr(tracker, "last_step"):
            return
        opened.last = opened.flushed = int(tracker.last_step())
        if opened.last < backlog.held:
            self._notify(
                f"{opened.name} holds the steps up to {opened.last}, and the run goes on after step {backlog.held}: the steps in "
                "between are missing there. Does this machine see the files that rank 0 has written before?"
            )
        if opened.last > self._made():
            self._notify(
                f"{opened.name} holds the steps up to {opened.last} already, and the run goes on after step {self._made()}: the "
                "steps in between keep their earlier values there."
            )

    def _hand_over_to(self, each: _OpenTracker) -> None:
        tracker = each.tracker
        for step, values in self._backlog.steps:
            if step > each.last:
                tracker.log(step, dict(values))
                each.last = step
        if each.last > each.flushed and hasattr(tracker, "flush"):
            tracker.flush()
        each.flushed = each.last

    def _call(self, each: _OpenTracker, act: Callable[[], object]) -> None:
        """Call ``act``, which writes to the tracker. The agent learns of it if it takes longer than a moment."""
        is_local = getattr(each.tracker, "is_local", False)
        with nullcontext() if is_local else self._announced_if_slow(f"writing to {each.name}"):
            act()

    @contextmanager
    def _announced_if_slow(self, what: str) -> Iterator[None]:
        """Announce ``what`` if the block takes longer than a moment: a tracker may wait for a server."""
        with ExitStack() as announced:
            timer = threading.Timer(_MOMENT_S, lambda: announced.enter_context(self._announce(what, _LIMIT_S)))
            timer.daemon = True
            timer.start()
            try:
                yield
            finally:
                timer.cancel()
                timer.join()

    def _attempt(self, each: _OpenTracker, act: Callable[[], object]) -> None:
        """Call ``act``. If the tracker raises, say so once, and open it again after a pause."""
        began = time.monotonic()
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and this worker must go on with the others
            if hasattr(each.tracker, "flush"):
                each.last = each.flushed
            failed = time.monotonic()
            pause_s = max(_RETRY_S, _PAUSE_FACTOR * (failed - began))
            if not each.has_failed:
                self._notify(
                    f"{each.name} has failed after step {each.last} ({type(error).__name__}: {error}). Training continues. The "
                    f"tracker is tried again after {pause_s:.0f} s, and gets the steps that it lacks then."
                )
            each.is_open, each.has_failed, each.next_try = False, True, failed + pause_s


def _name_of(tracker: Any) -> str:
    return f"the tracker {getattr(tracker, 'name', None) or type(tracker).__name__}"
