"""One contract for every Comm. Each body runs on every rank: as a thread for loopback, else as a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.comm.base import Comm
from lockstep.comm.counters import LockedCounters
from lockstep.comm.exchange import Broadcast, broadcast_in_place, gather_bytes
from lockstep.comm.loopback import loopback
from lockstep.comm.open_comm import open_comm
from lockstep.comm.shm import Shm
from lockstep.comm.store import open_store
from lockstep.errors import PeerError, UsageError
from lockstep.world import World
from tests.threads import on_threads
from tests.workers import run_workers

KINDS = ["loopback", "gloo", "shm", "shm with mutexes", "shm with helper threads", "twolevel", "twolevel with helper threads"]


def in_process(rank: int, size: int, kind: str, body: Callable[..., Any], timeout_s: float) -> Any:
    os.environ["LOCKSTEP_HELPER_THREAD"] = "on" if kind.endswith("helper threads") else "off"
    if kind == "shm with mutexes":
        comm: Comm = Shm(open_store(World.detect(), timeout_s), rank, size, timeout_s=timeout_s, counters=LockedCounters)
    else:
        # two machines with unequal numbers of workers, both simulated on this machine
        machine = ("a" if rank <= size // 2 else "b") if kind.startswith("twolevel") else ""
        world = replace(World.detect(), machine=machine)
        comm = open_comm(torch.device("cpu"), world=world, timeout_s=timeout_s, kind=kind.split()[0])
    assert size == 1 or comm.name == kind.split()[0]
    try:
        return body(comm)
    finally:
        comm.close()


def over(kind: str, size: int, body: Callable[[Comm], Any], timeout_s: float = 20.0) -> list[Any]:
    if kind != "loopback":
        return run_workers(in_process, size, kind, body, timeout_s)
    return on_threads(size, body, timeout_s)


def reduces(comm: Comm) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.complex64):
        for numel in (0, 1, 7, 1000, 65537):
            base = torch.arange(numel) % 13
            tensor = comm.buffer(numel, dtype, torch.device("cpu"))
            assert tensor.shape == (numel,)
            assert not tensor.any()
            tensor.copy_(base + comm.rank)
            comm.reduce(tensor, "sum", "a sum").wait()
            expected = (base * comm.size + sum(range(comm.size))).to(dtype)
            assert torch.equal(tensor, expected), (dtype, numel)
            if not dtype.is_complex and dtype.is_floating_point:
                tensor.copy_(base + comm.rank)
                comm.reduce(tensor, "mean", "a mean").wait()
                torch.testing.assert_close(
                    tensor, (expected / comm.size).to(dtype), atol=0.07 if dtype.itemsize == 2 else 1e-5, rtol=0.01
                )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_gives_every_rank_the_same_sum_or_mean(kind: str, size: int) -> None:
    over(kind, size, reduces)


def counts_link_time(comm: Comm) -> None:
    before = comm.link_us()
    assert before >= 0
    tensor = comm.buffer(1 << 18, torch.float32, torch.device("cpu"))
    for _ in range(3):
        comm.reduce(tensor, "sum", "a sum").wait()
    after = comm.link_us()
    assert after >= before
    if comm.name in ("loopback", "shm"):
        assert after == 0
    comm.close()
    assert comm.link_us() >= after


@pytest.mark.parametrize("kind", ["loopback", "gloo", "shm", "twolevel"])
def test_link_time_never_falls_and_is_0_within_a_machine(kind: str) -> None:
    over(kind, 3, counts_link_time)


def reduces_half_precision(comm: Comm) -> None:
    for tensor in (comm.buffer(3, torch.bfloat16, torch.device("cpu")), torch.zeros(3, dtype=torch.bfloat16)):
        tensor.fill_(1.0 if comm.rank else 256.0)
        comm.reduce(tensor, "sum", "a sum").wait()
        assert tensor.tolist() == [260.0] * 3  # 259, rounded once; 258 if every addition were rounded
    for tensor in (comm.buffer(3, torch.float16, torch.device("cpu")), torch.zeros(3, dtype=torch.float16)):
        tensor.fill_(60000.0)
        comm.reduce(tensor, "mean", "a mean").wait()
        assert tensor.tolist() == [60000.0] * 3  # the sum is beyond the range of fp16


@pytest.mark.parametrize("kind", ["loopback", "shm"])
def test_reduce_adds_fp16_and_bf16_in_fp32(kind: str) -> None:
    over(kind, 4, reduces_half_precision)


def moves(comm: Comm) -> None:
    for dtype in (torch.float32, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex128):
        mine = (torch.arange(11) % 2 + comm.rank).to(torch.float32).to(dtype)
        for source in range(comm.size):
            tensor = mine.clone()
            comm.broadcast(tensor, source, "a broadcast").wait()
            assert torch.equal(tensor.float() if dtype.is_floating_point else tensor, _as(source, dtype))
        output = torch.zeros(comm.size, 11, dtype=torch.float32).to(dtype)
        comm.all_gather(output, mine, "a gather").wait()
        for rank in range(comm.size):
            assert torch.equal(output[rank].float() if dtype.is_floating_point else output[rank], _as(rank, dtype))


def _as(rank: int, dtype: torch.dtype) -> torch.Tensor:
    value = (torch.arange(11) % 2 + rank).to(torch.float32).to(dtype)
    return value.float() if dtype.is_floating_point else value


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_and_all_gather_move_bits_of_any_dtype(kind: str, size: int) -> None:
    over(kind, size, moves)


def exchanges(comm: Comm) -> None:
    payload = b"x" * (comm.rank * 100) + b"end" if comm.rank != 1 else b""
    answers = gather_bytes(comm, payload, "words")
    assert answers == [b"x" * (r * 100) + b"end" if r != 1 else b"" for r in range(comm.size)]
    tensors = [torch.full((3, 2), comm.rank), torch.full((), float(comm.rank)), torch.zeros(0), torch.tensor([comm.rank > 0])]
    broadcast_in_place(comm, tensors, comm.size - 1, "tensors")
    assert [t.float().mean().item() for t in tensors if t.numel()] == [comm.size - 1, comm.size - 1, float(comm.size > 1)]
    strided = torch.full((4, 3), float(comm.rank)).t()
    Broadcast(comm, [strided], 0, "strided").finish(torch.Tensor.copy_)
    assert not strided.any()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_exchanges(kind: str, size: int) -> None:
    over(kind, size, exchanges)


def is_there(comm: Comm) -> None:
    comm.await_device()
    tensor = torch.ones(1000)
    pending = comm.reduce(tensor, "sum", "a sum")
    pending.wait()
    comm.await_device()
    assert torch.equal(tensor, torch.full((1000,), float(comm.size)))
    comm.barrier()
    comm.abort("aborted by the test")
    comm.await_device()  # a result on the host is there, whatever has failed since


@pytest.mark.parametrize("kind", KINDS)
def test_results_on_the_host_need_no_waiting(kind: str) -> None:
    over(kind, 2, is_there)


def overlaps(comm: Comm) -> None:
    tensors = [torch.full((1000 + i,), float(comm.rank + i)) for i in range(20)]
    pending = [comm.reduce(t, "sum", f"number {i}") for i, t in enumerate(tensors)]
    for one in reversed(pending):
        one.wait()
        assert one.done()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((1000 + i,), float(sum(range(comm.size)) + i * comm.size)))
    comm.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_many_operations_may_be_in_flight(kind: str) -> None:
    over(kind, 3, overlaps)


def times_out(comm: Comm) -> tuple[str, float]:
    comm.barrier("the start")
    if comm.rank == comm.size - 1:
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        comm.reduce(torch.ones(3), "sum", "bucket 7 of step 5").wait()
    took_s = time.monotonic() - began
    with pytest.raises(PeerError):
        comm.barrier("the next operation")
    assert caught.value.ranks == (comm.size - 1,)
    return str(caught.value), took_s


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_ends_after_the_timeout_and_names_the_missing_rank(kind: str) -> None:
    for message, took_s in over(kind, 3, times_out, 1.0)[:2]:
        assert "rank 2" in message
        assert "bucket 7 of step 5" in message
        assert took_s < 3.5


def waits_longer(comm: Comm) -> float:
    comm.barrier("the start")
    if comm.rank == comm.size - 1:
        time.sleep(1.3)  # is late: by more than the timeout of the wait, and by less than the postponed one
    else:
        comm.postpone_timeouts(time.monotonic() + 1.0)
    tensor = torch.ones(3)
    comm.reduce(tensor, "sum", "a late sum").wait(1.0)
    return float(tensor[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_that_is_postponed_begins_anew(kind: str) -> None:
    assert over(kind, 3, waits_longer) == [3.0, 3.0, 3.0]


def aborts(comm: Comm) -> list[float]:
    """Several waits are pending; on every rank another thread aborts, as it does when the agent says so.

    Returns the seconds from this rank's own abort to the end of each wait; 0 if another rank's abort ended the wait before.
    """
    comm.barrier("the start")
    if comm.rank == comm.size - 1:
        time.sleep(0.5)  # does not send, and does not leave: its closing connections would end the waits
        return []
    pending = [comm.reduce(torch.ones(1000), "sum", f"bucket {i}") for i in range(3)]
    aborted_at: list[float] = []
    waiting = threading.Event()

    def abort() -> None:
        waiting.wait(10)
        time.sleep(0.2)  # let the main thread get into its wait: it has no way to say so from inside
        aborted_at.append(time.monotonic())
        comm.abort("aborted by the test")

    threading.Thread(target=abort).start()
    delays = []
    waiting.set()
    for one in pending:
        with pytest.raises(PeerError):
            one.wait()
        delays.append(time.monotonic() - aborted_at[0] if aborted_at else 0.0)
    return delays


@pytest.mark.exclusive
@pytest.mark.parametrize("kind", KINDS)
def test_abort_from_another_thread_breaks_every_pending_wait_within_50_ms(kind: str) -> None:
    delays = sorted(delay for by_rank in over(kind, 4, aborts)[:-1] for delay in by_rank)
    assert len(delays) == 9
    # The median, since four processes share the cores with everything else; no wait lasts until its timeout.
    assert delays[4] < 0.05
    assert delays[-1] < 1.0


def closes(comm: Comm) -> None:
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises((UsageError, PeerError)):
        comm.reduce(torch.ones(1), "sum", "too late")


@pytest.mark.parametrize("kind", KINDS)
def test_close_may_be_called_twice_and_ends_use(kind: str) -> None:
    over(kind, 2, closes)


def test_loopback_plays_its_fault_script() -> None:
    comms = loopback(2)
    comms[0].group.fail(rank=1, at=1)
    seen: list[str] = []

    def other() -> None:
        comms[1].barrier()
        with pytest.raises(PeerError, match="script"):
            comms[1].barrier()

    thread = threading.Thread(target=other)
    thread.start()
    comms[0].barrier()
    with pytest.raises(PeerError) as caught:
        comms[0].barrier()
    seen.append(str(caught.value))
    thread.join(10)
    assert "rank 1 died" in seen[0]
    assert caught.value.ranks == (1,)


def test_loopback_notices_ranks_that_do_different_things() -> None:
    comms = loopback(2)
    first = comms[0].reduce(torch.ones(1), "sum", "bucket 0")
    with pytest.raises(UsageError, match="rank 0 called bucket 0"):
        comms[1].broadcast(torch.ones(1), 0, "the buffers")
    with pytest.raises(UsageError, match="the buffers"):
        first.wait()
