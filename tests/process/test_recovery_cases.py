"""The cases of tests/gpu/test_recovery.py over gloo, and the replacement's number on its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chaos_gpu, recovery_cases
from tests.launch import LaunchedRun

LOCAL_RANKS = """
import os, time
import torch, lockstep
from pathlib import Path
worker = os.environ["LOCKSTEP_WORKER"]
Path(f"local-{worker}").write_text(os.environ["LOCAL_RANK"] + "\\n")
Path(f"pid-{worker}").write_text(f"{os.getpid()}\\n")
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=4)
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=8, epochs=100000):
    model(x).sum().backward()
    opt.step(); opt.zero_grad()
    if run.committed:
        time.sleep(0.005)
        if run.generation >= 2 and run.size == 4:
            break
"""


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> str:
    return recovery_cases.result_of_one(tmp_path_factory.mktemp("recovery") / "alone", cpu=True)


@pytest.mark.parametrize("fault", recovery_cases.CASES)
def test_the_others_survive_to_the_same_bits(fault: str, want: str, tmp_path: Path) -> None:
    recovery_cases.require_survival(tmp_path / "run", fault, 3, want, cpu=True)


def test_an_error_on_every_worker_ends_the_run(tmp_path: Path) -> None:
    recovery_cases.require_end(tmp_path / "run", cpu=True)


def test_memory_is_compared_after_each_recovery(tmp_path: Path) -> None:
    assert recovery_cases.memory_after_recoveries(tmp_path / "run", 2, 2, cpu=True) == [0, 0], "there is no GPU"


def test_a_schedule_follows_from_its_seed() -> None:
    assert chaos_gpu.draw(7) == chaos_gpu.draw(7)
    drawn = [chaos_gpu.draw(seed) for seed in range(100)]
    assert {schedule.variant.workers for schedule in drawn} == {2, 3, 4}
    assert {fault.kind for schedule in drawn for fault in schedule.launches[0]} == set(chaos_gpu.KINDS)


def test_a_replacement_takes_the_local_rank_and_so_the_gpu_of_the_dead_worker(tmp_path: Path) -> None:
    run = LaunchedRun(LOCAL_RANKS, folder=tmp_path, workers=4)
    try:
        run.wait_for_generation()
        run.pids(4)
        run.kill(2)
        assert run.wait() == 0, run.dump()
        assert run.notes("local") == {"0": "0", "1": "1", "2": "2", "3": "3", "4": "2"}, run.dump()
    finally:
        run.stop()
