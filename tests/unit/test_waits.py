"""For whom a worker waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.recording.records import BACKWARD, EXCHANGE, UNKNOWN, BucketTimes, Span, StepRecord
from lockstep.recording.waits import waits
from tests.recordings import BEGIN, step_of

_OWN_US = 81_000  # of step_of, before the exchange


def step(step: int, late_us: dict[int, int], size: int = 3) -> list[StepRecord]:
    """All workers begin at once, and ``late_us`` says who computes longer."""
    slowest = _OWN_US + max(late_us.values(), default=0)
    made = []
    for rank in range(size):
        backward = {BACKWARD: 50_000 + late_us.get(rank, 0)}
        record = step_of(step, rank, size, at=BEGIN + step, own_us=backward, slowest_us=slowest, exchange_us=3000)
        sent = _OWN_US + late_us.get(rank, 0)
        made.append(replace(record, buckets=(BucketTimes(0, sent, slowest + 3000, 100),)))
    return made


def test_the_others_wait_for_the_late_worker_and_it_for_nobody() -> None:
    found = waits([each for number in range(10) for each in step(number, {2: 31_000})])
    assert found[0].for_worker == {2: pytest.approx(0.031, abs=1e-5)}
    assert found[1].longest == (2, pytest.approx(0.031, abs=1e-5))
    assert found[2].longest is None
    assert [found[worker].transport_s for worker in range(3)] == [pytest.approx(0.003, abs=1e-5)] * 3


def test_of_two_late_workers_the_later_one_is_waited_for() -> None:
    found = waits(step(1, {1: 10_000, 2: 30_000}))
    assert found[0].for_worker == {2: pytest.approx(0.03, abs=1e-5)}
    assert found[1].for_worker == {2: pytest.approx(0.02, abs=1e-5)}


def test_workers_that_are_late_in_turn_share_the_blame() -> None:
    found = waits([*step(1, {1: 10_000}), *step(2, {2: 20_000})])
    assert found[0].for_worker == {1: pytest.approx(0.005, abs=1e-5), 2: pytest.approx(0.01, abs=1e-5)}


def test_a_clock_that_is_ahead_shifts_a_wait_and_makes_none_negative() -> None:
    made = step(1, {})
    made[1] = replace(made[1], at=made[1].at + 0.002)
    found = waits(made)
    assert all(seconds >= 0 for each in found.values() for seconds in [*each.for_worker.values(), each.transport_s])


def test_a_step_that_lacks_a_record_says_nothing() -> None:
    assert waits(step(1, {2: 31_000})[:2]) == {}
    assert waits([]) == {}


def test_each_exchange_of_a_step_with_several_phases_has_its_own_wait() -> None:
    spans = (
        Span(BACKWARD, 0, 10_000),
        Span(EXCHANGE, 10_000, 40_000),
        Span(BACKWARD, 40_000, 50_000),
        Span(EXCHANGE, 50_000, 52_000),
    )
    deposits = {0: (10_000, 50_000), 1: (39_000, 50_500)}  # rank 1 is late in the first phase
    made = []
    for rank, sent in deposits.items():
        buckets = tuple(BucketTimes(0, at, UNKNOWN, 100) for at in sent)
        made.append(replace(step_of(1, rank, 2, at=BEGIN), spans=spans, buckets=buckets))
    found = waits(made)
    assert found[0].for_worker == {1: pytest.approx(0.0295, abs=1e-5)}
    assert found[0].transport_s == pytest.approx(0.0025, abs=1e-5)
