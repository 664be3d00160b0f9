"""Shared memory is private, leaves no file after a crash, is checked for size before training, and is safe from stale workers."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.comm.counters import LockedCounters, PlainCounters, counters_for
from lockstep.comm.free_cores import cpu_quota
from lockstep.comm.open_comm import open_comm
from lockstep.comm.segment import Segment, SegmentError, free_bytes
from lockstep.comm.shared_bucket import SharedBucket, slice_of
from lockstep.errors import InvariantError
from lockstep.world import World, requested_comm, requested_helper_thread
from tests.models import MLP, batch, digest, loss_of, part
from tests.waiting import wait_until
from tests.workers import WorkerProcesses, leave_note, run_workers

CPU = torch.device("cpu")
HELPERS = ["off", "on"]  # values of LOCKSTEP_HELPER_THREAD


def trained(model: torch.nn.Module, rank: int, size: int, steps: int = 4) -> bytes:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step, 24)
        loss_of(model, part(x, rank, size), part(y, rank, size)).backward()
        opt.step()
        opt.zero_grad()
    return digest(model)


# -- which comm is chosen --------------------------------------------------------------------------------


def chosen(rank: int, size: int, machines: str, kind: str | None) -> tuple[str, bytes]:
    os.environ["LOCKSTEP_MACHINE"] = machines[rank]
    model = lockstep.replicate(MLP(), timeout_s=20, comm=kind)
    return lockstep.replica_of(model).comm.name, trained(model, rank, size)


@pytest.mark.parametrize(
    ("machines", "kind", "name"),
    [
        ("aaa", None, "shm"),
        ("aab", None, "twolevel"),
        ("abc", None, "gloo"),
        ("aaa", "gloo", "gloo"),
        ("aaa", "twolevel", "twolevel"),
    ],
)
def test_the_right_comm_is_chosen_by_itself_and_an_argument_overrides_it(machines: str, kind: str | None, name: str) -> None:
    results = run_workers(chosen, 3, machines, kind)
    assert {found for found, _ in results} == {name}
    assert len({d for _, d in results}) == 1


def test_the_environment_overrides_it_too() -> None:
    results = run_workers(chosen, 2, "aa", None, env={"LOCKSTEP_COMM": "gloo"})
    assert {found for found, _ in results} == {"gloo"}
    with pytest.raises(lockstep.UsageError, match=r"LOCKSTEP_COMM='smh'.*auto, shm, twolevel, gloo, nccl"):
        requested_comm({"LOCKSTEP_COMM": "smh"})
    with pytest.raises(lockstep.UsageError, match="comm='tcp'"):
        lockstep.replicate(MLP(), comm="tcp")


def refused(rank: int, size: int) -> str:
    world = replace(World.detect(), machine="ab"[rank])
    with pytest.raises(lockstep.UsageError) as caught:
        open_comm(CPU, world=world, kind="shm", timeout_s=20)
    return str(caught.value)


def test_shm_across_machines_is_refused() -> None:
    assert all("these 2 are on 2" in message for message in run_workers(refused, 2))


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("machines", ["aabbb", "aaab", "abcab"])
def test_two_level_machines_of_unequal_numbers_of_workers(machines: str, helper: str) -> None:
    results = run_workers(chosen, len(machines), machines, None, env={"LOCKSTEP_HELPER_THREAD": helper})
    assert len({d for _, d in results}) == 1
    # the result differs from that of one process only by the order of additions; tests/contract tests the values


def operations(rank: int, size: int, machines: str) -> int:
    world = replace(World.detect(), machine=machines[rank])
    comm: Any = open_comm(CPU, world=world, timeout_s=20, kind="twolevel", need_bytes=1000)
    comm.reduce(comm.buffer(1000, torch.float32, CPU), "sum", "a bucket").wait()
    comm.barrier()
    return int(comm._local.health.count)


def test_operations_have_the_same_numbers_on_machines_of_one_and_of_several_workers() -> None:
    """Otherwise a rank that waits for a stopped one is told that the ranks are in different calls."""
    assert len(set(run_workers(operations, 3, "aab"))) == 1


def bytes_between(rank: int, size: int, machines: str) -> tuple[str, int]:
    world = replace(World.detect(), machine=machines[rank])
    comm: Any = open_comm(CPU, world=world, timeout_s=20, kind="twolevel")
    bucket = comm.buffer(10_000, torch.float32, CPU)
    comm.reduce(bucket, "sum", "a bucket").wait()
    comm.barrier()
    return machines[rank], comm.bytes_between


@pytest.mark.parametrize("machines", ["aabb", "aaabb"])
def test_a_machine_hands_one_bucket_to_the_network_however_many_workers_it_has(machines: str) -> None:
    sent = dict.fromkeys(machines, 0)
    for name, count in run_workers(bytes_between, len(machines), machines):
        sent[name] += count
    assert set(sent.values()) == {40_000}  # gloo's ring then sends 2(M-1)/M of what it is handed


TORCHRUN_SCRIPT = """
import sys, torch, lockstep
sys.path.insert(0, {root!r})
from tests.models import MLP
model = lockstep.replicate(MLP(), timeout_s=30)
model(torch.randn(4, 12)).sum().backward()
sys.stdout.write(lockstep.replica_of(model).comm.name + " " + lockstep.World.detect().source + chr(10))
"""


def test_under_torchrun_without_a_change_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT.format(root=str(Path(__file__).parents[2])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "shm torchrun", "shm torchrun"]


# -- segments ----------------------------------------------------------------------------------


@pytest.mark.exclusive  # the data loaders of other tests make files in /dev/shm
def test_a_segment_is_private_zeroed_and_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    segment = Segment.create(1 << 16)
    status = os.stat(segment.address)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0, "no name in any file system"
    assert not any(segment.memory[:])
    assert set(os.listdir("/dev/shm")) == before
    other = Segment.open(segment.address, 1 << 16)
    segment.memory[5] = 7
    assert other.memory[5] == 7
    with pytest.raises(SegmentError, match="different size"):
        Segment.open(segment.address, 1 << 15)
    segment.close_descriptor()
    with pytest.raises(SegmentError):
        Segment.open("/proc/1/fd/9999", 10)


def test_too_little_memory_is_an_error_when_a_segment_is_made() -> None:
    with pytest.raises(SegmentError, match="free"):
        Segment.create(free_bytes() + (1 << 40))


def crash(rank: int, size: int, how: str) -> None:
    assert tempfile.gettempdir() == os.environ["TMPDIR"]
    model = lockstep.replicate(MLP(), timeout_s=20)
    trained(model, rank, size, 2)
    if how == "all" or rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(lockstep.PeerError):
        trained(model, rank, size, 2)


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("how", ["one", "all"])
def test_no_file_remains_after_kill_9(how: str, helper: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    run_workers(crash, 3, how, check=False, env={"TMPDIR": str(tmp_path), "LOCKSTEP_HELPER_THREAD": helper})
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "lockstep" in name}
    assert list(tmp_path.iterdir()) == []


def small_limit(rank: int, size: int, limit: int) -> tuple[str, list[str], bytes]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = lockstep.replicate(torch.nn.Sequential(torch.nn.Linear(12, 200_000), torch.nn.Linear(200_000, 4)), timeout_s=20)
        name = lockstep.replica_of(model).comm.name
        result = trained(model, rank, size, 2)
    return name, [str(w.message) for w in caught if "share memory" in str(w.message)], result[:4]


def test_too_little_shared_memory_is_found_before_training_and_falls_back_to_gloo_with_one_warning() -> None:
    # 12.8 MB of gradients x 2 workers do not fit into 16 MB: the kernel itself says so
    (name, said, first), (_, others, second) = run_workers(small_limit, 2, 16 << 20)
    assert name == "gloo"
    assert first == second
    assert len(said) == 1
    assert others == []
    assert "2 workers x 13 MB" in said[0]
    assert "25.9 MB needed" in said[0]
    assert "ulimit -f" in said[0]
    (name, said, _), _ = run_workers(small_limit, 2, 1 << 30)
    assert (name, said) == ("shm", [])


# -- failures ----------------------------------------------------------------------------------


def stale(rank: int, size: int) -> Any:
    """Rank 1 is stopped in the middle of a step; the others abort and form a new generation; then rank 1 wakes up."""
    comm = open_comm(CPU, timeout_s=30, kind="shm")
    bucket = comm.buffer(100_000, torch.float32, CPU)
    if rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        bucket.fill_(666)
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                comm.reduce(bucket, "sum", "a bucket").wait()
        except lockstep.PeerError as error:
            bucket.fill_(667)
            return str(error)
        return "nothing noticed"
    began = time.monotonic()
    threading.Timer(1.0, lambda: comm.abort("rank 1 hangs")).start()
    try:
        while time.monotonic() < began + 20:
            comm.reduce(bucket, "sum", "a bucket").wait()
    except lockstep.PeerError:
        pass
    survivors = [0, 2]
    world = replace(World.detect(), rank=survivors.index(rank), size=2, local_rank=0, local_size=1, run_id="generation 2")
    second = open_comm(CPU, world=world, timeout_s=30, kind="shm")
    bucket = second.buffer(100_000, torch.float32, CPU)
    second.barrier("before the wake-up")
    leave_note(f"ready-{rank}")
    ends = time.monotonic() + 2
    while True:
        bucket.fill_(1.0)
        bucket[0] = float(time.monotonic() < ends)
        second.reduce(bucket, "sum", "a later bucket").wait()
        if not bool((bucket[1:] == 2.0).all()):
            return f"generation 2 was disturbed: {bucket.unique()}"
        if bucket[0] == 0:  # on both ranks the time is over
            second.barrier()
            return "undisturbed"


@pytest.mark.parametrize("helper", HELPERS)
def test_a_stale_worker_that_wakes_up_cannot_write_into_a_later_generation(helper: str) -> None:
    fleet = WorkerProcesses(stale, 3, (), {"LOCKSTEP_HELPER_THREAD": helper})
    fleet.wait_for_notes("ready-0", "ready-2")
    fleet.kill(1, signal.SIGCONT)
    outcomes = fleet.collect(deadline_s=40)
    assert outcomes[0].value == outcomes[2].value == "undisturbed", outcomes
    assert outcomes[1].value is not None
    assert "nothing noticed" not in outcomes[1].value


def die_while_others_wait(rank: int, size: int) -> tuple[float, tuple[int, ...]]:
    comm = open_comm(CPU, timeout_s=30, kind="shm")
    bucket = comm.buffer(1000, torch.float32, CPU)
    comm.reduce(bucket, "sum", "bucket 0 of step 0").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(lockstep.PeerError) as caught:
        comm.reduce(bucket, "sum", "bucket 0 of step 1").wait()
    return time.monotonic() - began, caught.value.ranks


@pytest.mark.parametrize("helper", HELPERS)
def test_a_death_is_noticed_long_before_the_timeout(helper: str) -> None:
    outcomes = run_workers(die_while_others_wait, 4, check=False, env={"LOCKSTEP_HELPER_THREAD": helper})
    for rank in (0, 2, 3):
        took_s, ranks = outcomes[rank].value
        assert ranks == (1,)
        assert took_s < 5, "a process descriptor tells, not the timeout of 30 s"


# -- shapes and many workers----------------------------------------------------------------------


def many_workers(rank: int, size: int) -> float:
    comm = open_comm(CPU, timeout_s=60, kind="shm")
    bucket = comm.buffer(10_007, torch.float32, CPU)
    for step in range(5):
        bucket.copy_(torch.arange(10_007) + rank + step)
        comm.reduce(bucket, "sum", f"bucket 0 of step {step}").wait()
        expected = (torch.arange(10_007) + step) * size + sum(range(size))
        assert torch.equal(bucket, expected.float())
    comm.barrier()
    return bucket[0].item()


@pytest.mark.parametrize("helper", HELPERS)
def test_32_workers_on_few_cores(helper: str) -> None:
    assert len(set(run_workers(many_workers, 32, deadline_s=120, env={"LOCKSTEP_HELPER_THREAD": helper}))) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000, 4097])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_slices_cover_a_bucket_once_and_never_share_a_cache_line(size: int, numel: int, itemsize: int) -> None:
    ends = [slice_of(r, size, numel, itemsize) for r in range(size)]
    assert ends[0][0] == 0
    assert ends[-1][1] == numel
    for (_, high), (low, _) in itertools.pairwise(ends):
        assert high == low
        assert high == numel or high * itemsize % 64 == 0


def test_counters_that_need_no_fence_are_taken_on_x86_64_alone() -> None:
    assert counters_for("x86_64") is PlainCounters
    assert counters_for("aarch64") is LockedCounters
    assert counters_for("riscv64") is LockedCounters
    assert SharedBucket.nbytes(2, 10, torch.float32, LockedCounters) >= 2 * 4096


def hold_and_die(rank: int, size: int, address: str, nbytes: int) -> None:
    counters = LockedCounters(Segment.open(address, nbytes).memory, 0, 2)
    counters._lock()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_while_it_holds_the_mutex_does_not_stop_the_others() -> None:
    segment = Segment.create(4096)
    counters = LockedCounters(segment.memory, 0, 2, is_first=True)
    run_workers(hold_and_die, 1, segment.address, 4096, check=False)
    counters.publish(0, 5)
    assert counters.read() == [5, 0]
    assert not counters.reached(5)


# -- one operation at a time -----------------------------------------------------------------------------


def test_a_bucket_that_is_in_flight_is_not_used_again() -> None:
    segment = Segment.create(SharedBucket.nbytes(2, 1000, torch.float32, PlainCounters))
    mine, other = (SharedBucket(segment, rank, 2, 1000, torch.float32, PlainCounters) for rank in range(2))
    mine.deposit()
    with pytest.raises(InvariantError, match="while the first one is in flight"):
        mine.deposit()
    other.deposit()
    assert mine.is_deposited()
    mine.publish_reduced()
    assert not mine.is_reduced()
    other.publish_reduced()
    assert mine.is_reduced()
    mine.deposit()


# -- the helper thread -----------------------------------------------------------------------------------


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-fold")]


def folds_elsewhere(rank: int, size: int, how: str) -> None:
    """The main thread issues reductions, asks for progress once, and then only looks."""
    comm = open_comm(CPU, timeout_s=20, kind="shm")
    buckets = [comm.buffer(300_000, torch.float32, CPU) for _ in range(3)]
    for step in range(4):
        pending = []
        for bucket in buckets:
            bucket.fill_(rank + step)
            pending.append(comm.reduce(bucket, "sum", "a bucket"))
        comm.progress()
        wait_until(lambda: all(one.done() for one in pending), "the helper threads have added everything", 20)  # noqa: B023
        for bucket, one in zip(buckets, pending, strict=True):
            one.wait()
            assert bool((bucket == sum(range(size)) + step * size).all())
    assert len(helpers()) == 1
    if rank == 0:
        comm.reduce(buckets[0], "sum", "half a bucket")
        comm.progress()  # the helper thread waits for the others, and they do not come
    if how == "close":
        comm.close()
        assert not helpers()
    elif how == "abort":
        comm.abort("told to by the test")
        wait_until(lambda: not helpers(), "the helper thread has ended", 10)
    else:
        del comm, pending, one
        gc.collect()
        wait_until(lambda: not helpers(), "the helper thread has ended", 10)


@pytest.mark.parametrize("how", ["close", "abort", "drop"])
def test_a_helper_thread_adds_while_the_main_thread_is_elsewhere_and_ends_with_the_comm(how: str) -> None:
    run_workers(folds_elsewhere, 3, how, env={"LOCKSTEP_HELPER_THREAD": "on"})


def counted_helpers(rank: int, size: int, threads: int) -> int:
    torch.set_num_threads(threads)
    comm = open_comm(CPU, timeout_s=20, kind="shm")
    assert not helpers(), "the script may yet set its number of threads"
    bucket = comm.buffer(100_000, torch.float32, CPU)
    comm.reduce(bucket, "sum", "a bucket").wait()
    found = len(helpers())
    comm.close()
    return found


def test_there_is_a_helper_thread_only_if_every_worker_has_a_core_for_it() -> None:
    cores = len(os.sched_getaffinity(0))
    auto = {"LOCKSTEP_HELPER_THREAD": "auto"}
    assert set(run_workers(counted_helpers, 2, cores, env=auto)) == {0}
    assert set(run_workers(counted_helpers, 2, 1, env=auto)) == {int(min(cores, cpu_quota()) >= 4)}
    assert set(run_workers(counted_helpers, 2, 1)) == {0}
    assert set(run_workers(counted_helpers, 2, cores, env={"LOCKSTEP_HELPER_THREAD": "on"})) == {1}


def test_the_variable_has_three_values() -> None:
    assert requested_helper_thread({}) == "off"
    assert requested_helper_thread({"LOCKSTEP_HELPER_THREAD": "auto"}) == "auto"
    with pytest.raises(lockstep.UsageError, match=r"LOCKSTEP_HELPER_THREAD='1' is not a choice\. Set it to on, off or auto"):
        requested_helper_thread({"LOCKSTEP_HELPER_THREAD": "1"})
