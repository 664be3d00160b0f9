"""Scripts that were written for torchrun, under `lockstep run`: what they find, and what happens when a worker fails."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import ROOT
from tests.launch import DEADLINE_S, LaunchedRun

SCRIPTS = ROOT / "tests" / "scripts"

CONNECT = """
import json, os, signal, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_MAX_RESTARTS"


def test_a_script_finds_the_others_and_a_failure_restarts_all_from_what_it_saved(
    launch: Callable[..., LaunchedRun],
) -> None:
    run = launch(
        f"""{CONNECT}
if rank == 0:
    print(json.dumps({{name: os.environ[name] for name in "{NAMES}".split()}}), os.environ["TORCHELASTIC_RUN_ID"])
first = int(open("saved").read()) if os.path.exists("saved") else 0
for step in range(first, 6):
    total = torch.ones(1)
    dist.all_reduce(total)
    if (step, restart, rank) == (2, 0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if (step, restart, rank) == (4, 1, 0):
        raise ValueError("a fault")
    if rank == 0:
        open("saved", "w").write(str(step + 1))
    dist.barrier()
dist.destroy_process_group()
print("rank", rank, "began at", first, "total", total.item())
""",
        workers=2,
        env={"RANK": "7", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "x"},  # the agent was itself started by another launcher
    )
    assert run.wait() == 0, run.dump()
    first, run_id = run.log(0).splitlines()[0].rsplit(" ", 1)
    values = ("0", "0", "2", "2", "0", "0", "2", "127.0.0.1", "3")
    assert json.loads(first) == dict(zip(NAMES.split(), values)), run.dump()
    assert run_id == "run"
    # Whether step 2 was saved before rank 0 lost rank 1 is a matter of time.
    assert re.fullmatch(r"rank 0 began at 4 total 2.0", run.stdout().splitlines()[-1]), run.dump()
    assert "rank 1 began at 4 total 2.0" in run.log(5), run.dump()
    said = run.stderr()
    # Rank 0 may notice that its connection is closed before the agent sees the death of rank 1, and is then named first.
    assert "All workers are stopped and start again (restart 1 of 3)" in said
    assert re.search(r"worker 1 \(pid \d+\) died \(SIGKILL\)", said)
    assert "raised ValueError. All workers are stopped and start again (restart 2 of 3)" in said
    assert len(re.findall(r"^\[worker \d\] ValueError: a fault$", said, re.M)) == 1, said
    assert "SIGTERM" not in said


def test_restarts_are_bounded_and_the_same_exception_twice_ends_the_run(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(CONNECT + "os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts", "1", workers=1)
    assert run.wait() == 137, run.dump()
    assert "--max-restarts allows no more" in run.stderr()
    run = launch(CONNECT + "raise KeyError(os.getpid())", workers=1, folder=run.folder / "raises")
    assert run.wait() == 1, run.dump()
    assert "again after a restart" in run.stderr(), run.stderr()
    assert len(list(run.run_dir.glob("workers/*"))) == 2


def test_a_script_that_knows_nothing_of_other_workers_is_told(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("print('trained')", workers=2)
    assert run.wait() == 0, run.dump()
    assert "lockstep: 2 workers ran the whole script independently" in run.stderr()


def test_a_replacement_has_the_local_rank_of_the_lost_worker_and_the_agent_is_preferred(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import os, signal, torch, lockstep
name, worker = os.environ["LOCAL_RANK"], os.environ["LOCKSTEP_WORKER"]
open(f"local-{worker}", "w").write(name + "\\n")
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=3)
world = lockstep.World.detect()
assert (world.source, world.size, world.local_rank) == ("LOCKSTEP_*", 3, int(name)), world
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(600, 2)), global_batch=6):
    model(x).sum().backward()
    opt.step(); opt.zero_grad()
    if run.committed and run.step == 5 and worker == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if run.committed and run.step > 5 and worker != "3":
        while not os.path.exists("local-3"): pass
""",
        workers=3,
    )
    assert run.wait() == 0, run.dump()
    assert run.notes("local") == {"0": "0", "1": "1", "2": "2", "3": "1"}, run.dump()


def losses(printed: str) -> dict[str, list[float]]:
    """What a script of tests/scripts/*_style.py prints: for each class the losses of rank 0, at full precision."""
    (line,) = [line for line in printed.splitlines() if line.startswith("losses ")]
    found: dict[str, list[float]] = json.loads(line.removeprefix("losses "))
    return found


def output_of(folder: Path, *command: str) -> str:
    """What a command prints that does not involve `lockstep run`."""
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def under_torchrun(folder: Path, script: Path) -> dict[str, list[float]]:
    return losses(output_of(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)))


def require_equal(found: dict[str, list[float]], under_torchrun: dict[str, list[float]]) -> None:
    """Our class and torch's give the same losses, to the bit with two workers, and so do both launchers."""
    assert len(set(found["torch"])) > 1
    assert found["ours"] == found["torch"]
    assert found == under_torchrun


def test_a_script_in_the_style_of_nanogpt(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    script = SCRIPTS / "nanogpt_style.py"
    run = launch(script, workers=2, env={"OMP_NUM_THREADS": "1"})
    assert run.wait() == 0, run.dump()
    require_equal(losses(run.stdout()), under_torchrun(tmp_path / "torchrun", script))


def test_a_script_in_the_style_of_the_tutorial_that_loses_a_worker(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    script = SCRIPTS / "multigpu_style.py"
    run = launch(script, workers=2, env={"OMP_NUM_THREADS": "1", "KILL_AT_EPOCH": "2"})
    assert run.wait() == 0, run.dump()
    assert "restart 1 of 3" in run.stderr()
    require_equal(losses(run.stdout()), under_torchrun(tmp_path / "torchrun", script))


@pytest.mark.slow
def test_a_script_in_the_style_of_imagenet_that_spawns_its_own_processes(
    launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    script = SCRIPTS / "imagenet_style.py"
    with socket.socket() as free, socket.socket() as other:
        for each in (free, other):
            each.bind(("127.0.0.1", 0))
        urls = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (free, other)]
    run = launch(script, workers=1, args=("--dist-url", urls[0]), env={"OMP_NUM_THREADS": "1"})
    assert run.wait(2 * DEADLINE_S) == 0, run.dump()
    require_equal(losses(run.stdout()), losses(output_of(tmp_path / "python", str(script), "--dist-url", urls[1])))
