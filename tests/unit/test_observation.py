"""What the agent makes of the packets of its workers: times by one clock, also in a long run, or after a suspend."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from lockstep.launcher.observation import Observation
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.supervisor import Settings, Supervisor
from lockstep.recording.records import StepRecord
from tests.recordings import step_of


class Clock:
    """The two clocks of this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monotonic, self.unix = 1000.0, 5_000_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(time, "time", lambda: self.unix)

    def advance(self, seconds: float) -> None:
        self.monotonic += seconds
        self.unix += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def seen() -> list[StepRecord]:
    return []


@pytest.fixture
def observation(tmp_path: Path, clock: Clock, seen: list[StepRecord]) -> Any:
    run_folder = RunFolder.create(str(tmp_path / "run"), 0.0)
    made = Observation(run_folder, "here", lambda worker: "here" if worker == 0 else "there", seen.append)
    yield made
    made.close()
    run_folder.close()


def packet(at: float, worker: int = 0, **more: Any) -> dict[str, Any]:
    now = {"phase": "data", "since": at, "step": 1, "lanes": (0, 1), "memory_bytes": 1}
    return {"type": "steps", "records": [step_of(1, worker % 2, 2, worker=worker, at=at).to_json() | more], "now": now, "sent": at}


def test_records_of_another_machine_follow_its_clock_when_it_drifts(
    observation: Observation, clock: Clock, seen: list[StepRecord]
) -> None:
    ahead = 200.0  # of the other clock
    for _ in range(2000):
        clock.advance(60.0)
        ahead -= 0.001  # 1.4 s in a day: the offset grows
        clock.monotonic += 0.002  # the way of the packet
        clock.unix += 0.002
        observation.on_packet(1, packet(clock.monotonic - 0.002 + ahead, 1))
        assert seen[-1].at == pytest.approx(clock.unix, abs=0.005)


def test_records_have_the_time_of_day_after_the_machine_was_suspended(
    observation: Observation, clock: Clock, seen: list[StepRecord]
) -> None:
    clock.advance(10.0)
    observation.on_packet(0, packet(clock.monotonic))
    clock.unix += 3600.0  # time.monotonic stands still meanwhile
    observation.on_packet(0, packet(clock.monotonic))
    assert seen[-1].at == pytest.approx(clock.unix)


def test_some_steps_of_every_worker_are_kept_however_many_there_are(observation: Observation, clock: Clock) -> None:
    for _ in range(20):
        clock.advance(1.0)
        for worker in range(300):
            observation.on_packet(worker, packet(clock.monotonic, worker))
    assert 12 * 300 <= len(observation.recent) <= 20 * 300


def test_a_packet_that_makes_no_sense_is_left_out(observation: Observation, seen: list[StepRecord]) -> None:
    good = packet(1.0)
    for bad in (
        {"records": 3},
        {"sent": None},
        {"now": {}},
        {"records": [{"at": 1.0, "kind": "step", "spans": [["data", 0, float("inf")]]}]},
    ):
        observation.on_packet(0, good | bad)
    assert seen == []


def test_workers_of_a_lost_machine_are_forgotten(tmp_path: Path) -> None:
    run_folder = RunFolder.create(str(tmp_path / "run"), 0.0)
    supervisor = Supervisor(Settings(4), MagicMock(), run_folder, MagicMock(), MagicMock(), time.monotonic)
    for worker in range(4):
        supervisor.on_packet(worker, packet(time.monotonic(), worker))
    observation = supervisor._observer._observation
    assert set(observation.workers) == {0, 1, 2, 3}
    supervisor.on_machine_lost((2, 3), 2, "machine b is lost")
    assert set(observation.workers) == {0, 1}
    supervisor.close()
    run_folder.close()


@pytest.mark.parametrize(
    "field",
    [
        {"step": None},
        {"size": "x"},
        {"rank": []},
        {"rank": 2},
        {"rank": -1},
        {"stride": "often"},
        {"stride": 0},
        {"epoch": float("nan")},
        {"lanes": [3, 1]},
        {"page_faults": {}},
        {"kind": 3},
        {"spans": [["data", 0, 10**400, 0, 0]]},
    ],
)
def test_a_record_with_a_wrong_field_is_left_out(
    observation: Observation, clock: Clock, seen: list[StepRecord], field: dict[str, Any]
) -> None:
    bad, good = packet(clock.monotonic, **field), packet(clock.monotonic)
    observation.on_packet(0, good | {"records": bad["records"] + good["records"]})
    assert [each.step for each in seen] == [1]


def test_a_record_belongs_to_the_worker_that_sent_it(observation: Observation, clock: Clock, seen: list[StepRecord]) -> None:
    observation.on_packet(0, packet(clock.monotonic) | {"records": [step_of(1, 1, 2, worker=9, at=clock.monotonic).to_json()]})
    assert [each.worker for each in seen] == [0]


def test_a_packet_with_a_time_that_is_no_number_is_left_out(observation: Observation, seen: list[StepRecord]) -> None:
    for sent in (float("nan"), float("inf"), None):
        observation.on_packet(1, packet(1.0, 1) | {"sent": sent})
    assert seen == []
    assert not observation.workers


def test_records_of_a_machine_that_was_started_again_or_suspended_have_the_right_time_at_once(
    observation: Observation, clock: Clock, seen: list[StepRecord]
) -> None:
    other = 9000.0
    for behind in (0.0, 9000.0, 9030.0):  # of the other clock: it begins at 0 again, then it stands still for 30 s
        for _ in range(3):
            clock.advance(1.0)
            observation.on_packet(1, packet(clock.monotonic + other - behind, 1))
            assert seen[-1].at == pytest.approx(clock.unix)


def test_a_cloned_machine_with_our_name_has_a_clock_of_its_own(
    observation: Observation, clock: Clock, seen: list[StepRecord]
) -> None:
    observation.on_packet(0, packet(clock.monotonic + 500.0))
    assert seen[-1].at == pytest.approx(clock.unix)
    observation.on_packet(0, packet(clock.monotonic - 1.5))  # a packet of this machine that was under way
    assert seen[-1].at == pytest.approx(clock.unix - 1.5)
