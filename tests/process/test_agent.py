"""The agent's rules on real runs: nothing hangs, a run that did not finish fails, and training does not need the run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.observe.ledger import read
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
        time.sleep(0.01)  # the run shall last long enough for what tests do to it
        note("step", str(run.step))
        IN_STEP
note("weights", "".join(f"{float(v).hex()} " for v in model.weight.detach().flatten()))
run.close()
AT_END
"""


def script(in_step: str = "pass", at_end: str = "", epochs: int = 15) -> str:
    return TRAIN.replace("IN_STEP", in_step).replace("AT_END", at_end).replace("EPOCHS", str(epochs))


def noted(run: LaunchedRun, name: str) -> dict[int, int]:
    """worker -> the number that it noted."""
    return {int(worker): int(text) for worker, text in run.notes(name).items()}


def await_step(run: LaunchedRun, worker: int, step: int = 3) -> None:
    run.wait_until(lambda: noted(run, "step").get(worker, -1) >= step, f"worker {worker} has committed step {step}")


def weights(run: LaunchedRun) -> set[str]:
    return set(run.notes("weights").values())


# -- the run folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_a_run_folder_that_is_removed_does_not_disturb_training_or_recovery(launch: Callable[..., LaunchedRun], comm: str) -> None:
    run = launch(script().replace("lanes=4", f"lanes=4, comm={comm!r}"), "-n", "3", "--ledger")
    await_step(run, 1)
    shutil.rmtree(run.run_dir)
    run.kill(1)
    await_step(run, 3)  # the replacement
    assert run.wait() == 0, run.stderr()
    assert len(weights(run)) == 1
    assert "generation 2" in run.stderr()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    path = tmp_path / "disk"
    path.mkdir()
    if (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(path)], capture_output=True).returncode
        != 0
    ):
        pytest.skip("only root can mount a small file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def test_a_full_disk_below_the_run_folder_does_not_disturb_training_or_recovery(
    launch: Callable[..., LaunchedRun], small_disk: Path
) -> None:
    run = launch(script(), "-n", "3", "--ledger", "--run-dir", str(small_disk / "run"))
    await_step(run, 1)
    with (small_disk / "big").open("wb", buffering=0) as big, contextlib.suppress(OSError):
        while True:
            big.write(bytes(4096))
    run.kill(1)
    await_step(run, 3)  # the replacement
    assert run.wait() == 0, run.stderr()
    assert len(weights(run)) == 1
    assert "cannot be written (No space left on device)" in run.stderr()
    assert all(isinstance(line, dict) for line in read(small_disk / "run" / "ledger"))


def test_a_lock_in_the_run_folder_holds_nobody_up(launch: Callable[..., LaunchedRun]) -> None:
    """As a worker did that was stopped while it wrote to the file in which the workers of a generation met."""
    run = launch(script(epochs=40), "-n", "3", "--hang-timeout", "2")
    await_step(run, 1)
    with (run.run_dir / "store-1").open("w") as first, (run.run_dir / "store-2").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        run.kill(1)
        assert run.wait() == 0, run.stderr()
    assert "hangs" not in run.stderr()
    assert len(weights(run)) == 1


def test_a_worker_that_is_stopped_during_a_recovery_is_killed(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=40), "-n", "3", "--hang-timeout", "2")
    for id in (0, 1, 2):
        await_step(run, id)
    run.kill(1)
    run.kill(2, signal.SIGSTOP)
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
    run.scale(3)
    assert run.wait() == 0, run.stderr()
    assert re.search(r"worker 1 \(rank 1, pid \d+\) hangs and is killed: .*committed steps\. --hang-timeout raises", run.stderr())
    assert len(weights(run)) == 1


@pytest.mark.parametrize("where", ["before the end", "at exit"])
def test_a_worker_that_hangs_after_the_last_loop_is_killed(launch: Callable[..., LaunchedRun], where: str) -> None:
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


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_announced_work_of_one_worker_is_not_taken_for_a_hang(launch: Callable[..., LaunchedRun], comm: str) -> None:
    """Between two steps, and without CPU time behind the last loop. The others go on waiting, so no generation is broken."""
    work = "if run.is_main and run.step == 5:\n            with run.alone('saving the best model'): time.sleep(2.5)"
    end = "if worker == 0:\n    with run.alone('exporting'): time.sleep(2.5)"
    run = launch(script(work, end, epochs=3).replace("lanes=4", f"lanes=4, comm={comm!r}"), "-n", "2", "--hang-timeout", "1")
    assert run.wait() == 0, run.stderr()
    assert run.generations() == [[0, 1]]
    assert "hangs" not in run.stderr()
    assert len(weights(run)) == 1


def test_announced_work_hides_neither_a_death_nor_work_beyond_its_limit(launch: Callable[..., LaunchedRun]) -> None:
    work = "if worker == 0 and run.step == 5 or worker == 1 and run.generation == 2:\n"
    work += "            with run.alone('saving', limit_s=60 - 59 * worker):\n"
    work += "                note('alone')\n                time.sleep(120)"
    run = launch(script(work, epochs=1000), "-n", "2", "--hang-timeout", "1")
    run.wait_until(lambda: "0" in run.notes("alone"), "worker 0 works alone")
    run.kill(0)
    await_step(run, 3)  # the replacement of worker 1
    assert re.search(r"worker 1 .* hangs and is killed: .*in run\.alone\('saving'\).*limit_s=1\. --hang-timeout", run.stderr())
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_a_zygote_that_hangs_is_replaced(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=5000), "-n", "2", "--hang-timeout", "2")
    await_step(run, 1)
    zygote = run.zygote()
    os.kill(zygote, signal.SIGSTOP)
    run.kill(1)
    await_step(run, 2)
    assert f"the process that starts workers (pid {zygote}) hangs and is killed" in run.stderr()
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_an_agent_that_is_stopped_for_longer_than_the_hang_timeout_kills_nobody(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script(epochs=100), "-n", "2", "--hang-timeout", "1")
    await_step(run, 1)
    run.process.send_signal(signal.SIGSTOP)
    before = noted(run, "step")[1]
    try:
        await_step(run, 1, before + 150)  # the workers train on: at least 1.5 s
        run.kill(1)
    finally:
        run.process.send_signal(signal.SIGCONT)
    await_step(run, 2)
    assert run.wait() == 0, run.stderr()
    assert "hangs" not in run.stderr()
    assert len(weights(run)) == 1


# -- exit codes ---------------------------------------------------------------------------------


def test_workers_killed_after_sigterm_in_mid_step_are_no_success(launch: Callable[..., LaunchedRun]) -> None:
    stand_still = "if run.step == 5: time.sleep(60)"
    run = launch(script(stand_still), "-n", "2")
    run.wait_until(lambda: noted(run, "step") == {0: 5, 1: 5}, "both stand still in step 5")
    for pid in noted(run, "pid").values():
        os.kill(pid, signal.SIGTERM)
    leaving = lambda: [entry for entry in run.events() if "LeaveRequested" in entry["event"]]  # noqa: E731
    run.wait_until(lambda: len(leaving()) == 2, "the agent knows that both want to leave")
    for pid in noted(run, "pid").values():
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert "no worker is left" in run.stderr()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_behind_the_last_loop_is_no_success(launch: Callable[..., LaunchedRun], victim: int) -> None:
    end = f"if worker == {victim}:\n    other = Path('weights-{1 - victim}')\n    while not other.exists(): time.sleep(0.01)\n"
    end += "    os.kill(os.getpid(), signal.SIGKILL)\nPath(f'saved-{worker}').touch()"
    run = launch(script(at_end=end, epochs=3), "-n", "2")
    assert run.wait() == 128 + signal.SIGKILL, run.stderr()
    assert f"worker {victim}" in run.stderr()
    assert "behind its last loop was not completed" in run.stderr()


def test_the_same_error_from_two_workers_ends_the_run_with_it(launch: Callable[..., LaunchedRun]) -> None:
    """It fails on every rank but 0, in whatever step: it is not a fault, but a bug of the script."""
    run = launch(script("if run.rank > 0: raise ValueError(f'bug on rank {run.rank} in step {run.step}')", epochs=200), "-n", "2")
    assert run.wait() == 1, run.stderr()
    assert re.search(r"the script raised at .*script\.py:\d+ on more than one worker\. Its files", run.stderr())


def test_respawns_that_are_used_up_are_reported_at_once_and_at_the_end(launch: Callable[..., LaunchedRun]) -> None:
    """The script fails on every rank but 0, with no exception that could be compared. Rank 0 is slow until the second failure."""
    fails = "if run.rank > 0:\n            note('exit')\n            os._exit(3)\n"
    fails += "        if not Path('exit-2').exists(): time.sleep(0.05)"
    run = launch(script(fails, epochs=60), "-n", "2", "--max-respawns", "1")
    run.wait_for_text("1 worker goes on; no replacement is started: --max-respawns allows 1 replacement in 5 minutes.\n")
    assert run.wait() == 0, run.stderr()
    assert "lockstep: worker 2 was not replaced: --max-respawns allows 1 replacement in 5 minutes" in run.stderr().splitlines()


def test_recoveries_without_progress_end_the_run_and_say_what_each_worker_reported(launch: Callable[..., LaunchedRun]) -> None:
    """Each attempt of the evaluation fails on worker 1 as if it had lost the others, and all begin again."""
    lose = "def lose(batch):\n    if worker == 1: raise lockstep.PeerError('no route to rank 0')\n    return {}\n"
    run = launch(script(at_end=f"{lose}run.evaluate(lose, data, global_batch=4)", epochs=2).replace("run.close()\n", ""), "-n", "2")
    assert run.wait() == 1, run.stderr()
    assert len(run.generations()) == 5  # steps were committed in the first
    assert "generations 1 to 4 ended without a committed step, and nobody died, joined or left" in run.stderr()
    assert re.search(r"worker 1 \(pid \d+\): no route to rank 0", run.stderr())


EXCHANGE = """
import lockstep.training.run as calls
def exchange(name, function, value, tensor_of):
    \"\"\"Worker 1 loses the others when worker 0 has changed its result: it receives the result from worker 0.\"\"\"
    real = getattr(calls, function)
    def lose(*args):
        real(*args)
        while not Path(f"changed-{name}").exists(): time.sleep(0.01)
        setattr(calls, function, real)
        raise lockstep.PeerError("asked to")
    if worker == 1: setattr(calls, function, lose)
    result = tensor_of(getattr(run, name)(value))
    note(name, str(float(result)))
    result.zero_()
    Path(f"changed-{name}").touch()
"""


def test_a_result_that_a_worker_changes_reaches_the_others_unchanged(launch: Callable[..., LaunchedRun]) -> None:
    calls = (
        "if run.step == 3: exchange('gather', 'gather_values', torch.ones(1), lambda values: values[0])",
        "if run.step == 5: exchange('mean', 'mean_of_values', torch.ones(1), lambda value: value)",
        "if run.step == 7: exchange('broadcast', 'broadcast_value', {'a': torch.ones(1)}, lambda value: value['a'])",
    )
    trains = script("\n        ".join(calls), epochs=3).replace("torch.manual_seed(0)", f"{EXCHANGE}\ntorch.manual_seed(0)")
    run = launch(trains, "-n", "2")
    assert run.wait() == 0, run.stderr()
    assert run.generations() == [[0, 1]] * 4
    for name in ("gather", "mean", "broadcast"):
        assert run.notes(name) == {"0": "1.0", "1": "1.0"}


# -- newcomers ----------------------------------------------------------------------------------


def test_a_run_that_was_scaled_down_can_be_scaled_up_and_replaces_dead_workers(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(script("if worker > 1: time.sleep(0.05)", epochs=400), "-n", "2")  # it lasts until the test ends it
    await_step(run, 1)
    run.scale(1)
    run.wait_until(lambda: not is_running(noted(run, "pid")[1]), "worker 1 has left")
    run.scale(2)
    await_step(run, 2)
    run.kill(2)
    await_step(run, 3)
    run.kill(3, signal.SIGTERM)  # leaves
    run.wait_until(lambda: not is_running(noted(run, "pid")[3]), "worker 3 has left")
    run.scale(2)
    await_step(run, 4)
    run.kill(0)
    await_step(run, 5)
    run.process.send_signal(signal.SIGINT)
    run.wait()


@pytest.mark.parametrize("before", ["torch.manual_seed(0)", "data = torch"], ids=["before Run", "between Run and the loop"])
def test_slow_set_up_of_a_newcomer_is_not_taken_for_a_hang(launch: Callable[..., LaunchedRun], before: str) -> None:
    slow = script(epochs=300).replace(before, f"if worker > 1: time.sleep(3)\n{before}")
    run = launch(slow, "-n", "2", "--hang-timeout", "1")
    await_step(run, 1)
    run.kill(1)
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
    run.wait_until(lambda: len(list(run.folder.glob("asleep-*"))) == 2, "both loaders are asleep")
    loaders = [int(path.name.partition("-")[2]) for path in run.folder.glob("asleep-*")]
    run.process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in loaders), "the loaders end with the agent", 10.0)


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
