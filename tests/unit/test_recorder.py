"""What a worker notes of its steps, and what becomes of it if the agent is slow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.observe.gpu_use import GpuUse
from lockstep.recording.recorder import Recorder, RecorderCallbacks, WorkerState
from lockstep.recording.records import (
    BACKWARD,
    BETWEEN,
    BODY,
    CHECKPOINT,
    DATA,
    EVALUATE,
    EXCHANGE,
    FORWARD,
    OUTSIDE,
    UNKNOWN,
    StepRecord,
    parse,
)
from tests.waiting import wait_until


class Agent:
    """Takes packets, as the socket does: whole packets that can be written as JSON."""

    def __init__(self) -> None:
        self.takes = True
        self.records: list[dict[str, Any]] = []
        self.now: list[dict[str, Any]] = []

    def send(self, **packet: Any) -> bool:
        packet = json.loads(json.dumps(packet))
        if self.takes:
            self.records += packet["records"]
            self.now.append(packet["now"])
        return self.takes

    def steps(self, kind: str = "step") -> list[StepRecord]:
        parsed = [parse(each) for each in self.records]
        return [each for each in parsed if isinstance(each, StepRecord) and each.kind == kind]


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def recorder(agent: Agent) -> Iterator[Recorder]:
    made = Recorder(3, RecorderCallbacks(agent.send, lambda: WorkerState(1, 2, 5, (4, 8))))
    yield made
    made.close()


def spend(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def one_step(recorder: Recorder, step: int, seconds: float = 0.002) -> None:
    for phase in (FORWARD, BACKWARD, EXCHANGE):
        recorder.enter(phase)
        spend(seconds / 3)
    recorder.end_step(step, 0, 16)


def one_step_of_epoch(recorder: Recorder, step: int, epoch: int) -> None:
    spend(0.001)
    recorder.end_step(step, epoch, 16)


def test_the_phases_of_a_step_leave_no_gap_and_the_next_step_begins_where_it_ends(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for step in (1, 2):
        one_step(recorder, step, 0.09)
    recorder.flush()
    first, second = agent.steps()
    assert [span.phase for span in first.spans][-3:] == [FORWARD, BACKWARD, EXCHANGE]
    for before, after in zip(first.spans, first.spans[1:], strict=False):
        assert 0 <= after.begin_us - before.end_us <= 2
    assert second.at - (first.at + first.seconds) < 0.005
    assert 0.02 < first.phase_s(BACKWARD) < 0.5
    assert (first.worker, first.rank, first.size, first.generation, first.lanes, first.samples) == (3, 1, 2, 5, (4, 8), 16)


def test_cpu_time_tells_computing_from_sleeping(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.enter(FORWARD)
    spend(0.03)
    recorder.enter(DATA)
    threading.Event().wait(0.03)
    recorder.end_step(1, 0, 1)
    recorder.flush()
    spans = {span.phase: span for span in agent.steps()[0].spans if span.us > 10_000}
    assert spans[FORWARD].cpu_us > 0.3 * spans[FORWARD].us - spans[FORWARD].queue_us
    assert spans[DATA].cpu_us < 0.3 * spans[DATA].us


def test_a_bucket_has_the_times_of_its_deposit_and_of_its_average(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.enter(BACKWARD)
    recorder.bucket_sent(0, 100)
    recorder.bucket_sent(1, 200)
    spend(0.002)
    recorder.bucket_done(0, time.monotonic_ns() - 1_000_000)
    recorder.bucket_done(1, time.monotonic_ns())
    recorder.end_step(1, 0, 1)
    recorder.flush()
    first, second = agent.steps()[0].buckets
    assert (first.bucket, first.nbytes, second.bucket, second.nbytes) == (0, 100, 1, 200)
    assert first.sent_us <= second.sent_us < second.done_us
    assert 900 < second.done_us - first.done_us < 100_000


def test_of_short_steps_only_some_are_recorded_and_all_workers_choose_the_same(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for step in range(1, 401):
        one_step(recorder, step, 0.001)
    recorder.flush()
    steps = agent.steps()
    assert len(steps) < 100
    for record in steps:
        assert record.stride & (record.stride - 1) == 0
        assert record.step % record.stride == 0
    assert steps[-1].stride >= 8


def test_long_steps_are_recorded_one_by_one_again(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for step in range(1, 81):
        one_step(recorder, step, 0.001 if step <= 16 else 0.06)
    recorder.flush()
    assert max(each.stride for each in agent.steps()) >= 4
    assert agent.steps()[-1].stride <= 4
    assert agent.steps()[-1].step > 76


def test_an_evaluation_in_a_step_that_is_not_recorded_is_recorded_as_a_pause(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for step in range(1, 200):
        one_step(recorder, step, 0.001)
        if not recorder.is_on:
            break
    with recorder.within(EVALUATE), recorder.within(CHECKPOINT):
        spend(0.002)
    assert not recorder.is_on
    recorder.flush()
    assert CHECKPOINT in [span.phase for span in agent.steps("pause")[-1].spans if span.us > 1000]


def test_a_step_that_was_repeated_is_marked(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.enter(FORWARD)
    recorder.end_step(1, 0, 8, committed=False)
    one_step(recorder, 1, 0.06)
    recorder.flush()
    assert [(each.step, each.committed) for each in agent.steps()] == [(1, False), (1, True)]


def test_records_that_the_agent_does_not_take_are_sent_later_in_their_order(agent: Agent, recorder: Recorder) -> None:
    agent.takes = False
    recorder.end_pause(0)
    for step in range(1, 6):
        one_step(recorder, step, 0.06)
        recorder.flush()
    assert not agent.records
    agent.takes = True
    recorder.flush()
    assert [each.step for each in agent.steps()] == [1, 2, 3, 4, 5]


def test_memory_is_bounded_if_the_agent_never_reads(agent: Agent, recorder: Recorder) -> None:
    agent.takes = False
    for step in range(10_000):
        recorder.note_metrics(step, {"loss": 1.0})
    recorder.flush()
    agent.takes = True
    recorder.flush()
    kept = [each["step"] for each in agent.records if each["kind"] == "metrics"]
    assert kept == list(range(10_000 - len(kept), 10_000))
    assert 1000 < len(kept) <= 4096


def test_a_worker_whose_main_thread_waits_still_says_what_it_does(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.enter(EXCHANGE)
    before = len(agent.now)
    wait_until(lambda: len(agent.now) > before + 1, "the worker says twice what it does", 10)
    assert agent.now[-1]["phase"] == EXCHANGE
    assert time.monotonic() - agent.now[-1]["since"] > 0.4
    assert agent.now[-1]["memory_bytes"] > 1 << 20


def test_the_end_of_a_loop_sends_what_was_noted(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    one_step(recorder, 1, 0.01)
    recorder.begin_pause()
    assert [each.step for each in agent.steps()] == [1]
    recorder.close()
    recorder.close()
    assert agent.steps("pause")[-1].spans[0].phase == OUTSIDE


def test_what_a_worker_does_between_its_last_step_and_the_end_of_the_loop_is_recorded(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(4)
    one_step(recorder, 1, 0.06)
    recorder.enter(BETWEEN)
    spend(0.002)
    with recorder.within(CHECKPOINT):
        spend(0.004)
    recorder.begin_pause()
    pause = agent.steps("pause")[-1]
    assert (pause.step, pause.phase_s(CHECKPOINT) > 0.003, pause.phase_s(BETWEEN) > 0.001) == (1, True, True)


def test_a_pause_has_the_epoch_of_its_loop(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(7)
    step = 0
    while recorder.is_on:
        step += 1
        one_step_of_epoch(recorder, step, 7)
    with recorder.within(CHECKPOINT):
        spend(0.002)
    recorder.begin_pause()
    recorder.close()
    assert {each.epoch for each in agent.steps("pause")[1:]} == {7}


def test_waits_in_a_loop_body_are_no_work_and_make_no_pause(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.enter(BODY)
    with recorder.waiting():
        spend(0.004)
    spend(0.002)
    recorder.end_step(1, 0, 16)
    recorder.is_on = False
    with recorder.waiting():
        assert recorder.phase == BETWEEN
    assert recorder.phase == DATA
    recorder.flush()
    assert agent.steps()[0].phase_s(BETWEEN) > 0.003
    assert agent.steps()[0].phase_s(BODY) > 0.001
    assert len(agent.steps("pause")) == 1


def test_in_an_evaluation_and_outside_of_loops_a_wait_has_the_phase_around_it(recorder: Recorder) -> None:
    with recorder.waiting():
        assert recorder.phase == OUTSIDE
    with recorder.within(EVALUATE), recorder.waiting():
        assert recorder.phase == EVALUATE


def test_without_an_agent_nothing_is_noted() -> None:
    recorder = Recorder()
    recorder.end_pause(0)
    one_step(recorder, 1)
    recorder.note_metrics(1, {"loss": 1.0})
    with recorder.within(EVALUATE):
        pass
    recorder.close()
    assert not recorder.is_on
    assert threading.active_count() == len(threading.enumerate())
    assert not any(thread.name == "lockstep-recorder" for thread in threading.enumerate())


def test_a_record_is_the_same_after_json() -> None:
    made = Agent()
    recorder = Recorder(0, RecorderCallbacks(made.send, lambda: WorkerState(0, 1, 0, (0, 1))))
    recorder.end_pause(2)
    one_step(recorder, 1, 0.01)
    recorder.close()
    for record in made.steps():
        assert parse(json.loads(json.dumps(record.to_json()))) == parse(record.to_json())


def test_a_bucket_that_is_sent_twice_in_a_step_has_two_times(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for _ in range(2):
        for bucket in (0, 1):
            recorder.bucket_sent(bucket, 100)
        spend(0.001)
        for bucket in (0, 1):
            recorder.bucket_done(bucket, time.monotonic_ns())
    recorder.bucket_sent(0, 100)  # a worker was lost: it was never complete
    recorder.end_step(1, 0, 1)
    recorder.flush()
    found = agent.steps()[0].buckets
    assert [each.bucket for each in found] == [0, 1, 0, 1]
    assert found[0].done_us <= found[2].sent_us < found[2].done_us


def test_a_completion_belongs_to_the_repeated_pass_and_not_to_the_broken_one(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    for nbytes in (1, 2):  # a worker is lost in the first pass
        recorder.bucket_sent(0, nbytes)
        spend(0.002)
    recorder.bucket_done(0, time.monotonic_ns())
    recorder.end_step(1, 0, 1)
    recorder.flush()
    (found,) = agent.steps()[0].buckets
    assert found.nbytes == 2
    assert found.done_us - found.sent_us > 1500


def test_a_deposit_is_kept_if_its_completion_is_not_known(agent: Agent, recorder: Recorder) -> None:
    recorder.end_pause(0)
    recorder.bucket_sent(0, 100)
    recorder.bucket_done(0, 0)
    recorder.end_step(1, 0, 1)
    recorder.flush()
    (found,) = agent.steps()[0].buckets
    assert (found.done_us, found.nbytes) == (UNKNOWN, 100)


# -- what changes meanwhile ----------------------------------------------------------------------------


class Worker:
    """A worker whose generation and counters change."""

    def __init__(self, agent: Agent) -> None:
        self.state, self.link_us = WorkerState(1, 3, 5, (4, 8)), 0
        self.recorder = Recorder(3, RecorderCallbacks(agent.send, lambda: self.state, link_us=lambda: self.link_us))


def test_a_step_in_which_the_workers_change_is_recorded_with_those_that_began_it(agent: Agent) -> None:
    worker = Worker(agent)
    worker.recorder.end_pause(0)
    one_step(worker.recorder, 1, 0.06)
    worker.recorder.enter(FORWARD)
    worker.state = WorkerState(0, 2, 6, (0, 6))
    assert worker.recorder.lanes == (4, 8)
    worker.recorder.end_step(2, 0, 16, committed=False)
    assert worker.recorder.lanes == (0, 6)
    one_step(worker.recorder, 2, 0.06)
    worker.recorder.close()
    found = [(each.step, each.committed, each.rank, each.size, each.generation, each.lanes) for each in agent.steps()]
    before, after = (1, 3, 5, (4, 8)), (0, 2, 6, (0, 6))
    assert found == [(1, True, *before), (2, False, *before), (2, True, *after)]


def test_a_change_of_workers_while_a_step_is_loaded_is_before_that_step(agent: Agent) -> None:
    worker = Worker(agent)
    worker.recorder.end_pause(0)
    worker.state = WorkerState(0, 2, 6, (0, 6))
    worker.recorder.start_step()
    one_step(worker.recorder, 1, 0.06)
    worker.recorder.close()
    assert [each.generation for each in agent.steps()] == [6]


def test_link_time_is_that_of_one_step_if_only_some_are_recorded(agent: Agent) -> None:
    worker = Worker(agent)
    worker.recorder.end_pause(0)
    for step in range(1001, 1201):  # resumed
        worker.link_us += 500
        one_step(worker.recorder, step, 0.001)
    worker.recorder.close()
    assert agent.steps()[-1].stride >= 8
    assert {each.link_us for each in agent.steps()} == {500}


def test_of_many_workers_each_sends_fewer_records(agent: Agent) -> None:
    worker = Worker(agent)
    worker.state = WorkerState(1, 1000, 5, (4, 8))
    worker.recorder.end_pause(0)
    for step in range(1, 301):
        one_step(worker.recorder, step, 0.005)
    worker.recorder.close()
    assert agent.steps()[-1].stride >= 64


# -- what must not harm a run --------------------------------------------------------------------------


def test_an_error_of_the_recording_ends_the_recording_and_not_the_run(agent: Agent) -> None:
    def fails() -> int:
        raise RuntimeError("the driver is gone")

    said: list[str] = []
    recorder = Recorder(3, RecorderCallbacks(agent.send, lambda: WorkerState(1, 2, 5, (4, 8)), fails, notify=said.append))
    wait_until(lambda: bool(said), "the recorder has asked for the GPU", 10)
    assert said == ["the recording of worker 3 has ended (RuntimeError: the driver is gone). Training continues."]
    one_step(recorder, 1)
    recorder.begin_pause()
    recorder.close()
    assert agent.records == []


def test_a_driver_that_hangs_does_not_hold_up_the_main_thread(agent: Agent) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def hangs() -> int:
        asked.set()
        goes_on.wait(30)
        return -1

    recorder = Recorder(3, RecorderCallbacks(agent.send, lambda: WorkerState(1, 2, 5, (4, 8)), hangs))
    assert asked.wait(10)
    recorder.end_pause(0)
    one_step(recorder, 1)
    recorder.begin_pause()
    assert [each.step for each in agent.steps()] == [1]
    goes_on.set()
    recorder.close()


def test_a_sender_that_hangs_holds_up_the_main_thread_for_a_second_and_loses_nothing(agent: Agent) -> None:
    sends, goes_on = threading.Event(), threading.Event()

    def send(**packet: Any) -> bool:
        if not sends.is_set():
            sends.set()
            goes_on.wait(30)
        return agent.send(**packet)

    recorder = Recorder(3, RecorderCallbacks(send, lambda: WorkerState(1, 2, 5, (4, 8))))
    assert sends.wait(10)
    recorder.end_pause(0)
    one_step(recorder, 1)
    began = time.monotonic()
    recorder.begin_pause()
    assert time.monotonic() - began < 10
    assert not agent.steps()
    goes_on.set()
    recorder.close()
    assert [each.step for each in agent.steps()] == [1]


def test_a_gpu_without_a_driver_library_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotSupported(Exception):
        """As those of pynvml, which are no RuntimeError."""

    asked = []

    def utilization(device: object) -> int:
        asked.append(device)
        raise NotSupported

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    use = GpuUse(torch.device("cuda", 0))
    assert [use.percent(), use.percent()] == [-1, -1]
    assert len(asked) == 1


def test_the_memory_of_a_gpu_is_read_in_the_main_thread_alone(agent: Agent) -> None:
    read_in = []

    def memory() -> int:
        read_in.append(threading.current_thread())
        return 17

    state = WorkerState(1, 2, 5, (4, 8))
    recorder = Recorder(3, RecorderCallbacks(agent.send, lambda: state, lambda: 60, memory))
    recorder.end_pause(0)
    one_step(recorder, 1)
    wait_until(lambda: bool(agent.steps()), "the step was sent", 10)
    recorder.close()
    assert set(read_in) == {threading.main_thread()}
    assert (agent.steps()[0].gpu_memory_bytes, agent.steps()[0].gpu_percent) == (17, 60)


class SmallSocket(Agent):
    """Takes no packet that is longer than ``limit``, as a socket does."""

    limit = 100_000

    def send(self, **packet: Any) -> bool:
        return len(json.dumps(packet)) <= self.limit and super().send(**packet)


def test_records_that_do_not_fit_into_one_packet_are_sent_in_several() -> None:
    agent = SmallSocket()
    recorder = Recorder(0, RecorderCallbacks(agent.send, lambda: WorkerState(0, 1, 0, (0, 1))))
    for step in range(1, 501):
        recorder.note_metrics(
            step, {f"a metric with a name that is long, as users give them to metrics, {k}": step for k in range(12)}
        )
    for _ in range(12):  # each packet that was too long is tried again half as long
        recorder.flush()
    recorder.close()
    assert [each["step"] for each in agent.records if each["kind"] == "metrics"] == list(range(1, 501))


def test_a_record_that_fits_into_no_packet_does_not_hold_up_the_others() -> None:
    agent = SmallSocket()
    recorder = Recorder(0, RecorderCallbacks(agent.send, lambda: WorkerState(0, 1, 0, (0, 1))))
    recorder.note_metrics(1, {"loss": 1.0})
    recorder.note_metrics(2, {f"weight {k}": 0.1 for k in range(10_000)})
    recorder.note_metrics(3, {"loss": 0.5})
    for _ in range(12):
        recorder.flush()
    recorder.close()
    assert [each["step"] for each in agent.records if each["kind"] == "metrics"] == [1, 3]
