"""What real runs record of themselves, also through kills, and that recording changes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.recording import records
from lockstep.recording.reader import NewRecords, RecordingReader
from lockstep.recording.records import StepRecord
from tests.cluster import Cluster
from tests.commands import lockstep
from tests.hosts import Hosts
from tests.launch import LaunchedRun
from tests.training_run import TrainingRun


def recorded(run: TrainingRun) -> NewRecords:
    return RecordingReader(run.run_dir).poll()


def steps_of(found: NewRecords, committed: bool = True) -> list[StepRecord]:
    return [each for each in found.steps if each.kind == "step" and each.committed == committed]


def test_every_worker_records_every_step(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", pace_s=0.02)
    run.require_undisturbed(expected)
    found = recorded(run)
    steps = steps_of(found)
    assert {each.rank for each in steps} == {0, 1}
    assert all(each.size == 2 and each.generation == 0 and each.lane_count == 4 for each in steps)
    for record in steps:
        phases = {span.phase for span in record.spans}
        assert {records.DATA, records.FORWARD, records.BACKWARD, records.EXCHANGE} <= phases <= set(records.PHASES)
        assert record.buckets, "no bucket was noted"
        for bucket in record.buckets:
            assert 0 <= bucket.sent_us <= bucket.done_us <= record.seconds * 1e6
    by_step = {step: {each.rank for each in steps if each.step == step} for step in {each.step for each in steps}}
    assert len(by_step) > 25  # at most 20 in a second
    assert sum(ranks == {0, 1} for ranks in by_step.values()) > 0.8 * len(by_step)
    assert [each.step for each in found.metrics] == list(range(1, 61))
    assert any(span.phase == records.EVALUATE for each in found.steps for span in each.spans)


def test_the_clocks_of_the_workers_agree(train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", pace_s=0.02)
    run.result()
    ends: dict[int, list[float]] = {}
    for each in steps_of(recorded(run)):
        done = max(bucket.done_us for bucket in each.buckets) / 1e6
        ends.setdefault(each.step, []).append(each.at + done)
    apart = sorted(max(both) - min(both) for both in ends.values() if len(both) == 2)
    assert apart[len(apart) // 2] < 0.01  # both see the last bucket complete at the same time


def test_a_death_and_the_repeated_step_are_in_the_recording(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", die_in="control", hold_at=40, pace_s=0.02)
    run.wait_for_generation(2)
    run.hurry()
    run.require_undisturbed(expected)
    found = recorded(run)
    assert {each.generation for each in found.steps} >= {0, 1, 2}
    assert {each.worker for each in found.steps} == {0, 1, 2, 3}
    recoveries = [each for each in found.steps for span in each.spans if span.phase == records.RECOVERY]
    assert {each.worker for each in recoveries} >= {0, 2}
    assert [each.step for each in found.metrics] == list(range(1, 61))


def test_recording_can_be_switched_off_and_changes_no_bit(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", env={"LOCKSTEP_RECORD": "off"})
    run.require_undisturbed(expected)
    assert not (run.run_dir / "recording").exists()


def test_a_typo_in_the_switch_is_named(train: Callable[..., TrainingRun]) -> None:
    run = train(2, env={"LOCKSTEP_RECORD": "no"})
    assert run.wait() != 0
    assert "LOCKSTEP_RECORD='no' is not a choice. Set it to off" in run.output()


@pytest.mark.slow
def test_a_run_without_a_place_to_record_goes_on(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", hold_at=5)
    run.wait_for_generation()
    recording = run.run_dir / "recording"
    for path in list(recording.iterdir()) if recording.exists() else []:
        path.unlink()
    run.hurry()
    run.require_undisturbed(expected)


@pytest.mark.slow
def test_the_head_records_the_steps_of_all_machines_by_its_own_clock(
    expected: str, hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    with Cluster(hosts(2), tmp_path / "cluster", pace_s=0.02) as cluster:
        cluster.start()
        assert cluster.result() == expected, cluster.dump()
        steps = steps_of(RecordingReader(cluster.head["a"].run_dir).poll())
    assert {each.rank for each in steps} == {0, 1, 2, 3}
    ends: dict[int, dict[int, float]] = {}
    for each in steps:
        done = max(bucket.done_us for bucket in each.buckets) / 1e6
        ends.setdefault(each.step, {})[each.rank] = each.at + done
    apart = [max(found.values()) - min(found.values()) for found in ends.values() if len(found) == 4]
    assert len(apart) > 10
    assert statistics.median(apart) < 0.02
    assert sum(each.link_us for each in steps) > 0


_LEAVES_EARLY = """
import sys, time, torch, lockstep
data = torch.utils.data.TensorDataset(torch.randn(2048, 8))
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=2)
def train(batch):
    time.sleep(0.06)  # so that each step is recorded
    model(batch[0]).square().mean().backward()
if sys.argv[1] == "shard":
    for batch in run.shard(data, global_batch=128):
        train(batch)
        opt.step(); opt.zero_grad()
        if run.committed and run.step == 5:
            break
else:
    for step in run.steps(data, global_batch=128):
        for batch in step:
            train(batch)
        opt.step(); opt.zero_grad()
        if run.step == 4:
            break
"""


@pytest.mark.parametrize("loop", ["shard", "steps"])
def test_the_step_in_which_a_loop_is_left_is_recorded(loop: str, launch: Callable[..., LaunchedRun]) -> None:
    run = launch(_LEAVES_EARLY, workers=2, args=[loop])
    assert run.wait() == 0, run.dump()
    steps = steps_of(RecordingReader(run.run_dir).poll())
    assert sorted((each.step, each.rank) for each in steps) == [(step, rank) for step in range(1, 6) for rank in (0, 1)]


_IS_STOPPED = """
import sys, time, torch, lockstep
data = torch.utils.data.TensorDataset(torch.randn(1 << 16, 8))
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=2, checkpoint="saved here")
def train(batch):
    time.sleep(0.06)  # so that each step is recorded
    model(batch[0]).square().mean().backward()
    if run.step == 4:
        open(f"pid-{run.rank}", "w").write("0\\n")
if sys.argv[1] == "shard":
    for batch in run.shard(data, global_batch=8):
        train(batch)
        opt.step(); opt.zero_grad()
else:
    for step in run.steps(data, global_batch=8):
        for batch in step:
            train(batch)
        opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("loop", ["shard", "steps"])
def test_the_last_step_of_a_run_that_is_stopped_is_recorded_with_its_checkpoint(
    loop: str, launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    run = launch(_IS_STOPPED, workers=2, args=[loop])
    run.pids(2)
    done = lockstep("stop", run.run_dir, folder=tmp_path)
    assert done.code == 0, done.err
    run.wait()
    (end,) = run.events("end")
    steps = steps_of(RecordingReader(run.run_dir).poll())
    last = [each for each in steps if each.step == end["stopped_after"]]
    assert sorted(each.rank for each in last) == [0, 1]
    assert all(each.phase_s(records.CHECKPOINT) > 0 for each in last)


_LOADS = """
import sys, time, torch, lockstep
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(8)
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=4)
given = dict(global_batch=4, collate_fn=torch.utils.data.default_collate)
if sys.argv[1] == "shard":
    for batch in run.shard(Data(), **given):
        model(batch).square().mean().backward()
        opt.step(); opt.zero_grad()
else:
    for step in run.steps(Data(), **given):
        for batch in step:
            model(batch).square().mean().backward()
        opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("loop", ["shard", "steps"])
def test_loading_counts_as_data_in_each_lane(loop: str, launch: Callable[..., LaunchedRun]) -> None:
    run = launch(_LOADS, workers=2, args=[loop])
    assert run.wait() == 0, run.dump()
    steps = steps_of(RecordingReader(run.run_dir).poll())
    assert len(steps) > 20
    assert statistics.median(each.phase_s(records.DATA) for each in steps) > 0.055  # two samples
    assert statistics.median(each.phase_s(records.LANE) for each in steps) < 0.02


_WAITS_IN_DATA_AND_BODY = """
import os, sys, time, torch, lockstep
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(30 * 8):
            if sys.argv[1] == "stream" and run.rank == 1 and number % 8 == 0:
                time.sleep(0.1)
            yield torch.ones(8)
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=2)
for step in run.steps(Stream(), global_batch=8):
    for batch in step:
        model(batch).square().mean().backward()
    if sys.argv[1] != "stream" and run.rank == 1:
        time.sleep(0.1)
    if sys.argv[1] == "gather":
        run.gather(1)
    elif sys.argv[1] == "step.gather":
        step.gather(lambda batch: 1)
    opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("what", ["stream", "gather", "step.gather"])
def test_a_wait_for_the_loader_or_the_body_of_another_worker_is_no_work(what: str, launch: Callable[..., LaunchedRun]) -> None:
    run = launch(_WAITS_IN_DATA_AND_BODY, workers=2, args=[what])
    assert run.wait() == 0, run.dump()
    steps = steps_of(RecordingReader(run.run_dir).poll())
    own = [statistics.median(each.phase_s(*records.OWN_WORK) for each in steps if each.rank == rank) for rank in (0, 1)]
    waits = [statistics.median(each.phase_s(records.BETWEEN) for each in steps if each.rank == rank) for rank in (0, 1)]
    assert own[0] < 0.06 < 0.09 < own[1]
    assert waits[1] < 0.05 < waits[0]
