"""The helper thread advances operations while the main thread does not; and whether there is a core for it."""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.comm.free_cores import cores_are_free, cpu_quota, one_more_fits
from lockstep.comm.helper_thread import HelperThread
from lockstep.errors import InvariantError
from tests.waiting import wait_until


class Work:
    """Something to advance: ``left`` blocks. While ``gate`` is closed, the thread that advances it waits in a block."""

    def __init__(self, left: int = 0) -> None:
        self.left, self.threads = left, set[str]()
        self.in_block, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.is_waited_for = False
        self.error: Exception | None = None
        self.helper = HelperThread(self.advance, "helper")
        self.helper.start()

    def advance(self) -> bool:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        while self.left and not self.is_waited_for:
            self.in_block.set()
            assert self.gate.wait(10)
            self.left -= 1
            if self.helper.must_stop:
                break
        return self.left > 0


@pytest.fixture
def work() -> Iterator[Work]:
    found = Work()
    yield found
    found.gate.set()
    found.helper.close()


def test_it_advances_what_is_in_flight_after_a_wake_alone(work: Work) -> None:
    work.left = 3
    assert work.threads == set()
    work.helper.wake()
    wait_until(lambda: work.left == 0, "the work is done", 10)
    assert work.threads == {"helper"}


def test_it_looks_again_while_other_workers_are_awaited(work: Work) -> None:
    work.left, work.is_waited_for = 3, True
    work.helper.wake()
    wait_until(lambda: bool(work.threads), "the thread has looked", 10)
    work.is_waited_for = False
    wait_until(lambda: work.left == 0, "the work is done", 10)


class LooksTwice:
    """Finds nothing in flight, but only says so when the gate opens."""

    def __init__(self) -> None:
        self.looks, self.looking, self.gate = 0, threading.Event(), threading.Event()

    def advance(self) -> bool:
        self.looks += 1
        self.looking.set()
        assert self.gate.wait(10)
        return False


def test_a_wake_is_not_lost_if_the_thread_is_about_to_sleep() -> None:
    work = LooksTwice()
    helper = HelperThread(work.advance, "helper")
    helper.start()
    helper.wake()
    assert work.looking.wait(10)
    helper.wake()  # an operation was put in flight after the thread had looked
    work.gate.set()
    wait_until(lambda: work.looks == 2, "the thread has looked again", 10)
    helper.close()


def test_the_main_thread_takes_over_after_the_block_that_is_being_added(work: Work) -> None:
    work.gate.clear()
    work.left = 1000
    work.helper.wake()
    assert work.in_block.wait(10)
    threading.Timer(0.05, work.gate.set).start()
    work.helper.take_over()
    assert work.left == 999
    work.threads.clear()
    assert not work.advance()
    assert work.threads == {threading.current_thread().name}, "the helper thread sleeps until the next wake"


def test_what_it_raises_reaches_the_main_thread_once(work: Work) -> None:
    work.error = InvariantError("a bug")
    work.helper.wake()
    wait_until(lambda: not work.helper._thread.is_alive(), "the thread has ended", 10)
    with pytest.raises(InvariantError, match="a bug"):
        work.helper.take_over()
    work.helper.take_over()
    work.helper.wake()


def test_close_ends_it_in_the_middle_of_its_work_and_may_be_called_twice(work: Work) -> None:
    work.left, work.is_waited_for = 1, True
    work.helper.wake()
    wait_until(lambda: bool(work.threads), "the thread has looked", 10)
    work.helper.close()
    assert not work.helper._thread.is_alive()
    work.helper.close()


def test_without_start_there_is_no_thread() -> None:
    helper = HelperThread(threading.Event().is_set, "never")
    helper.take_over()
    helper.close()
    assert not any(thread.name == "never" for thread in threading.enumerate())


def test_it_does_not_keep_its_owner_alive() -> None:
    work = Work()
    thread, gone = work.helper._thread, threading.Event()
    weakref.finalize(work, work.helper.end)
    weakref.finalize(work, gone.set)
    work.left, work.is_waited_for = 1, True
    threads = work.threads
    work.helper.wake()
    wait_until(lambda: bool(threads), "the thread has looked", 10)
    del work
    gc.collect()
    assert gone.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_it_adds_on_one_core_and_leaves_the_threads_of_others_alone() -> None:
    class Asks:
        found = 0

        def advance(self) -> bool:
            self.found = torch.get_num_threads()
            return False

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        asks = Asks()
        helper = HelperThread(asks.advance, "helper")
        helper.start()
        helper.wake()
        wait_until(lambda: asks.found > 0, "the thread has answered", 10)
        helper.close()
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (asks.found, torch.get_num_threads(), others) == (1, 3, [3])
    finally:
        torch.set_num_threads(before)


# -- free cores --------------------------------------------------------------------------------

ALL = range(16)


@pytest.mark.parametrize(
    ("mine", "workers", "threads", "quota", "fits"),
    [
        (ALL, [ALL] * 8, 1, math.inf, True),
        (ALL, [ALL] * 9, 1, math.inf, False),
        (ALL, [ALL] * 8, 2, math.inf, False),  # 8 x 2 threads use all 16 cores
        (ALL, [ALL] * 5, 2, math.inf, True),
        (ALL, [ALL] * 8, 1, 8.0, False),  # a container that may use 8 of the cores
        (range(2), [range(2)] * 2, 1, math.inf, False),
        ({3}, [{r} for r in range(8)], 1, math.inf, False),  # every worker is bound to one core
        ({6, 7}, [{2 * r, 2 * r + 1} for r in range(8)], 1, math.inf, True),  # to two cores of its own
        ({0, 1, 2, 3}, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], 1, math.inf, True),
        ({4, 5}, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}, {5}], 1, math.inf, False),
    ],
)
def test_a_helper_thread_needs_a_core_for_every_worker(
    mine: set[int], workers: list[set[int]], threads: int, quota: float, fits: bool
) -> None:
    assert one_more_fits(mine, workers, threads, quota) is fits


def test_cores_of_processes_are_read_from_the_kernel() -> None:
    me, cores = os.getpid(), len(os.sched_getaffinity(0))
    gone = 2**22 + 1  # beyond the largest process id
    assert cores_are_free([me] * cores, 1) is False
    assert cores_are_free([me, gone], cores) is False


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_smallest_quota_of_all_groups_around_the_process_counts(tmp_path: Path) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    assert cpu_quota(groups, own) == math.inf
    own.write_text("0::/slice/job\n")
    write(groups / "slice" / "job" / "cpu.max", "max 100000\n")
    assert cpu_quota(groups, own) == math.inf
    write(groups / "slice" / "cpu.max", "400000 100000\n")
    assert cpu_quota(groups, own) == 4.0
    write(groups / "cpu.max", "150000 100000\n")
    assert cpu_quota(groups, own) == 1.5


def test_a_quota_of_version_1_counts_too(tmp_path: Path) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    write(groups / "cpu" / "cpu.cfs_period_us", "100000\n")  # a container sees its own group as the root
    write(groups / "cpu" / "cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(groups, own) == math.inf
    write(groups / "cpu" / "cpu.cfs_quota_us", "250000\n")
    assert cpu_quota(groups, own) == 2.5
