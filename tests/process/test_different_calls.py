"""Workers that make different calls all get one UsageError that names each worker's call and place; slow workers get none."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.comm.open_comm import open_comm
from lockstep.errors import PeerError, UsageError
from lockstep.plan.tree import fold
from lockstep.world import World
from tests.lane_jobs import BATCH, LANES, dataset, sgd
from tests.launch import LaunchedRun
from tests.models import MLP
from tests.workers import run_workers

KINDS = ["shm", "gloo", "twolevel"]
TIMEOUT_S = 40.0


def connect(rank: int, size: int, kind: str, place: Callable[[], str] = lambda: "") -> Comm:
    world = replace(World.detect(), machine="a" if rank < size / 2 else "b") if kind == "twolevel" else World.detect()
    return open_comm(torch.device("cpu"), world=world, timeout_s=TIMEOUT_S, kind=kind, place=place)


def make_buckets(comm: Comm) -> list[torch.Tensor]:
    return [comm.buffer(1000, torch.float32, torch.device("cpu")) for _ in range(3)]


def call(comm: Comm, name: str, buckets: list[torch.Tensor]) -> None:
    """One of the calls that training makes. Only gathers may have different sizes."""
    plan = fold(comm.size, [(r, r + 1) for r in range(comm.size)])
    if name.startswith("gather"):
        gather_bytes(comm, b"\xff" * (10 if name == "gather A" else 5000), name)
    elif name.startswith("all_gather"):
        mine = torch.zeros(4 if name == "all_gather A" else 2000)
        comm.all_gather(torch.zeros(comm.size, mine.numel()), mine, name).wait()
    elif name == "bucket":
        comm.fold(buckets[0], plan, None, name).wait()
    elif name == "buckets":
        pending = [comm.fold(bucket, plan, None, f"{name} {k}") for k, bucket in enumerate(buckets)]
        for one in pending:
            one.wait()
    elif name == "small reduction":
        comm.reduce(torch.zeros(7), "sum", name).wait()
    elif name == "broadcast":
        broadcast_in_place(comm, [torch.zeros(50)], 0, name)
    elif name == "barrier":
        comm.barrier(name)
    else:
        raise AssertionError(name)


def disagree(rank: int, size: int, kind: str, calls: tuple[str, str]) -> tuple[str, float]:
    comm = connect(rank, size, kind, lambda: f"train.py:{40 + rank}")
    buckets = make_buckets(comm)
    for _ in range(2):
        call(comm, "bucket", buckets)
        call(comm, "gather A", buckets)
    mine = calls[0] if rank == 0 else calls[1]
    began = time.monotonic()
    try:
        call(comm, mine, buckets)
        call(comm, "barrier", buckets)
    except (UsageError, PeerError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        comm.close()
    return "no error", 0.0


PAIRS = [
    ("gather A", "gather B"),
    ("gather C", "gather B"),
    ("all_gather A", "all_gather B"),
    ("all_gather B", "gather A"),
    ("gather A", "bucket"),
    ("gather A", "buckets"),
    ("bucket", "barrier"),
    ("gather B", "broadcast"),
    ("broadcast", "buckets"),
    ("barrier", "small reduction"),
    ("small reduction", "bucket"),
    ("gather A", "barrier"),
]


@pytest.mark.parametrize("calls", PAIRS, ids=" - ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_every_worker_raises_one_error_that_names_each_call_and_its_place(kind: str, calls: tuple[str, str]) -> None:
    outcomes = run_workers(disagree, 3, kind, calls)
    messages = {message for message, _ in outcomes}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert message.startswith("UsageError: the workers are in different calls: rank 0 is in "), message
    for rank, name in enumerate((calls[0], calls[1], calls[1])):
        assert name in message
        assert f"ank {rank} is in {name}" in message
        assert f"train.py:{40 + rank}" in message
    assert max(took_s for _, took_s in outcomes) < TIMEOUT_S / 4


def arrive_late(rank: int, size: int, kind: str) -> int:
    """Rank 1 comes a second late to each of several operations; the others wait, with operations of other names in flight."""
    comm = connect(rank, size, kind)
    buckets = make_buckets(comm)
    for name in ("gather A", "buckets", "broadcast", "barrier", "gather B"):
        if rank == 1:
            time.sleep(1.2)  # is late: the others ask after half a second (PATIENCE_S) which call it is in
        call(comm, name, buckets)
    comm.close()
    return 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_worker_is_not_mistaken_for_one_in_another_call(kind: str) -> None:
    assert run_workers(arrive_late, 3, kind) == [1, 1, 1]


def train_apart(rank: int, size: int, kind: str, mistake: str) -> tuple[str, int]:
    """Rank 1 makes a mistake after step 3 of the first loop. Returns the error, and how many steps this worker committed."""
    model = MLP()
    opt = sgd(model)
    run = lockstep.Run(model, opt, lanes=LANES, seed=3, comm=kind, timeout_s=TIMEOUT_S)

    def loop(last: int) -> None:
        for x, y in run.shard(dataset(), global_batch=BATCH, epochs=6):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if run.step == last and run.committed:
                return

    try:
        loop(3)
        if rank == 1 and mistake == "evaluates alone":
            run.evaluate(lambda batch: {"n": len(batch[0])}, dataset(), global_batch=BATCH)
        if rank == 1 and mistake == "saves what others do not":
            gather_bytes(run._workers.comm, b"\xff", "the name of a checkpoint")
        if rank == 1 and mistake == "leaves a loop early":
            loop(5)
        else:
            loop(9)
        loop(12)
    except (UsageError, PeerError) as error:
        return f"{type(error).__name__}: {error}", run.step
    return "no error", run.step


@pytest.mark.parametrize("mistake", ["evaluates alone", "saves what others do not", "leaves a loop early"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_workers_at_different_places_of_a_script_do_not_train_together(kind: str, mistake: str) -> None:
    outcomes = run_workers(train_apart, 3, kind, mistake)
    assert len({message for message, _ in outcomes}) == 1, outcomes
    message = outcomes[0][0]
    assert message.startswith("UsageError: the workers are in different calls: ranks 0, 2 are in "), message
    assert "rank 1 is in " in message
    assert {step for _, step in outcomes} == {5 if mistake == "leaves a loop early" else 3}


def retry(rank: int, size: int, kind: str) -> tuple[str, int]:
    """Rank 1 skips a loop, in a way that no collective shows: it has the stage, the step and the data of another loop."""
    model = MLP()
    opt = sgd(model)
    run = lockstep.Run(model, opt, lanes=LANES, seed=3, comm=kind, timeout_s=TIMEOUT_S)
    if rank == 1:
        run._progress.loops_reached = run._progress.stage = 1
    try:
        for x, y in run.shard(dataset(), global_batch=BATCH, epochs=6):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    except (UsageError, PeerError) as error:
        return f"{type(error).__name__}: {error}", run.step
    return "no error", run.step


@pytest.mark.parametrize("kind", KINDS[:2])
def test_workers_of_different_loops_do_not_commit_a_step(kind: str) -> None:
    expected = (
        "UsageError: the workers are in different loops or steps: ranks 0, 2 at step 0 of the run (loop 0, epoch 0, step 0 of the "
        "epoch); rank 1 at step 0 of the run (loop 1, epoch 0, step 0 of the epoch)."
    )
    for message, step in run_workers(retry, 3, kind):
        assert message.startswith(expected), message
        assert step == 0


SCRIPT = """
import torch
import torch.nn.functional as F

import lockstep
from tests.models import MLP, data

model = MLP()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=4)
for x, y in run.shard(data(40), global_batch=8, epochs=40):
    F.cross_entropy(model(x), y).backward()
    {body}
"""
EVALUATES = """opt.step()
    if run.rank == 0 and run.every(4): run.evaluate(lambda batch: {"n": len(batch[0])}, data(), global_batch=8)
"""
STEPS = """if run.rank == 0 or run.step < 4: opt.step()
"""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (EVALUATES, [r"call run.evaluate with different arguments \(script.py:14, ", r"bucket 0 of step 4 \(script.py:12, "]),
        (STEPS, [r"\(script.py:13, ", r"in the end of the loop body without SGD.step\(\) \(script.py:11, "]),
    ],
    ids=["run.evaluate", "opt.step"],
)
def test_a_call_on_rank_0_alone_ends_the_run_with_an_error_that_names_it(
    body: str, calls: list[str], workers: int, launch: Callable[..., LaunchedRun]
) -> None:
    run = launch(SCRIPT.replace("{body}", body), "--hang-timeout", "5", workers=workers)
    assert run.wait() == 1, run.dump()
    for call in ("UsageError: the workers are in different calls: rank 0 is in ", *calls):
        assert re.search(call, run.output()), run.dump()
    assert "UnicodeDecodeError" not in run.output()
