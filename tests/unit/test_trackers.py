"""The backlog of steps, and trackers that fail."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.tracker_backlog import TrackerBacklog
from lockstep.observe.tracker_csv import Csv
from lockstep.observe.trackers import Trackers
from tests.local_trackers import Notes, rows_of, train


class Background(Notes):
    """A tracker that holds less than it got."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def last_step(self) -> int:
        return self.written

    def held(self) -> int:
        return self.written


def made(
    *trackers: Any, backlog: TrackerBacklog | None = None, folder: Path = Path("nowhere"), made_steps: int = 3
) -> tuple[Trackers, list[str]]:
    notices: list[str] = []
    if backlog is None:
        backlog = filled(3)
    return Trackers(trackers, backlog, folder, notices.append, lambda what, limit_s: nullcontext(), lambda: made_steps), notices


def filled(steps: int) -> TrackerBacklog:
    backlog = TrackerBacklog(is_kept=True)
    backlog.run_id = "curves"
    for step in range(1, steps + 1):
        backlog.add(step, {"loss": 1 / step})
    return backlog


# -- the backlog ---------------------------------------------------------------------------------------


def test_the_backlog_keeps_what_a_tracker_in_the_background_does_not_hold_yet() -> None:
    tracker, backlog = Background(), filled(3)
    trackers, _ = made(tracker, Notes(), backlog=backlog)
    trackers.hand_over()
    assert [step for step, _ in tracker.got] == [1, 2, 3]
    tracker.written = 2
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == [3]
    successor = Background()
    successor.written = 2
    made(successor, backlog=backlog)[0].hand_over()
    assert [step for step, _ in successor.got] == [3]


def test_a_worker_that_is_not_rank_0_confirms_nothing() -> None:
    trackers, _ = made(Notes())
    trackers.enter_generation(is_main=False)
    assert trackers.report() is None


def test_the_backlog_travels_with_the_state_bit_for_bit() -> None:
    backlog = filled(0)
    backlog.add(7, {"loss": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf})
    received = TrackerBacklog(is_kept=True)
    received.restore(backlog.capture())
    assert received.run_id == "curves"
    assert repr(received.steps) == repr(backlog.steps)


def test_a_state_of_a_run_without_trackers_can_be_adopted() -> None:
    backlog = TrackerBacklog(is_kept=True)
    backlog.restore(None)
    assert backlog.steps == []


def test_a_tracker_that_holds_more_than_the_run_has_made_is_named() -> None:
    tracker = Background()
    tracker.written = 7
    trackers, notices = made(tracker)
    trackers.hand_over()
    assert notices == [
        "the tracker Background holds the steps up to 7 already, and the run goes on after step 3: the steps in between keep their "
        "earlier values there."
    ]


# -- trackers that fail --------------------------------------------------------------------------------


def test_a_tracker_that_raises_is_named_once_and_the_others_go_on() -> None:
    failing, good = Notes(fails_at=2), Notes()
    trackers, notices = made(failing, good)
    trackers.hand_over()
    trackers.hand_over()
    assert [step for step, _ in failing.got] == [1]
    assert [step for step, _ in good.got] == [1, 2, 3]
    trackers.settle()
    trackers.close()
    assert notices == [
        "the tracker Notes has failed after step 1 (RuntimeError: the disk is full). Training continues. The tracker is tried "
        "again after 30 s, and gets the steps that it lacks then.",
        "the tracker Notes has not worked again. It lacks the steps after step 1.",
    ]


def test_a_tracker_that_works_again_gets_the_steps_that_it_lacks(clock: Clock) -> None:
    failing, good, backlog = Notes(fails_at=2), Notes(), filled(3)
    trackers, notices = made(failing, good, backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == [1, 2, 3]
    failing.fails_at = -1
    backlog.add(4, {"loss": 0.0})
    clock.now += 30.0
    trackers.hand_over()
    assert [step for step, _ in failing.got] == [step for step, _ in good.got] == [1, 2, 3, 4]
    assert notices[1:] == ["the tracker Notes works again, and has got the steps up to 4."]
    backlog.confirm(trackers.report())
    assert not backlog.steps


class Unreachable:
    """A tracker whose server does not answer: each try takes ``takes_s`` of the clock."""

    def __init__(self, clock: Clock, takes_s: float) -> None:
        self.clock, self.takes_s, self.tries, self.closed = clock, takes_s, 0, 0

    def open(self, run_id: str, folder: Path) -> None:
        self.clock.now += self.takes_s
        self.tries += 1
        raise TimeoutError("the server does not answer")

    def log(self, step: int, values: dict[str, float]) -> None:
        raise AssertionError("it is not open")

    def close(self) -> None:
        self.closed += 1


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lockstep.observe.trackers.time", clock)
    monkeypatch.setattr("lockstep.observe.tracker_backlog.time", clock)
    return clock


@pytest.mark.parametrize("takes_s", [0.01, 1.0, 30.0, 200.0])
def test_the_tries_of_a_tracker_that_fails_take_5_percent_of_the_time_at_most(takes_s: float, clock: Clock) -> None:
    tracker = Unreachable(clock, takes_s)
    trackers, _ = made(tracker)
    trackers.hand_over()
    began, tries = clock.now, tracker.tries
    while tracker.tries < 6:
        clock.now += 1.0
        trackers.hand_over()
        trackers.settle()  # a loop ends
        trackers.enter_generation(is_main=True)  # another worker has left or joined
    assert (tracker.tries - tries) * takes_s <= 0.05 * (clock.now - began)


def test_a_tracker_that_fails_is_tried_once_more_when_the_script_ends(clock: Clock) -> None:
    tracker = Unreachable(clock, 30.0)
    trackers, _ = made(tracker)
    trackers.hand_over()
    trackers.settle(is_last=True)
    assert tracker.tries == 2


def test_the_next_rank_0_does_not_try_a_tracker_again_before_the_pause_is_over(clock: Clock) -> None:
    backlog, failing = filled(3), Unreachable(clock, 30.0)
    trackers, _ = made(failing, backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    good, successor = Notes(), Unreachable(clock, 30.0)
    after, notices = made(successor, good, backlog=backlog)
    clock.now += 590.0
    after.hand_over()
    assert (successor.tries, len(good.got)) == (0, 3)
    clock.now += 10.0
    after.hand_over()
    assert successor.tries == 1
    assert notices == [], "the rank 0 before has said that it fails"


def test_a_tracker_that_was_opened_in_part_is_closed(clock: Clock) -> None:
    tracker = Unreachable(clock, 0.0)
    trackers, _ = made(tracker)
    trackers.hand_over()
    trackers.enter_generation(is_main=False)
    trackers.close()
    assert tracker.closed == 1


def test_a_file_is_opened_again_and_its_torn_end_is_cut_off(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = filled(3)
    trackers, _ = made(Csv(), backlog=backlog, folder=tmp_path)
    write_really, room = os.write, [10]

    def write_until_full(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write_really(file, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_until_full)
        trackers.hand_over()
    path = tmp_path / "curves" / "metrics.csv"
    assert not path.read_bytes().endswith(b"\n")
    clock.now += 30.0
    trackers.hand_over()
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3"]


def test_the_steps_that_are_kept_for_a_tracker_that_fails_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.tracker_backlog._MAX_VALUES", 20)
    backlog = filled(100)
    trackers, _ = made(Notes(fails_at=1), backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == list(range(91, 101))


def test_a_call_that_takes_long_is_announced_and_a_short_one_is_not() -> None:
    announced, lasts = threading.Event(), []

    @contextmanager
    def announce(what: str, limit_s: float) -> Iterator[None]:
        lasts.append(what)
        if what.startswith("writing"):
            announced.set()
        yield
        lasts.append(f"not {what}")

    class Slow(Notes):
        def log(self, step: int, values: dict[str, float]) -> None:
            assert step > 1 or announced.wait(30)
            super().log(step, values)

    slow, backlog = Slow(), filled(1)
    trackers = Trackers([slow], backlog, Path("nowhere"), print, announce, lambda: 3)
    trackers.hand_over()
    backlog.add(2, {"loss": 0.0})
    trackers.hand_over()
    assert len(slow.got) == 2
    opening, writing = "opening the tracker Slow", "writing to the tracker Slow"
    assert lasts == [opening, f"not {opening}", writing, f"not {writing}"]


def test_training_continues_if_a_tracker_fails(capfd: pytest.CaptureFixture[str]) -> None:
    failing, good = Notes(fails_at=3), Notes()
    train(track=[failing, good])
    assert [step for step, _ in good.got] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in failing.got] == [1, 2]
    errors = capfd.readouterr().err
    assert errors.count("has failed") == 1
    assert errors.count("It lacks the steps after step 2.") == 1
    assert good.closed == 1


def test_a_tracker_cannot_change_what_another_one_gets() -> None:
    class Changes(Notes):
        def log(self, step: int, values: dict[str, float]) -> None:
            values.clear()

    good = Notes()
    made(Changes(), good)[0].hand_over()
    assert good.got[0] == (1, {"loss": 1.0})
