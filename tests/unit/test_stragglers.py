"""Stragglers in made-up records with the noise of real machines: found in time, with their cause and price, and not in vain."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from lockstep.launcher.straggler_reports import StragglerReports
from lockstep.recording.causes import COMPUTE, LANES, LINK, LOADER, OTHER, STOP, Stop
from lockstep.recording.records import BACKWARD, DATA, FORWARD, OPTIMIZER, Span, StepRecord
from lockstep.recording.stragglers import Straggler, StragglerWatch, diagnose
from tests.recordings import BEGIN, step_of

STEP_US = 92_200
"""A step of made-up records, without noise."""


class MadeRun:
    """Steps with noise. ``sigma``: of one worker's step; half of it is common to all workers, and noise lasts for some steps."""

    def __init__(
        self, size: int, *, sigma: float = 0.015, outliers: float = 0.005, seed: int = 0, lanes: list[int] | None = None
    ) -> None:
        self.size, self._sigma, self._outliers = size, sigma, outliers
        self._rng = random.Random(seed)
        self._common, self._own = 0.0, [0.0] * size
        self._lanes = lanes or [2] * size
        self.step, self.now = 0, BEGIN

    def records(self, **late: Any) -> list[StepRecord]:
        """The next step on all workers. ``late_us``: (rank, phase) -> more time; ``blocked``: that it uses no CPU meanwhile."""
        self.step += 1
        self._common = 0.5 * self._common + 0.87 * self._rng.gauss(0, 1)
        own = []
        for rank in range(self.size):
            self._own[rank] = 0.3 * self._own[rank] + 0.95 * self._rng.gauss(0, 1)
            factor = 1 + self._sigma * 0.7 * (self._common + self._own[rank])
            if self._rng.random() < self._outliers:
                factor += self._rng.expovariate(4)
            mine = {DATA: 1000, FORWARD: 30_000, BACKWARD: 50_000}
            mine = {phase: int(us * max(0.2, factor) * self._lanes[rank] / 2) for phase, us in mine.items()}
            for (who, phase), us in late.get("late_us", {}).items():
                if who == rank:
                    mine[phase] = mine.get(phase, 8000 if phase == OPTIMIZER else 0) + us
            own.append(mine)
        slowest = max(sum(us for phase, us in mine.items() if phase != OPTIMIZER) for mine in own)
        first, made = 0, []
        for rank in range(self.size):
            lanes = (first, first + self._lanes[rank])
            first = lanes[1]
            link = late.get("link_us", {}).get(rank, 0) + self._rng.choice(
                (0, 0, 0, 4000, 44_000 if self._rng.random() < 0.2 else 0)
            )
            exchange = 3000 + late.get("transport_us", 0)
            record = step_of(
                self.step,
                rank,
                self.size,
                at=self.now,
                own_us=own[rank],
                slowest_us=slowest,
                lanes=lanes,
                exchange_us=exchange,
                link_us=link,
            )
            made.append(record)
        self.now += max(record.seconds for record in made)
        return made


def feed(watch: StragglerWatch, records: list[StepRecord]) -> Straggler | None:
    for record in records:
        watch.add(record)
    return watch.verdict()


def steps_until_verdict(run: MadeRun, watch: StragglerWatch, limit: int, **late: Any) -> int | None:
    for step in range(1, limit + 1):
        if feed(watch, run.records(**late)) is not None:
            return step
    return None


@pytest.mark.parametrize(("waits_us", "is_named"), [(1000, True), (60_000, False)])
def test_a_delay_of_the_host_is_no_delay_while_the_worker_waits_longer_for_its_gpu(waits_us: int, is_named: bool) -> None:
    run, watch = MadeRun(2), StragglerWatch()
    verdicts = []
    for _ in range(60):
        made = run.records(late_us={(1, FORWARD): int(0.2 * STEP_US)}, transport_us=waits_us)
        verdicts.append(feed(watch, [replace(each, gpu_memory_bytes=1 << 30) for each in made]))
    assert any(verdict is not None for verdict in verdicts) == is_named


@pytest.mark.parametrize(("phase", "cause"), [(DATA, LOADER), (FORWARD, COMPUTE), (BACKWARD, COMPUTE), (OPTIMIZER, COMPUTE)])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("part", [0.05, 0.2])
def test_a_delay_of_5_or_20_percent_is_found_within_20_steps_with_its_rank_cause_and_price(
    size: int, phase: str, cause: str, part: float
) -> None:
    run, rerun, watch = MadeRun(size, seed=size), MadeRun(size, seed=size), StragglerWatch()
    for _ in range(40):
        assert feed(watch, run.records()) is None
        rerun.records()
    late = {(size - 1, phase): int(part * STEP_US)}
    began, rerun_began = run.now, rerun.now
    within = steps_until_verdict(run, watch, 20, late_us=late)
    assert within is not None
    verdict = None
    for _ in range(60):
        verdict = feed(watch, run.records(late_us=late))
    for _ in range(within + 60):
        rerun.records()
    assert verdict is not None
    assert (verdict.rank, verdict.worker, verdict.cause) == (size - 1, size - 1, cause)
    assert verdict.speedup == pytest.approx((run.now - began) / (rerun.now - rerun_began) - 1, abs=0.03)
    assert verdict.share > 0.6


def test_a_verdict_ends_when_the_delay_ends_and_does_not_flicker() -> None:
    run, watch = MadeRun(3, seed=4), StragglerWatch()
    said = []
    for late in (0, 1, 0):
        for _ in range(60):
            verdict = feed(watch, run.records(late_us={(1, DATA): 6000 * late}))
            said.append(None if verdict is None else (verdict.rank, verdict.cause))
    changes = [(before, after) for before, after in pairwise(said) if before != after]
    assert changes == [(None, (1, LOADER)), ((1, LOADER), None)]
    assert said[120 + 25] is None


def test_delays_of_every_tenth_step_count_with_their_mean() -> None:
    run, watch = MadeRun(3, seed=2), StragglerWatch()
    verdict = None
    for step in range(200):
        late = {(1, DATA): 60_000} if step % 10 == 0 else {}
        verdict = feed(watch, run.records(late_us=late))
    assert verdict is not None
    assert (verdict.rank, verdict.cause) == (1, LOADER)
    assert verdict.speedup == pytest.approx(6000 / STEP_US, abs=0.03)


def test_one_long_step_is_no_straggler() -> None:
    run, watch = MadeRun(2, seed=3), StragglerWatch()
    for step in range(150):
        late = {(1, FORWARD): 2_000_000} if step == 75 else {}
        assert feed(watch, run.records(late_us=late)) is None


def quiet_windows(size: int, seed: int, sigma: float, steps: int) -> tuple[int, int]:
    """How many windows of 20 steps there are, and in how many a verdict begins."""
    run, watch = MadeRun(size, sigma=sigma, outliers=0.01, seed=seed), StragglerWatch()
    alarms, before = 0, None
    for _ in range(steps):
        verdict = feed(watch, run.records())
        alarms += verdict is not None and before is None
        before = verdict
    return steps // 20, alarms


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.01, 0.02, 0.03])
def test_less_than_1_percent_of_quiet_windows_have_a_false_alarm(sigma: float) -> None:
    found = [quiet_windows(size, seed, sigma, 1000) for size in (2, 3, 4) for seed in range(3)]
    assert sum(alarms for _, alarms in found) < 0.01 * sum(windows for windows, _ in found)


@pytest.mark.slow
def test_95_percent_of_delays_of_5_percent_are_found_within_20_steps() -> None:
    right = 0
    for seed in range(100):
        size = 2 + seed % 3
        run, watch = MadeRun(size, sigma=0.02, seed=seed), StragglerWatch()
        for _ in range(60):
            feed(watch, run.records())
        late = {(seed % size, (DATA, FORWARD, BACKWARD)[seed % 3]): int(0.05 * STEP_US)}
        within = steps_until_verdict(run, watch, 20, late_us=late)
        verdict = watch.verdict()
        right += within is not None and verdict is not None and verdict.rank == seed % size
    assert right >= 95


def test_a_slow_link_is_found_though_the_kernel_counts_in_ticks() -> None:
    run, watch = MadeRun(2, seed=6), StragglerWatch()
    for _ in range(40):
        assert feed(watch, run.records()) is None
    late = {"transport_us": 9000, "link_us": {1: 10_000}}
    assert steps_until_verdict(run, watch, 20, **late) is not None
    verdict = None
    for _ in range(60):
        verdict = feed(watch, run.records(**late))
    assert verdict is not None
    assert (verdict.rank, verdict.cause) == (1, LINK)
    assert verdict.speedup == pytest.approx(9000 / STEP_US, abs=0.03)
    assert "its link to other machines" in verdict.sentence()


def test_data_that_waits_in_sockets_without_making_steps_longer_is_no_slow_link() -> None:
    run, watch = MadeRun(3, seed=7), StragglerWatch()
    for step in range(120):
        assert feed(watch, run.records(link_us={1: 20_000 if step > 40 else 0})) is None


def test_a_worker_with_more_lanes_is_late_by_design() -> None:
    run, watch = MadeRun(3, lanes=[4, 2, 2], seed=1), StragglerWatch()
    verdict = None
    for _ in range(40):
        verdict = feed(watch, run.records())
    assert verdict is not None
    assert (verdict.rank, verdict.cause) == (0, LANES)
    assert "it has 4 lanes, the others have 2" in verdict.sentence()
    assert "with as many lanes on every worker" in verdict.sentence()
    assert verdict.speedup == pytest.approx(0.45, abs=0.15)


def test_lanes_that_are_equal_but_for_one_do_not_hide_a_slow_loader() -> None:
    run, watch = MadeRun(3, lanes=[3, 3, 2], seed=1), StragglerWatch()
    verdict = None
    for _ in range(60):
        verdict = feed(watch, run.records(late_us={(1, DATA): 15_000}))
    assert verdict is not None
    assert (verdict.rank, verdict.cause) == (1, LOADER)


def late_records(count: int = 40, **fields: Any) -> Iterator[list[StepRecord]]:
    """Rank 1 is late in its forward by 10%, without using the CPU. ``fields`` of its records."""
    run = MadeRun(2, seed=9)
    for _ in range(count):
        first, second = run.records(late_us={(1, FORWARD): 9000})
        spans = tuple(_without_cpu(span, 9000) if span.phase == FORWARD else span for span in second.spans)
        yield [first, replace(second, spans=spans, **fields)]


def _without_cpu(span: Span, us: int, queue_us: int = 0) -> Span:
    return span._replace(cpu_us=span.cpu_us - us, queue_us=queue_us)


def test_a_worker_that_waits_in_its_forward_computes_too_long_and_the_detail_says_that_it_waits() -> None:
    verdict = diagnose([each for records in late_records() for each in records])
    assert verdict is not None
    assert verdict.cause == COMPUTE
    assert verdict.detail.startswith("it waits meanwhile")


def test_a_worker_that_is_stopped_is_not_called_slow() -> None:
    records = [each for step in late_records() for each in step]
    stops = [Stop(1, each.at + 0.02, 0.008) for each in records if each.rank == 1]
    verdict = diagnose(records, stops)
    assert verdict is not None
    assert verdict.cause == STOP
    assert "it was stopped 40 times in 40 steps (SIGSTOP)" in verdict.sentence()
    other = diagnose(records, [replace(stop, worker=0) for stop in stops])
    assert other is not None
    assert other.cause == COMPUTE


def test_stops_that_were_too_short_to_be_measured_are_counted() -> None:
    records = [each for step in late_records() for each in step]
    verdict = diagnose(records, [Stop(1, records[-1].at, 0.0, times=38)])
    assert verdict is not None
    assert verdict.cause == STOP


def test_a_worker_whose_memory_is_on_a_disk_is_stopped_too() -> None:
    verdict = diagnose([each for records in late_records(page_faults=7) for each in records])
    assert verdict is not None
    assert verdict.cause == STOP
    assert "its memory is on a disk" in verdict.sentence()


def test_a_worker_that_gets_no_core_is_not_blamed_for_what_others_do() -> None:
    records = [each for step in late_records() for each in step]
    records = [_queued(each) if each.rank == 1 else each for each in records]
    verdict = diagnose(records)
    assert verdict is not None
    assert verdict.cause == OTHER
    assert "other processes use its core" in verdict.sentence()


def _queued(record: StepRecord) -> StepRecord:
    spans = tuple(span._replace(queue_us=8500) if span.phase == FORWARD else span for span in record.spans)
    return replace(record, spans=spans)


def test_a_new_generation_ends_the_verdict_and_older_records_are_left_out() -> None:
    run, watch = MadeRun(2), StragglerWatch()
    for _ in range(40):
        feed(watch, run.records(late_us={(1, DATA): 9000}))
    assert watch.verdict() is not None
    old = run.records()
    assert feed(watch, [replace(each, generation=1) for each in run.records()]) is None
    assert feed(watch, old) is None


@pytest.mark.parametrize("change", [{"kind": "pause"}, {"committed": False}, {"spans": ()}])
def test_pauses_and_repeated_steps_are_no_evidence(change: dict[str, Any]) -> None:
    run, watch = MadeRun(2), StragglerWatch()
    for _ in range(60):
        assert feed(watch, [replace(each, **change) for each in run.records(late_us={(1, DATA): 9000})]) is None


def test_a_run_of_one_worker_and_a_lost_record_are_no_error() -> None:
    alone, watch = MadeRun(1), StragglerWatch()
    for _ in range(30):
        assert feed(watch, alone.records()) is None
    run, watch = MadeRun(2), StragglerWatch()
    for step in range(400):
        records = run.records(late_us={(1, DATA): 9000})
        feed(watch, records[: 1 + step % 2])
    assert watch.verdict() is not None
    assert diagnose([]) is None


def test_sentences_are_those_of_the_docs() -> None:
    verdict = Straggler(2, 5, LOADER, 0.94, 0.031, 0.11, 40)
    sentence = "is last in 94% of steps, by 31 ms: its loader; the run would be 11% faster without it"
    assert verdict.sentence() == f"rank 2 (worker 5) {sentence}", "tables and logs show both numbers"
    assert replace(verdict, worker=2).sentence() == f"rank 2 {sentence}"


def test_reports_write_each_change_once_and_show_it() -> None:
    lines: list[tuple[str, dict[str, Any]]] = []
    shown: list[str] = []
    reports = StragglerReports(
        lambda kind, **facts: lines.append((kind, facts)), lambda text, is_new: shown.append(text) if is_new or not text else None
    )
    run, now = MadeRun(3, seed=5), 0.0
    for late in (0, 9000, 0):
        for _ in range(80):
            for record in run.records(late_us={(2, DATA): late}):
                reports.add(record)
            now += 0.1
            reports.on_time(now)
        assert (reports.verdict is not None) == bool(late)
    (begin_kind, begin), (end_kind, end) = lines
    assert begin_kind == end_kind == "verdict"
    assert begin["sentence"].startswith("rank 2 is last in ")
    assert (begin["rank"], begin["worker"], begin["cause"]) == (2, 2, LOADER)
    assert 80 < begin["step"] <= 80 + 25
    assert end["sentence"] == ""
    assert shown == [begin["sentence"] + ".", ""]


def test_the_numbers_of_a_verdict_that_stays_are_written_less_and_less_often() -> None:
    now, written = 0.0, list[tuple[float, int]]()
    reports = StragglerReports(lambda kind, **facts: written.append((now, facts["rank"])), lambda text, is_new: None)
    run = MadeRun(3, seed=5)
    for step in range(2400):
        for record in run.records(late_us={(2, DATA): 9000 + 30 * step}):  # it becomes worse and worse
            reports.add(record)
        now = 0.1 * step
        reports.on_time(now)
    assert {rank for _, rank in written} == {2}
    gaps = [after - before for (before, _), (after, _) in pairwise(written)]
    assert len(gaps) == 5
    assert all(gap >= least for gap, least in zip(gaps, (5.0, 10.0, 20.0, 40.0, 80.0)))


def test_reports_of_a_large_fast_run_look_at_few_steps() -> None:
    reports = StragglerReports(lambda kind, **facts: None, lambda text, is_new: None)
    run, now = MadeRun(64), 0.0
    for _ in range(100):
        for record in run.records():
            reports.add(record)
        now += 0.05
        reports.on_time(now)
    assert reports._stride > 1
