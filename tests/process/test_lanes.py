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
from lockstep.gradients import lane_buffers
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


@pytest.mark.parametrize("helper", ["off", "on"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_3_workers_over_shared_memory_end_with_the_bits_of_1(name: str, helper: str, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, 3, name, env={"LOCKSTEP_HELPER_THREAD": helper})) == {alone(name)}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "widened"])
def test_2_4_and_8_workers_end_with_the_bits_of_1(name: str, size: int, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, size, name)) == {alone(name)}


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["cnn", "sparse"])
def test_gloo_gives_the_same_bits(name: str, size: int, alone: Callable[[str], str]) -> None:
    assert set(run_workers(scenario, size, name, env={"LOCKSTEP_COMM": "gloo"})) == {alone(name)}


def on_two_machines(rank: int, size: int, name: str) -> str:
    os.environ["LOCKSTEP_MACHINE"] = "ab"[rank % 2]  # interleaved, and of unequal size
    return scenario(rank, size, name)


@pytest.mark.parametrize("helper", ["off", "on"])
def test_two_levels_give_the_same_bits(helper: str, alone: Callable[[str], str]) -> None:
    env = {"LOCKSTEP_COMM": "twolevel", "LOCKSTEP_HELPER_THREAD": helper}
    assert set(run_workers(on_two_machines, 3, "cnn", env=env)) == {alone("cnn")}


@pytest.mark.parametrize("name", ["mlp", "cnn", "widened"])
def test_loopback_gives_the_same_bits(name: str, alone: Callable[[str], str]) -> None:
    """Ranks as threads. They share this process's generators: nothing here draws from them after the models are built."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    jobs = [SCENARIOS[name]() for _ in range(4)]

    def body(comm: Comm) -> str:
        model, objects, options = jobs[comm.rank]
        return train(model, *objects, comm=comm, **options)

    assert set(on_threads(4, body)) == {alone(name)}


class Constants(torch.nn.Module):
    """Has buffers of every kind that a lane leaves as they are, changes always, or changes sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.register_buffer("rotations", torch.full((2,), 0.1 + 0.7j))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sometimes", torch.full((4,), 0.3, dtype=torch.bfloat16))
        self.register_buffer("table", torch.linspace(0, 1, 40_000))  # not small
        self.register_buffer("codes", torch.linspace(0, 1, 40_000))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += len(x)
        self.codes.data[: len(x)].add_(x[:, 0])  # without a new version number
        if x[0, 0] > 1:
            self.sometimes += x[0, :4]
        return self.body(x)


def buffers_of(rank: int, size: int, name: str, on_device: bool) -> dict[str, Any]:
    if on_device:
        lane_buffers._is_on_device = lambda tensor: True
    torch.manual_seed(11)
    if name != "constants":
        return {"digest": scenario(rank, size, name)}
    model = Constants()
    digest_ = train(model, sgd(model))
    return {"digest": digest_, **{k: v.tolist() for k, v in model.named_buffers() if v.numel() < 5}}


@pytest.mark.parametrize("name", ["constants", "cnn", "noisy"])
def test_buffers_on_a_gpu_get_the_bits_of_buffers_on_the_host(name: str) -> None:
    (expected,) = run_workers(buffers_of, 1, name, False)
    if name == "constants":
        assert expected["counter"] > 0
        assert expected["constant"] == torch.full((3,), 0.1).tolist()
        assert expected["sometimes"] != torch.full((4,), 0.3, dtype=torch.bfloat16).tolist()
    for size in (1, 2, 3):
        assert run_workers(buffers_of, size, name, True) == [expected] * size


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


def average_in(rank: int, size: int, reduce_dtype: torch.dtype | None, exact: bool) -> tuple[Tensor, Tensor]:
    """Returns the averaged gradient of one step in bfloat16, and its exact value."""
    lanes, width = 64, 500
    model = torch.nn.Linear(width, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lockstep.Run(model, optimizer, lanes=lanes, exact=exact, reduce_dtype=reduce_dtype)
    data = torch.randn(lanes, width, generator=torch.Generator().manual_seed(5)).bfloat16() + 1
    for x in run.shard(data, global_batch=lanes):  # the gradient of each lane is its sample, to the bit
        model(x).sum().backward()
        if run.averaged:
            assert model.weight.grad is not None
            found = model.weight.grad.double().squeeze()
        optimizer.step()
    run.close()
    return found, data.double().mean(0)


@pytest.mark.parametrize("exact", [True, False])
def test_with_reduce_dtype_the_average_is_rounded_once(exact: bool) -> None:
    results = run_workers(average_in, 2, torch.float32, exact)
    for found, true in results:
        assert torch.equal(found, true.float().bfloat16().double())
    for found, true in run_workers(average_in, 2, None, exact):
        ours = (results[0][0] - true).norm()
        assert (found - true).norm() > 1.5 * ours > 0


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
