"""Where the time of the steps goes, computed from made-up records of known lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.recording.breakdown import breakdown
from lockstep.recording.records import BACKWARD, CHECKPOINT, DATA, EXCHANGE, FORWARD, LANE, OUTSIDE, UNKNOWN, BucketTimes, Span
from tests.recordings import step_of


def test_no_records_give_an_empty_breakdown() -> None:
    found = breakdown([])
    assert (found.steps, found.seconds, found.phases, found.workers, found.hidden, found.lanes) == (0, 0.0, {}, (), None, {})
    assert found.lane_balance == 1.0


def test_mean_seconds_per_step_and_phase_of_each_worker_and_of_all() -> None:
    steps = [step_of(step, rank, 2, own_us={DATA: 1000 * (1 + rank) * step}) for step in (1, 2) for rank in (0, 1)]
    found = breakdown(steps)
    assert found.steps == 2
    assert found.phases[DATA] == pytest.approx((1 + 2 + 2 + 4) / 4 / 1e3)
    assert found.workers[0].phases[DATA] == pytest.approx(1.5e-3)
    assert found.workers[1].phases[DATA] == pytest.approx(3e-3)
    assert found.seconds == pytest.approx(sum(found.phases.values()))
    for worker in found.workers:
        assert worker.own_s + worker.waits_s == pytest.approx(worker.seconds)


def test_repeated_steps_and_pauses_are_not_counted() -> None:
    record = step_of(1, 0, 1)
    assert breakdown([record, replace(record, committed=False), replace(record, kind="pause")]) == breakdown([record])


def test_a_bucket_that_is_done_before_the_end_of_backward_is_hidden() -> None:
    record = step_of(1, 0, 2)
    spans = (Span(FORWARD, 0, 100), Span(BACKWARD, 100, 200), Span(EXCHANGE, 200, 300))
    hidden = replace(record, spans=spans, buckets=(BucketTimes(0, 120, 180, 1),))
    assert breakdown([hidden]).hidden == 1.0
    half = replace(record, spans=spans, buckets=(BucketTimes(0, 150, 250, 1), BucketTimes(1, 160, 250, 1)))
    assert breakdown([half]).hidden == pytest.approx(0.5)
    exposed = replace(record, spans=spans, buckets=(BucketTimes(0, 200, 300, 1),))
    assert breakdown([exposed]).hidden == 0.0
    alone = replace(hidden, size=1)
    assert breakdown([alone]).hidden is None


def test_exactness_is_the_part_of_the_phase_lane_and_lanes_are_counted() -> None:
    record = replace(step_of(1, 0, 2, lanes=(0, 3)), spans=(Span(LANE, 0, 10), Span(FORWARD, 10, 100)))
    other = replace(step_of(1, 1, 2, lanes=(3, 4)), spans=(Span(FORWARD, 0, 100),))
    found = breakdown([record, other])
    assert found.exactness == pytest.approx(0.05)
    assert found.lanes == {0: 3, 1: 1}
    assert found.lane_balance == pytest.approx(2 / 3)


@pytest.mark.parametrize("every", [1000, 64, 1001])
def test_the_share_of_checkpoints_is_right_if_only_some_steps_are_recorded(every: int) -> None:
    stride, records = 64, []
    for step in range(1, 64_001):
        saves = step % every == 0
        record = replace(step_of(step, 0, 1), stride=stride, spans=(Span(FORWARD, 0, 1000),))
        if step % stride == 0:
            spans = (*record.spans, Span(CHECKPOINT, 1000, 101_000)) if saves else record.spans
            records.append(replace(record, spans=spans))
        elif saves:
            records.append(replace(record, kind="pause", spans=(Span(CHECKPOINT, 0, 100_000),)))
    found = breakdown(records)
    assert found.phases[FORWARD] == pytest.approx(1e-3)
    assert found.phases[CHECKPOINT] == pytest.approx(0.1 * (64_000 // every) / 64_000)
    assert found.seconds == pytest.approx(sum(found.phases.values()))


def test_each_phase_of_a_step_hides_what_happens_in_its_own_backward() -> None:
    spans = (Span(BACKWARD, 0, 100), Span(EXCHANGE, 100, 200), Span(BACKWARD, 200, 300), Span(EXCHANGE, 300, 400))
    record = replace(step_of(1, 0, 2), spans=spans, buckets=(BucketTimes(0, 50, 200, 1), BucketTimes(0, 300, 400, 1)))
    assert breakdown([record]).hidden == pytest.approx(50 / 250)


def test_nothing_is_said_of_communication_whose_end_is_not_known() -> None:
    record = replace(step_of(1, 0, 2), buckets=(BucketTimes(0, 50, UNKNOWN, 1),))
    assert breakdown([record]).hidden is None


def test_the_checkpoint_at_the_end_of_a_loop_counts_and_the_rest_of_that_pause_does_not() -> None:
    step = replace(step_of(1, 0, 1), spans=(Span(FORWARD, 0, 1000),))
    end = replace(step, kind="pause", spans=(Span(DATA, 0, 5000), Span(CHECKPOINT, 5000, 6000)))
    between = replace(step, kind="pause", spans=(Span(OUTSIDE, 0, 5000), Span(CHECKPOINT, 5000, 6000)))
    found = breakdown([step, end, between])
    assert found.phases == {FORWARD: pytest.approx(1e-3), CHECKPOINT: pytest.approx(1e-3)}


def test_workers_that_are_gone_do_not_count_for_the_balance_of_lanes() -> None:
    before = [step_of(1, rank, 3, lanes=(2 * rank, 2 * rank + 2)) for rank in range(3)]
    after = [step_of(2, rank, 2, lanes=(3 * rank, 3 * rank + 3), generation=1) for rank in range(2)]
    found = breakdown([*before, *after])
    assert found.lanes == {0: 3, 1: 3}
    assert found.lane_balance == 1.0
