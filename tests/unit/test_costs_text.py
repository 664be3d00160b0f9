"""The sentence about where the time of the steps went."""

from __future__ import annotations

from dataclasses import replace

from lockstep.recording.costs_text import costs_text
from lockstep.recording.records import BACKWARD, DATA, LANE, Span, StepRecord
from tests.recordings import BEGIN, step_of


def steps(late_us: int = 0, lanes: tuple[int, ...] = (2, 2), **own_us: int) -> list[StepRecord]:
    made = []
    for step in range(1, 21):
        for rank, count in enumerate(lanes):
            mine = {BACKWARD: 50_000 + (late_us if rank == 1 else 0), **own_us}
            before = 1000 + 30_000 + 50_000 + late_us
            made.append(step_of(step, rank, len(lanes), at=BEGIN + step, own_us=mine, slowest_us=before, lanes=(0, count)))
    return made


def test_the_shares_of_a_step_are_named() -> None:
    text = costs_text(steps())
    assert text.startswith("a step: 95% computation, 1.1% loading data, 3.5% waiting for workers and transport")
    assert "of the communication is hidden" in text
    assert "rank" not in text
    assert "lanes" not in text


def test_the_worker_for_which_the_others_wait_is_named() -> None:
    assert "waiting for workers and transport (most for rank 1)" in costs_text(steps(late_us=20_000))


def test_a_replacement_is_named_by_its_rank_and_its_number() -> None:
    late = [replace(each, worker=4 if each.rank == 1 else each.worker) for each in steps(late_us=20_000)]
    assert "(most for rank 1 (worker 4))" in costs_text(late)


def test_slow_loaders_and_the_cost_of_exactness_are_named() -> None:
    slow = steps(**{DATA: 30_000})
    assert "25% loading data" in costs_text(slow)
    for_lanes = [
        replace(each, spans=(*each.spans, Span(LANE, each.spans[-1].end_us, each.spans[-1].end_us + 2000))) for each in slow
    ]
    assert "1.6% exactness" in costs_text(for_lanes)


def test_unequal_lanes_are_named() -> None:
    assert "workers have 2 or 3 lanes, and the steps wait for those that have most" in costs_text(steps(lanes=(3, 2)))


def test_a_few_steps_say_nothing() -> None:
    assert costs_text([]) == ""
    assert costs_text(steps()[:8]) == ""
