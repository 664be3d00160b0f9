"""RunSummary: what a run has come to, from its events and its recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.recording.reader import RecordingReader
from lockstep.recording.summary import RunSummary
from lockstep.recording.text import clock, duration, number, plural, steady_number
from tests.recordings import BEGIN, make_run


def summary_of(folder: Path) -> RunSummary:
    found, summary = RecordingReader(folder).poll(), RunSummary()
    for line in found.events:
        summary.add_event(line)
    for record in [*found.steps, *found.metrics]:
        summary.add_record(record)
    return summary


def event(at: float, name: str, *actions: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"time": at, "kind": "event", "event": {name: facts}, "actions": list(actions), "why": ""}


def form(number: int, *members: int) -> dict[str, Any]:
    return {"Form": {"number": number, "members": list(members)}}


def running(*members: int) -> RunSummary:
    summary = RunSummary()
    summary.add_event({"time": 100.0, "kind": "begin", "settings": {}, "pid": 1})
    summary.add_event(event(102.0, "JoinRequested", form(0, *members)))
    for step in range(1, 11):
        summary.add_progress(102.0 + step, step, 0, samples=32 * step, values={"loss": 1 / step})
    return summary


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text", "steady"),
    [
        (0.532149, "0.5321", "0.5321"),
        (0.53, "0.53", "0.5300"),
        (12.3456, "12.35", "12.35"),
        (999.99, "1k", "1.000k"),
        (8100, "8.1k", "8.100k"),
        (2_500_000, "2.5M", "2.500M"),
        (float("nan"), "nan", "nan"),
        (0, "0", "0.000"),
        (5432.0, "5.432k", "5.432k"),
        (-1e300, "-1e+300", "-1.000e+300"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str, steady: str) -> None:
    assert (number(value), steady_number(value)) == (text, steady)


def test_times_are_as_long_as_they_must_be() -> None:
    assert [clock(s) for s in (-1, 0, 7.4, 760, 11_100, 97_500)] == ["0:00", "0:00", "0:07", "12:40", "3:05:00", "1 d 03:05"]
    shown = [duration(s) for s in (0.064, 12.41, 59.96, 760, 7200, 11_100, 183_600)]
    assert shown == ["0.06 s", "12.4 s", "1 min", "12 min 40 s", "2 h", "3 h 5 min", "2 d 3 h"]
    assert (plural(1, "step"), plural(0, "step")) == ("1 step", "0 steps")


# -- from the files of a run -------------------------------------------------------------------------


def test_a_recorded_run_is_summed_up_with_its_fault_and_what_it_cost(tmp_path: Path) -> None:
    summary = summary_of(make_run(tmp_path / "run"))
    assert (summary.state, summary.code, summary.steps, summary.step, summary.generation) == ("ended", 0, 200, 200, 2)
    assert summary.members == (0, 1, 2, 4)
    (fault,) = summary.survived
    assert (fault.worker, fault.what, fault.step) == (3, "worker 3 died (SIGKILL)", 119)
    assert fault.cost_s is not None
    assert 0.1 < fault.cost_s < 0.3
    assert summary.checkpoint == (200, "checkpoints/step-000000100-01a1e4fd0da4e3df")
    # 4 workers with 32 samples each, 3 of them for 20 of the 200 steps
    assert summary.samples_per_s == pytest.approx((200 * 128 - 20 * 32) / (summary.seconds() - 2), rel=0.02)
    steps, faults, checkpoint = summary.lines()
    assert steps.startswith("200 steps in ")
    assert faults == f"1 failure survived, at a cost of {duration(fault.cost_s)}: worker 3 died (SIGKILL) after step 119"
    assert checkpoint == "the newest checkpoint is of step 200 (checkpoints/step-000000100-01a1e4fd0da4e3df)"


def test_the_order_of_events_and_records_does_not_matter(tmp_path: Path) -> None:
    found = RecordingReader(make_run(tmp_path / "run")).poll()
    summary = RunSummary()
    for record in reversed(found.steps):
        summary.add_record(record)
    for line in found.events:
        summary.add_event(line)
    other = summary_of(tmp_path / "run")
    assert (summary.faults, summary.steps, summary.samples_per_s) == (other.faults, other.steps, pytest.approx(other.samples_per_s))


def test_a_run_that_lasts_is_running_and_lasts_until_now(tmp_path: Path) -> None:
    summary = summary_of(make_run(tmp_path / "run", ended=False, dies_at=None))
    assert (summary.state, summary.code) == ("running", None)
    assert summary.seconds(now=BEGIN + 1000) == pytest.approx(1002)
    assert summary.faults_text() == ""


def test_a_run_without_steps_says_nothing() -> None:
    summary = RunSummary()
    assert (summary.state, summary.lines(), summary.steps, summary.samples_per_s) == ("starting", [], 0, None)
    summary.add_event({"time": 1.0, "kind": "begin"})
    summary.add_event({"time": 2.0, "kind": "end", "code": 0, "why": "", "stopped_after": None})
    assert (summary.state, summary.lines()) == ("ended", [])


# -- from reports as they come -----------------------------------------------------------------------


def test_reports_of_progress_give_steps_and_rate() -> None:
    summary = running(0, 1)
    assert (summary.steps, summary.samples_per_s, summary.values) == (10, 32.0, {"loss": 0.1})
    assert summary.lines() == ["10 steps in 12.0 s, 32 samples/s, loss 0.1"]


def test_steps_before_a_run_was_resumed_do_not_count() -> None:
    summary = RunSummary()
    summary.add_event({"time": 0.0, "kind": "begin"})
    for step in (501, 502, 510):
        summary.add_progress(float(step), step, 0, samples=32 * step)
    assert (summary.steps, summary.step, summary.samples_per_s) == (10, 510, 32.0)


def test_a_worker_that_hung_is_one_fault_and_not_two() -> None:
    summary = running(0, 1)
    summary.add_event(event(113.0, "PeersLost", {"Kill": {"worker": 1, "why": "late"}}))
    summary.add_event({"time": 113.1, "kind": "exited", "worker": 1, "pid": 5, "how": "SIGKILL"})
    summary.add_event(event(113.1, "Died", form(1, 0), worker=1))
    assert [(fault.what, fault.is_survived) for fault in summary.faults] == [("worker 1 hung and was killed", False)]
    summary.add_progress(114.5, 11, 1)
    assert [fault.cost_s for fault in summary.survived] == [pytest.approx(1.5)]


def test_faults_at_the_same_time_are_not_counted_twice_in_what_they_cost() -> None:
    summary = running(0, 1, 2)
    for worker in (1, 2):
        summary.add_event({"time": 113.0 + worker / 10, "kind": "exited", "worker": worker, "how": "SIGKILL"})
    summary.add_event(event(113.3, "Ready", form(1, 0)))
    summary.add_progress(114.1, 11, 1)
    assert summary.lost_s() == pytest.approx(1.0)
    assert summary.faults_text() == "2 failures survived, at a cost of 1.0 s at most, and 1.0 s in all"


def test_workers_that_leave_or_end_are_no_faults() -> None:
    summary = running(0, 1, 2)
    summary.add_event({"time": 113.0, "kind": "exited", "worker": 1, "how": "exit code 0"})
    summary.add_event({"time": 113.0, "kind": "exited", "worker": 7, "how": "SIGKILL"})  # no member: a spare
    summary.add_event({"time": 114.0, "kind": "signal", "signal": 15})
    summary.add_event({"time": 114.1, "kind": "exited", "worker": 0, "how": "SIGTERM"})
    summary.add_event({"time": 115.0, "kind": "end", "code": 0, "why": "stopped by SIGTERM", "stopped_after": 10})
    assert (summary.faults, summary.state) == ([], "stopped")


def test_a_fault_that_ends_the_run_was_not_survived() -> None:
    summary = running(0)
    summary.add_event({"time": 113.0, "kind": "exited", "worker": 0, "how": "SIGKILL"})
    summary.add_event(event(113.0, "Died", {"End": {"code": 1, "why": "no worker is left"}}, worker=0))
    summary.add_event({"time": 113.1, "kind": "end", "code": 137, "why": "no worker is left", "stopped_after": None})
    assert (summary.state, len(summary.faults), summary.survived) == ("failed", 1, [])
    assert summary.lines()[-1] == "it failed with code 137: no worker is left"
