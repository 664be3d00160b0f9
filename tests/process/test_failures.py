"""A worker dies, hangs, leaves or raises: every other worker gets an error that says which worker, when and at which operation."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from tests.models import MLP, batch, loss_of, part
from tests.workers import Outcome, WorkerProcesses, leave_note, run_workers, wait_for_notes

TIMEOUT_S = 1.0
FAULT_STEP = 3


def train(rank: int, size: int, fault: str, victim: int, comm: str) -> dict[str, Any]:
    """Five steps; the victim misbehaves in step 3. Returns the others' PeerError and how long it took."""
    model = lockstep.replicate(MLP(), bucket_mb=0.002, timeout_s=TIMEOUT_S, comm=comm)
    for step in range(5):
        x, y = batch(step, 12)
        x, y = part(x, rank, size), part(y, rank, size)
        began = time.monotonic()
        try:
            if rank == victim and step == FAULT_STEP:
                misbehave(fault, model, x, y, [f"failed-{r}" for r in range(size) if r != rank])
            else:
                loss_of(model, x, y).backward()
        except lockstep.PeerError as error:
            took_s = time.monotonic() - began
            leave_note(f"failed-{rank}")
            return {"message": str(error), "ranks": error.ranks, "step": step, "took_s": took_s}
        model.zero_grad()
    return {}


def misbehave(fault: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, others: list[str]) -> None:
    """``others``: the notes that the other ranks leave when they have failed. Until then this rank lives."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "no parameter":
        torch.ones(3, requires_grad=True).sum().backward()
        wait_for_notes(*others)
    elif fault == "raise in backward":
        model.layers[0].weight.register_hook(lambda grad: 1 / 0)
        loss_of(model, x, y).backward()
    elif fault == "raise in backward, caught":
        handle = model.layers[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, x, y).backward()
        handle.remove()
        loss_of(model, x, y).backward()  # a repetition would mix two steps
    elif fault == "raise at the end of backward":  # after every parameter's gradient: the last bucket must not have left
        x = x.requires_grad_(True) * 1
        x.register_hook(lambda grad: 1 / 0)
        loss_of(model, x, y).backward()
    elif fault == "kill in backward":
        model.layers[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        loss_of(model, x, y).backward()
    elif fault == "does not call":
        wait_for_notes(*others)
    else:
        raise AssertionError(fault)


FAULTS = [
    "kill",
    "stop",
    "no parameter",
    "raise in backward",
    "raise in backward, caught",
    "raise at the end of backward",
    "kill in backward",
    "does not call",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("size", "victim", "comm"), [(2, 1, "gloo"), (4, 0, "gloo"), (2, 1, "shm"), (4, 2, "shm")])
def test_every_other_rank_gets_a_peer_error_that_names_rank_step_and_bucket(fault: str, size: int, victim: int, comm: str) -> None:
    fleet = WorkerProcesses(train, size, (fault, victim, comm), {})
    if fault == "stop":
        others = [p for r, p in enumerate(fleet.pipes) if r != victim]
        assert all(p.poll(20) for p in others), "the others must not wait for a stopped rank"
        fleet.kill(victim)
    outcomes: list[Outcome] = fleet.collect(deadline_s=30)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.value, f"rank {rank} saw nothing: {outcome}"
        message = outcome.value["message"]
        assert outcome.value["step"] == FAULT_STEP
        assert outcome.value["took_s"] < TIMEOUT_S + 3
        assert f"step {FAULT_STEP}" in message
        assert "bucket" in message
        assert f"ank {victim}" in message
        if fault != "raise in backward, caught":
            assert outcome.value["ranks"] == (victim,), message
    if fault == "raise in backward, caught":
        assert "cannot be repeated" in outcomes[victim].value["message"]


def one_short_wait(rank: int, size: int, comm: str) -> float:
    carrier = lockstep.replica_of(lockstep.replicate(MLP(), timeout_s=20, comm=comm)).comm
    began = time.monotonic()
    if rank == 1:
        wait_for_notes("released-0", "released-2")  # lives until then: its closing connections would end the waits too
        return 0.0
    with pytest.raises(lockstep.PeerError) as caught:
        carrier.reduce(torch.zeros(3), "sum", "something").wait(0.3 if rank == 0 else None)
    took_s = time.monotonic() - began
    assert caught.value.ranks == (1,)
    leave_note(f"released-{rank}")
    wait_for_notes("released-0", "released-2")
    return took_s


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_a_timeout_on_one_rank_ends_the_waits_of_all_others(comm: str) -> None:
    assert max(run_workers(one_short_wait, 3, comm)) < 2.5


def leave_early(rank: int, size: int) -> str:
    model = lockstep.replicate(MLP(), timeout_s=TIMEOUT_S)
    for step in range(2 if rank == 1 else 4):
        x, y = batch(step, 12)
        try:
            loss_of(model, part(x, rank, size), part(y, rank, size)).backward()
        except lockstep.PeerError as error:
            return str(error)
    lockstep.replica_of(model).close()
    return ""


def test_a_rank_whose_loop_was_shorter_is_distinguished_from_a_rank_that_died() -> None:
    messages = run_workers(leave_early, 3)
    assert messages[1] == ""
    for rank in (0, 2):
        assert "Rank 1 finished after" in messages[rank]
        assert "join()" in messages[rank]


def unequal_unfreezing(rank: int, size: int) -> str:
    model = MLP()
    model.layers[0].weight.requires_grad_(False)
    lockstep.replicate(model, timeout_s=TIMEOUT_S)
    x, y = batch(0, 12)
    for step in range(3):
        if rank == 1 and step == 1:
            model.layers[0].weight.requires_grad_(True)
        try:
            loss_of(model, x, y).backward()
        except lockstep.UsageError as error:
            return str(error)
    return "no error"


def test_unfreezing_on_one_rank_only_is_an_error_never_a_wrong_average() -> None:
    for message in run_workers(unequal_unfreezing, 2):
        assert "rank 0 is in bucket 0 of step 2" in message
        assert "rank 1 is in the newly unfrozen parameters of step 1" in message


def missing_at_start(rank: int, size: int) -> str:
    if rank == 2:
        return ""
    with pytest.raises(lockstep.PeerError) as caught:
        lockstep.replicate(MLP(), timeout_s=1.0)
    return str(caught.value)


def test_a_rank_that_never_arrives_is_named() -> None:
    for message in run_workers(missing_at_start, 3)[:2]:
        assert "rank 2 of 3 never arrived" in message
