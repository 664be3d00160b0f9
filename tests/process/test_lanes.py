"""The result of training does not depend on how many workers ran it: SHA-256 of everything, after 30 steps."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.comm.base import Comm
from lockstep.comm.plain_state import digest, flatten
from tests.lane_jobs import BATCH, LANES, SAMPLES, SCENARIOS, Dropping, Stream, dataset, scenario, sgd, train
from tests.models import MLP
from tests.threads import on_threads
from tests.workers import run_workers


@pytest.fixture(scope="module")
def alone() -> Callable[[str], str]:
    known: dict[str, str] = {}

    def ask(name: str) -> str:
        if name not in known:
            (known[name],) = run_workers(scenario, 1, name)
        return known[name]

    return ask


@pytest.mark.parametrize("name", SCENARIOS)
def test_3_workers_over_shared_memory_end_with_the_bits_of_1(name: str, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, 3, name)) == {alone(name)}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_2_4_and_8_workers_end_with_the_bits_of_1(name: str, size: int, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, size, name)) == {alone(name)}


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["cnn", "sparse"])
def test_gloo_gives_the_same_bits(name: str, size: int, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, size, name, env={"LOCKSTEP_COMM": "gloo"})) == {alone(name)}


def on_two_machines(rank: int, size: int, name: str) -> str:
    os.environ["LOCKSTEP_MACHINE"] = "ab"[rank % 2]  # interleaved, and of unequal size
    return scenario(rank, size, name)


def test_two_levels_give_the_same_bits(alone: Callable[[str], str]) -> None:
    assert set(run_workers(on_two_machines, 3, "cnn", env={"LOCKSTEP_COMM": "twolevel"})) == {alone("cnn")}


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_loopback_gives_the_same_bits(name: str, alone: Callable[[str], str]) -> None:
    """Ranks as threads. They share this process's generators: nothing here draws from them after the models are built."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    jobs = [SCENARIOS[name]() for _ in range(4)]

    def body(comm: Comm) -> str:
        model, objects, options = jobs[comm.rank]
        return train(model, *objects, comm=comm, **options)

    assert set(on_threads(4, body)) == {alone(name)}


def loosely(rank: int, size: int) -> tuple[str, list[Tensor]]:
    torch.manual_seed(11)
    model = MLP()
    result = train(model, sgd(model), exact=False)
    return result, [p.detach() for p in model.parameters()]


def test_without_exact_replicas_are_identical_and_close_to_one_process() -> None:
    ((_, alone_),) = run_workers(loosely, 1)
    results = run_workers(loosely, 3)
    assert len({result for result, _ in results}) == 1
    for ours, theirs in zip(results[0][1], alone_, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def sums(rank: int, size: int) -> list[str]:
    torch.manual_seed(0)
    model = Dropping()
    run = lockstep.Run(model, sgd(model), lanes=LANES)
    found = []
    for data in (dataset(), dataset(5), Stream()):
        result = run.evaluate(
            lambda b: {"n": len(b[0]), "loss": F.cross_entropy(model(b[0]), b[1], reduction="sum"), "each": b[0].sum(0)},
            data,
            global_batch=BATCH,
        )
        assert result["n"] == (5 if data is not None and isinstance(data, TensorDataset) and len(data) == 5 else SAMPLES)
        found.append(digest(*flatten(result, "sums")).hex())
    run.close()
    return found


def test_evaluate_gives_the_same_bits_on_any_number_of_workers() -> None:
    (expected,) = run_workers(sums, 1)
    for size in (2, 3, 8):
        assert all(found == expected for found in run_workers(sums, size))


EXAMPLES = Path(__file__).parents[2] / "examples"


def example(rank: int, size: int, name: str, lanes: str) -> list[Tensor]:
    source = (EXAMPLES / name).read_text().replace("lanes=8", lanes)
    found: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, name, "exec"), found)
    return [p.detach() for p in found["model"].parameters()]


def test_the_example_differs_from_its_twin_by_three_lines_and_gives_the_same_weights() -> None:
    texts = [(EXAMPLES / name).read_text().splitlines() for name in ("alone.py", "train.py")]
    difference = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert [line for line in difference if line[0] == "+"] == [
        "+ import lockstep",
        "+ run = lockstep.Run(model, opt, sched, lanes=8)",
        "+ for x, y in run.shard(dataset, global_batch=256):",
    ]
    assert len(difference) == 4  # one of the three replaces the line with the DataLoader
    (twin,) = run_workers(example, 1, "alone.py", "")
    (one_lane,) = run_workers(example, 1, "train.py", "lanes=1")
    assert all(torch.equal(a, b) for a, b in zip(twin, one_lane, strict=True))
    (eight_lanes,) = run_workers(example, 1, "train.py", "lanes=8")
    for workers in (2, 3):
        for replica in run_workers(example, workers, "train.py", "lanes=8"):
            assert all(torch.equal(a, b) for a, b in zip(eight_lanes, replica, strict=True))
    for a, b in zip(eight_lanes, twin, strict=True):  # lanes add in another order than one batch does
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def growing(rank: int, size: int) -> str:
    """A second loss begins in step 3, on the lanes whose first label is even only."""
    torch.manual_seed(1)
    model = MLP()
    opt = sgd(model)
    run = lockstep.Run(model, opt, lanes=LANES, seed=3, bucket_mb=0.0005)
    for step in run.steps(dataset(), global_batch=BATCH, shuffle=True, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            if run.step >= 3 and int(y[0]) % 2 == 0:
                model(x).square().mean().backward()
        opt.step()
    result = digest(*flatten({"model": model.state_dict(), "opt": opt.state_dict()}, "state")).hex()
    run.close()
    return result


def test_a_number_of_backwards_that_grows_and_varies_gives_the_same_bits() -> None:
    (alone,) = run_workers(growing, 1)
    assert set(run_workers(growing, 3)) == {alone}
