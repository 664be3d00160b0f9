"""The agent's rules on real runs: nothing hangs, a run that did not finish fails, and training does not need the run folder."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import LaunchedRun, is_running
from tests.waiting import wait_until

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
import lockstep
worker = int(os.environ["LOCKSTEP_WORKER"])
def note(name, text=""):
    Path(f".{name}-{worker}").write_text(f"{text or os.getpid()}\\n")
    Path(f".{name}-{worker}").rename(f"{name}-{worker}")
note("pid")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
run = lockstep.Run(model, opt, lanes=4)
data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64)
for (x,) in run.shard(data, global_batch=4, epochs=EPOCHS):
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
    if run.committed:
        time.sleep(0.01)
        note("step", str(run.step))
        IN_STEP
note("weights", "".join(f"{float(v).hex()} " for v in model.weight.detach().flatten()))
run.close()
AT_END
"""


def script(in_step: str = "pass", at_end: str = "", epochs: int = 15) -> str:
    return TRAIN.replace("IN_STEP", in_step).replace("AT_END", at_end).replace("EPOCHS", str(epochs))


@pytest.fixture
def launch(launch: Callable[..., LaunchedRun]) -> Callable[..., LaunchedRun]:
    """The fixture of all process tests, with one thread per worker."""
    return lambda text, *options: launch(text, *options, env={"OMP_NUM_THREADS": "1"})


def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    wait_until(condition, "it has happened", deadline_s)


def noted(run: LaunchedRun, name: str) -> dict[int, int]:
    """worker -> the number that it noted."""
    return {int(path.name.partition("-")[2]): int(path.read_text()) for path in run.folder.glob(f"{name}-*")}


def await_step(run: LaunchedRun, worker: int, step: int = 3) -> None:
    until(lambda: noted(run, "step").get(worker, -1) >= step or run.process.poll() is not None)
    assert run.process.poll() is None, run.stderr()


def scale(run: LaunchedRun, size: int) -> str:
    done = subprocess.run([sys.executable, "-m", "lockstep", "scale", str(run.run_dir), str(size)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def weights(run: LaunchedRun) -> set[str]:
    return {path.read_text() for path in run.folder.glob("weights-*")}


# -- the run folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_a_run_folder_that_is_removed_does_not_disturb_training_or_recovery(launch: Callable[..., LaunchedRun], comm: str) -> None:
    run = launch(script().replace("lanes=4", f"lanes=4, comm={comm!r}"), "-n", "3", "--ledger")
    await_step(run, 1)
    shutil.rmtree(run.run_dir)
    os.kill(noted(run, "pid")[1], signal.SIGKILL)
    await_step(run, 3)  # the replacement
    assert run.wait() == 0, run.stderr()
    assert len(weights(run)) == 1
    assert "generation 2" in run.stderr()


def test_a_lock_in_the_run_folder_holds_nobody_up(launch: Callable[..., LaunchedRun]) -> None:
    """As a worker did that was stopped while it wrote to the file in which the workers of a generation met."""
    run = launch(script(epochs=40), "-n", "3", "--hang-timeout", "2")
    await_step(run, 1)
    with (run.run_dir / "store-1").open("w") as first, (run.run_dir / "store-2").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        os.kill(noted(run, "pid")[1], signal.SIGKILL)
        assert run.wait() == 0, run.stderr()
    assert "hangs" not in run.stderr()
    assert len(weights(run)) == 1


def test_a_worker_that_is_stopped_during_a_recovery_is_killed(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=40), "-n", "3", "--hang-timeout", "2")
    for id in (0, 1, 2):
        await_step(run, id)
    pids = noted(run, "pid")
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[2], signal.SIGSTOP)
    assert run.wait() == 0, run.stderr()
    assert re.search(r"worker 2 \(rank \d, pid \d+\) hangs and is killed: .*--hang-timeout raises the limit", run.stderr())
    assert len(weights(run)) == 1


def test_two_runs_in_one_folder_are_refused_and_a_dead_run_frees_it(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=100), "-n", "1")
    await_step(run, 0)
    (run.run_dir / "agent.sock").unlink()  # as a cleaner of temporary folders does
    command = [sys.executable, "-m", "lockstep", "run", "-n", "1", "--run-dir", str(run.run_dir), "other.py"]
    (run.folder / "other.py").write_text("print('other')")
    other = subprocess.run(command, cwd=run.folder, capture_output=True, timeout=60)
    assert other.returncode == 2
    assert f"another run uses {run.run_dir} (pid {run.process.pid})" in other.stderr.decode()
    run.process.kill()
    run.process.wait()
    other = subprocess.run(command, cwd=run.folder, capture_output=True, timeout=60)
    assert (other.returncode, other.stdout) == (0, b"other\n"), other.stderr


def test_a_run_folder_whose_name_is_not_utf8_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    name = os.fsencode(tmp_path) + b"/run-\xff"
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--run-dir", name, "script.py"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert rb"run-\xff, is not UTF-8 text" in done.stderr
    assert b"Traceback" not in done.stderr


# -- the hang timeout ---------------------------------------------------------------------------


def test_a_member_that_stands_still_while_a_newcomer_waits_is_killed(launch: Callable[..., LaunchedRun]) -> None:
    """It has left its last collective: no other member waits for it in one."""
    still = "if worker == 1 and run._workers.link.wants_change: os.kill(os.getpid(), signal.SIGSTOP)"
    run = launch(script(still, epochs=60), "-n", "2", "--hang-timeout", "2")
    await_step(run, 1)
    assert "1 more is starting" in scale(run, 3)
    assert run.wait() == 0, run.stderr()
    assert re.search(r"worker 1 \(rank 1, pid \d+\) hangs and is killed: .*committed steps\. --hang-timeout raises", run.stderr())
    assert len(weights(run)) == 1


@pytest.mark.parametrize("where", ["before the end", "at exit"])
def test_a_worker_that_hangs_after_the_last_loop_is_killed_and_the_run_fails(
    launch: Callable[..., LaunchedRun], where: str
) -> None:
    hang = "os.kill(os.getpid(), signal.SIGSTOP)"
    end = (
        f"if worker == 1: {hang}"
        if where == "before the end"
        else f"import atexit\nif worker == 1: atexit.register(lambda: {hang})"
    )
    run = launch(script(at_end=end, epochs=3), "-n", "2", "--hang-timeout", "1")
    assert run.wait() == 128 + signal.SIGKILL, run.stderr()
    assert "worker 1" in run.stderr()
    assert "used no CPU time" in run.stderr()
    assert "--hang-timeout raises the limit" in run.stderr()


def test_a_worker_that_works_after_the_last_loop_is_left_alone(launch: Callable[..., LaunchedRun]) -> None:
    work = "end = time.monotonic() + 4\nwhile worker == 1 and time.monotonic() < end: pass\nprint('done', worker)"
    run = launch(script(at_end=work, epochs=3), "-n", "2", "--hang-timeout", "1")
    assert run.wait() == 0, run.stderr()
    assert "done 1" in run.log(1)


def test_a_zygote_that_hangs_is_replaced(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=5000), "-n", "2", "--hang-timeout", "2")
    await_step(run, 1)
    zygote = run.zygote()
    os.kill(zygote, signal.SIGSTOP)
    os.kill(noted(run, "pid")[1], signal.SIGKILL)
    await_step(run, 2)
    assert f"the process that starts workers (pid {zygote}) hangs and is killed" in run.stderr()
    run.process.send_signal(signal.SIGINT)
    run.wait()


# -- exit codes ---------------------------------------------------------------------------------


def test_workers_killed_after_sigterm_in_mid_step_are_no_success(launch: Callable[..., LaunchedRun]) -> None:
    stand_still = "if run.step == 5: time.sleep(60)"
    run = launch(script(stand_still), "-n", "2")
    until(lambda: [noted(run, "step").get(id) for id in (0, 1)] == [5, 5])
    for pid in noted(run, "pid").values():
        os.kill(pid, signal.SIGTERM)
    until(lambda: (run.run_dir / "events.jsonl").read_text().count('"LeaveRequested"') == 2)
    for pid in noted(run, "pid").values():
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert "no worker is left" in run.stderr()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_behind_the_last_loop_is_no_success(launch: Callable[..., LaunchedRun], victim: int) -> None:
    end = f"if worker == {victim}:\n    until = Path('weights-{1 - victim}')\n    while not until.exists(): time.sleep(0.01)\n"
    end += "    os.kill(os.getpid(), signal.SIGKILL)\nPath(f'saved-{worker}').touch()"
    run = launch(script(at_end=end, epochs=3), "-n", "2")
    assert run.wait() == 128 + signal.SIGKILL, run.stderr()
    assert f"worker {victim}" in run.stderr()
    assert "behind its last loop was not completed" in run.stderr()


def test_the_same_error_from_two_workers_ends_the_run_with_it(launch: Callable[..., LaunchedRun]) -> None:
    """It fails on every rank but 0, in whatever step: it is not a fault, but a bug of the script."""
    run = launch(script("if run.rank > 0: raise ValueError(f'bug on rank {run.rank} in step {run.step}')", epochs=200), "-n", "2")
    assert run.wait() == 1, run.stderr()
    assert re.search(r"the script raised at .*script\.py:\d+ on more than one worker: ValueError: bug on rank 1", run.stderr())


def test_respawns_that_are_used_up_are_reported_at_once_and_at_the_end(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=30), "-n", "2", "--max-respawns", "0")
    await_step(run, 1)
    os.kill(noted(run, "pid")[1], signal.SIGKILL)
    assert run.wait() == 0, run.stderr()
    lines = [line for line in run.stderr().splitlines() if "worker 1 is not replaced: --max-respawns allows 0" in line]
    assert len(lines) == 2
    assert run.stderr().splitlines()[-1] == lines[-1]


# -- newcomers ----------------------------------------------------------------------------------


def test_a_run_that_was_scaled_down_can_be_scaled_up_and_replaces_dead_workers(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script("if worker > 1 and not Path('go').exists(): time.sleep(0.05)", epochs=400), "-n", "2")
    await_step(run, 1)
    scale(run, 1)
    until(lambda: not is_running(noted(run, "pid")[1]))
    scale(run, 2)
    await_step(run, 2)
    os.kill(noted(run, "pid")[2], signal.SIGKILL)
    await_step(run, 3)
    os.kill(noted(run, "pid")[3], signal.SIGTERM)  # leaves
    until(lambda: not is_running(noted(run, "pid")[3]))
    scale(run, 2)
    await_step(run, 4)
    os.kill(noted(run, "pid")[0], signal.SIGKILL)
    await_step(run, 5)
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_slow_set_up_of_a_newcomer_is_not_taken_for_a_hang(launch: Callable[..., LaunchedRun]) -> None:
    slow = script(epochs=300).replace("torch.manual_seed(0)", "torch.manual_seed(0)\nif worker > 1: time.sleep(3)")
    run = launch(slow, "-n", "2", "--hang-timeout", "1")
    await_step(run, 1)
    os.kill(noted(run, "pid")[1], signal.SIGKILL)
    await_step(run, 2)
    assert "hangs" not in run.stderr()
    assert set(noted(run, "pid")) == {0, 1, 2}
    run.process.send_signal(signal.SIGINT)
    run.wait()


# -- processes ----------------------------------------------------------------------------------


def test_kill_9_of_the_agent_ends_loader_processes_inside_a_long_getitem(launch: Callable[..., LaunchedRun]) -> None:
    dataset = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        if Path("sleep").exists():
            Path(f"asleep-{os.getpid()}").touch()
            time.sleep(120)
        return torch.ones(4),
data = Slow()
"""
    slow = re.sub("data = torch.*", dataset, script(epochs=100))
    slow = slow.replace("global_batch=4", "global_batch=4, num_workers=1")
    run = launch(slow, "-n", "2")
    await_step(run, 1)
    (run.folder / "sleep").touch()
    until(lambda: len(list(run.folder.glob("asleep-*"))) == 2)
    loaders = [int(path.name.partition("-")[2]) for path in run.folder.glob("asleep-*")]
    run.process.kill()
    until(lambda: not any(is_running(pid) for pid in loaders), 10.0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_the_run_folder_must_belong_to_the_user_even_for_root(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "run").mkdir(mode=0o777)
    os.chown(tmp_path / "run", 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--run-dir", "run", "script.py"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert b"belongs to user 65534, not to you" in done.stderr
