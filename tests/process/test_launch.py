"""`lockstep run` on real processes: they are started, stopped and killed, and none is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import DEADLINE_S, LaunchedRun, is_running
from tests.launch import launch as launch_in
from tests.waiting import wait_until

RANK = "import os, sys, signal, time\nrank = int(os.environ.get('LOCKSTEP_RANK', -1))\n"
PID = "open('pid-' + os.environ['LOCKSTEP_WORKER'], 'w').write(f'{os.getpid()}\\n')\n"


@pytest.fixture
def launch(launch: Callable[..., LaunchedRun]) -> Callable[..., LaunchedRun]:
    """The fixture of all process tests, for scripts that use ``rank``."""
    return lambda script, *options, **settings: launch(RANK + script, *options, **settings)


# -- what a script gets, and what the console shows ------------------------------------------------


def test_a_script_is_run_as_python_would_run_it(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import json, random, numpy, torch, __main__
assert __name__ == "__main__" and __main__.rank == rank
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "threads": torch.get_num_threads(),
    "omp": os.environ["OMP_NUM_THREADS"],
    "seed": torch.initial_seed(), "random": [random.random(), numpy.random.rand()], "stdin": sys.stdin.read(),
    "env": {k: v for k, v in os.environ.items() if k.startswith("LOCKSTEP_")}, "hash": "PYTHONHASHSEED" in os.environ,
}))
print("to stderr", rank, file=sys.stderr)
""",
        "-n",
        "2",
        args=("--lr", "3", "-n", "x y"),
        own_imports=True,
    )
    assert run.wait() == 0, run.stderr()
    first, second = (json.loads(run.log(id).splitlines()[0]) for id in (0, 1))
    assert run.stdout() == run.log(0).splitlines()[0] + "\n"
    assert run.stderr() == "to stderr 0\n"
    assert "to stderr 1" in run.log(1)
    assert first["argv"] == ["script.py", "--lr", "3", "-n", "x y"]
    assert first["path"] == str(run.folder)
    assert first["file"] == str(run.folder / "script.py")
    assert first["stdin"] == ""
    assert first["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert first["omp"] == str(first["threads"])
    assert first["hash"] is False
    assert first["seed"] != second["seed"]
    assert first["random"][0] != second["random"][0]
    assert first["random"][1] != second["random"][1]
    assert second["env"]["LOCKSTEP_RANK"] == second["env"]["LOCKSTEP_WORKER"] == second["env"]["LOCKSTEP_LOCAL_RANK"] == "1"
    assert second["env"]["LOCKSTEP_SIZE"] == second["env"]["LOCKSTEP_LOCAL_SIZE"] == "2"
    assert run.run_dir.stat().st_mode & 0o777 == 0o700
    assert not (run.run_dir / "agent.sock").exists()


@pytest.mark.slow
def test_thread_counts_that_the_user_has_set_are_kept(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        "import torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])",
        env={"OMP_NUM_THREADS": "3"},
        own_imports=True,
    )
    assert run.wait() == 0, run.stderr()
    assert run.stdout() == "3 3\n"


@pytest.mark.slow
def test_a_module_of_a_package_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "helper.py").write_text("value = 5")
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom .helper import value\nprint(value, __name__, __package__, sys.argv[1:], sys.path[0])"
    )
    run = launch_in(None, "-m", "package.train", "--lr", "3", folder=tmp_path, own_imports=True)
    assert run.wait() == 0, run.stderr()
    assert run.stdout() == f"5 __main__ package ['--lr', '3'] {tmp_path}\n"


def test_data_loaders_and_exit_handlers_work_and_open_files_are_written(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import atexit, threading, torch
from torch.utils.data import DataLoader
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i * i
print(next(iter(DataLoader(Squares(), batch_size=4, num_workers=1, persistent_workers=True))).tolist())
atexit.register(print, "at exit")
threading.Timer(0.1, print, ["from a thread"]).start()
kept = open("kept.txt", "w"); kept.write("whole")
""",
        "-n",
        "1",
    )
    assert run.wait() == 0, run.stderr()
    assert run.stdout() == "[0, 1, 4, 9]\nfrom a thread\nat exit\n"
    assert (run.folder / "kept.txt").read_text() == "whole"


# -- exit codes and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(None if rank else 200)", 200),
        ("os._exit(7 if rank else 0)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else None", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV) if rank else None", 139),
        ("this is no python", 1),
    ],
)
def test_the_exit_code_is_the_scripts(launch: Callable[..., LaunchedRun], script: str, code: int) -> None:
    run = launch(script, "-n", "2", "--no-respawn")
    assert run.wait() == code, run.stderr()
    if code:
        assert re.search(r"^lockstep: .*worker [01] \((rank [01], )?pid \d+\)", run.stderr(), re.M), run.stderr()
        assert f"lockstep: the run ended with code {code}: " in run.stderr()


def test_the_text_of_sys_exit_is_shown(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("sys.exit('no data') if rank else time.sleep(1000)", "-n", "2")
    assert run.wait() == 1
    shown = r"^script.py:3: SystemExit: no data\n    sys.exit.*\nlockstep: raised by worker 1 \(rank 1, pid \d+\) on \S+\n"
    assert re.search(shown.rstrip("\n"), run.stderr(), re.M), run.stderr()
    assert run.log(1) == "no data\n"


def test_the_traceback_of_several_workers_is_shown_once(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("def deep():\n    1 / 0\nprint('before', rank)\ndeep()\n", "-n", "3")
    assert run.wait() == 1
    text = run.stderr()
    assert text.count("Traceback (most recent call last)") == 1, text
    assert text.startswith("script.py:4: ZeroDivisionError: division by zero\n    1 / 0\n"), text
    (first,) = re.findall(r"^lockstep: raised by (worker \d) \(rank \d, pid \d+\) on \S+\. The traceback:$", text, re.M)
    assert f"[{first}]     1 / 0\n" in text
    assert len(re.findall(r"^lockstep: workers \d and \d failed with the same error\.$", text, re.M)) == 1, text
    assert "launch" not in text.replace(str(run.folder), ""), "the frames of lockstep are not shown"
    for id in range(3):
        assert run.log(id).startswith(f"before {id}\nTraceback (most recent call last):\n")
        assert run.log(id).count("Traceback") == 1


def test_what_a_library_printed_before_it_crashed_is_shown(launch: Callable[..., LaunchedRun]) -> None:
    script = "if rank: os.write(2, b'terminate called\\n'); os.abort()\ntime.sleep(1000)"
    run = launch(script, "-n", "2", "--no-respawn", "--grace", "1")
    run.wait_for_text("died: SIGABRT")
    assert "[worker 1] terminate called\n" in run.stderr()
    run.process.terminate()
    assert run.wait() == 143


def test_a_module_that_cannot_be_preloaded_ends_the_run_with_a_sentence(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such device')")
    run = launch("print('never')", "--preload", "json,broken")
    assert run.wait() == 1
    assert "lockstep: --preload broken cannot be imported: RuntimeError: no such device." in run.stderr()
    assert "never" not in run.stdout()


def test_a_module_that_starts_threads_cannot_be_preloaded(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='poller').start()"
    )
    run = launch("print('never')", "--preload", "busy")
    assert run.wait() == 1
    assert "--preload busy cannot be used: importing it starts threads (poller)" in run.stderr()


def test_a_preloaded_module_is_imported_before_the_fork(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os\nimported_by = os.getpid()")
    run = launch("print('heavy' in sys.modules)\nimport heavy\nprint(heavy.imported_by != os.getpid())", "--preload", "heavy")
    assert run.wait() == 0, run.stderr()
    assert run.stdout() == "True\nTrue\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "scirpt.py"], "there is no script scirpt.py. Did you mean script.py?"),
        (["run", "-n", "2", "folder"], "folder is a directory, not a script."),
        (["run", "-n", "0", "script.py"], "argument -n: '0' is not a whole number of at least 1"),
        (["run", "-n", "abc", "script.py"], "argument -n: 'abc' is not a whole number"),
        (["run", "-n"], "argument -n: expected one argument"),
        (["run", "--preloads", "x", "script.py"], "there is no option --preloads. Did you mean --preload?"),
        (["run", "--preload", "nonsuch", "script.py"], "--preload nonsuch: there is no module nonsuch"),
        (["run", "--grace", "-1", "script.py"], "'-1' is not a number of seconds"),
        (["run", "-m", "nonsuch.train"], "-m nonsuch.train: there is no module nonsuch"),
        (["run", "-n", "2"], "no script was given"),
        (["run", "-n", "2", "--debug-rank", "2", "script.py"], "--debug-rank 2: 2 workers have the ranks 0 to 1."),
        (["run", "--run-dir", "script.py/run", "script.py"], "cannot be made"),
        (["scale", "folder", "3"], "there is no run folder: the folder exists, but has no events.jsonl."),
        (["scale", "folder", "none"], "argument N: 'none' is not a whole number"),
        (["rnu", "script.py"], "there is no command rnu. Did you mean run?"),
        (["fly"], "there is no command fly. `lockstep --help` lists the commands."),
        (["scale", "folder", "3", "4"], "the argument 4 is one too many"),
        (["run", "-m"], "-m needs the name of a module"),
        ([], "no command was given"),
    ],
)
def test_a_bad_argument_is_one_clear_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("lockstep: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "lockstep-runs").exists()


def test_the_agent_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, lockstep.__main__, lockstep.launcher.local_run; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
    done = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert re.fullmatch(r"lockstep \d+\.\d+\.\d+\n", done.stdout)


# -- stopping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_workers_and_they_can_exit_cleanly(launch: Callable[..., LaunchedRun], number: int, code: int) -> None:
    run = launch(
        f"""
def note(*_):
    print("saved", rank); sys.exit(0)
signal.signal({int(number)}, note)
{PID}
time.sleep(1000)
""",
        "-n",
        "2",
        "--grace",
        "30",
    )
    pids = run.pids(2)
    zygote = run.zygote()
    run.process.send_signal(number)
    assert run.wait() == code
    assert run.log(0) == "saved 0\n"
    assert run.log(1) == "saved 1\n"
    assert not any(map(is_running, [*pids, zygote]))


def test_a_terminal_that_is_closed_ends_the_run_as_sigterm_does(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        f"signal.signal(signal.SIGTERM, lambda *_: (print('saved', rank), sys.exit(0)))\n{PID}\ntime.sleep(1000)", "-n", "2"
    )
    pids = run.pids(2)
    run.process.send_signal(signal.SIGHUP)
    assert run.wait(30) == 129
    assert (run.log(0), run.log(1)) == ("saved 0\n", "saved 1\n")
    assert not any(map(is_running, pids))


def test_a_keyboard_interrupt_shows_no_tracebacks(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(PID + "time.sleep(1000)", "-n", "2")
    run.pids(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.stderr()
    assert "KeyboardInterrupt" in run.log(0)


@pytest.mark.exclusive
def test_a_worker_that_ignores_ctrl_c_is_killed_after_the_grace(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PID + "time.sleep(1000)", "-n", "2", "--grace", "1")
    pids = run.pids(2)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: not any(map(is_running, pids)), "the workers are killed", deadline_s=3.0)
    assert time.monotonic() - sent >= 1.0
    assert run.wait() == 130
    name = r"worker \d \(rank \d, pid \d+\)"
    assert re.search(rf"^lockstep: killing {name}, {name}, which did not stop within 1 s.$", run.stderr(), re.M), run.stderr()


@pytest.mark.exclusive
def test_a_second_ctrl_c_kills_at_once(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PID + "time.sleep(1000)", "-n", "2", "--grace", "1000")
    pids = run.pids(2)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_text("Ctrl-C again")
    assert all(map(is_running, pids))
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: not any(map(is_running, pids)), "the workers are killed", deadline_s=1.0)
    assert run.wait(2.0) == 130


@pytest.mark.exclusive
def test_a_signal_during_the_imports_ends_the_run(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("print('never')", "-n", "2", own_imports=True)
    zygote = run.zygote()
    run.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_running(zygote), "the zygote is killed", deadline_s=1.0)  # the imports take longer
    assert run.wait() == 143
    assert run.stdout() == ""


# -- killing ----------------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_kill_9_of_the_agent_ends_all_its_processes(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(PID + "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\ntime.sleep(1000)", "-n", "3")
    pids = [*run.pids(3), run.zygote()]
    run.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), "no process is left", deadline_s=1.0)


def test_kill_9_of_the_zygote_does_not_disturb_its_workers(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(PID + "while not os.path.exists('go'): time.sleep(0.01)\nprint('continued', rank)", "-n", "2")
    run.pids(2)
    zygote = run.zygote()
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not is_running(zygote), "the zygote is gone")
    (run.folder / "go").write_text("")
    assert run.wait() == 0, run.stderr()
    assert (run.log(0), run.log(1)) == ("continued 0\n", "continued 1\n")


@pytest.mark.slow
def test_kill_9_of_the_zygote_while_it_imports_only_costs_time(launch: Callable[..., LaunchedRun]) -> None:
    run = launch("print('there')", "-n", "2", own_imports=True)
    zygote = run.zygote()
    os.kill(zygote, signal.SIGKILL)
    assert run.wait() == 0, run.stderr()
    assert run.log(1) == "there\n"


def test_processes_that_a_dead_worker_has_started_are_killed(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import subprocess
if rank:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open("pid-child", "w").write(f"{child.pid}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("go"): time.sleep(0.01)
""",
        "-n",
        "2",
        "--no-respawn",
    )
    (child,) = run.pids(1)
    run.wait_until(lambda: not is_running(child), "the process that the dead worker has started is killed")
    (run.folder / "go").write_text("")
    assert run.wait() == 137


def test_processes_that_workers_leave_running_are_killed_at_the_end_of_the_run(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        "import subprocess; child = subprocess.Popen(['sleep', '1000']); open(f'pid-{rank}', 'w').write(f'{child.pid}\\n')",
        "-n",
        "2",
    )
    assert run.wait() == 0, run.stderr()
    assert not any(map(is_running, run.pids(2)))


# -- networks, consoles, and other processes --------------------------------------------------------


def listening(pids: list[int]) -> list[str]:
    """Internet sockets that these processes listen on, or have open for datagrams."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
            except FileNotFoundError:
                pass  # closed meanwhile
    found = []
    for name, states in (("tcp", ("0A",)), ("tcp6", ("0A",)), ("udp", ("07", "01")), ("udp6", ("07", "01"))):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in states and fields[9] in inodes:
                found.append(line)
    return found


def test_replicate_trains_with_equal_weights_and_nothing_listens_on_a_network(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        f"""
import hashlib, torch, lockstep
torch.manual_seed(rank)
model = torch.nn.Linear(8, 4)
lockstep.replicate(model)
opt = torch.optim.Adam(model.parameters())
for step in range(5):
    model(torch.randn(16, 8)).square().mean().backward()
    opt.step(); opt.zero_grad()
{PID}
while not os.path.exists("go"): time.sleep(0.01)
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
""",
        "-n",
        "2",
    )
    pids = [*run.pids(2), run.zygote(), run.process.pid]
    assert listening(pids) == []
    (run.folder / "go").write_text("")
    assert run.wait() == 0, run.stderr()
    assert run.log(0) == run.log(1)
    assert len(run.stdout()) == 65


@pytest.mark.slow
def test_a_console_that_is_closed_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nfor i in range(1000): print('x' * 100)\nopen('done', 'w').close()")
    arguments = f"{sys.executable} -m lockstep run --run-dir run script.py"
    done = subprocess.run(["sh", "-c", f"{arguments} <&- >&- 2>&-"], cwd=tmp_path, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    assert len((tmp_path / "run/workers/0/log.txt").read_text()) == 101_000
    (tmp_path / "done").unlink()
    subprocess.run(["sh", "-c", f"({arguments}; echo $? > code) | true"], cwd=tmp_path, timeout=DEADLINE_S)
    assert (tmp_path / "code").read_text() == "0\n"
    assert len((tmp_path / "run/workers/0/log.txt").read_text()) == 101_000
    assert (tmp_path / "run/earlier-1/workers/0/log.txt").exists()


def test_a_run_directory_with_a_long_name_can_be_scaled(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    (folder / "script.py").write_text(f"""{RANK}
{PID}
while not os.path.exists("go"): time.sleep(0.01)
""")
    run = launch_in(Path("script.py"), "-n", "2", folder=folder)
    run.pids(2)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "scale", str(run.run_dir), "2"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert "2" in done.stdout
    again = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--run-dir", "run", "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert again.returncode == 2
    assert "another run uses" in again.stderr
    (folder / "go").write_text("")
    assert run.wait() == 0, run.stderr()


def test_progress_is_shown_on_a_pipe(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import json, socket
line = socket.socket(fileno=os.dup(int(os.environ["LOCKSTEP_AGENT_FD"])))
line.send(json.dumps({"type": "progress", "step": 7, "epoch": 1, "values": {"loss": 0.25}, "samples": 64}).encode())
""",
        "-n",
        "1",
    )
    assert run.wait() == 0
    progress, *summary = run.stderr().splitlines()
    assert progress == "lockstep: step 7 | epoch 1 | loss 0.25 | 1 worker"
    assert re.fullmatch(r"lockstep: 1 step in \S+ s, loss 0.25\.", summary[0])
    assert summary[1:] == ["lockstep: `lockstep report run` shows the run; its logs are there too."]


class OnTerminal:
    """`lockstep run OPTIONS script.py` on a terminal of its own: ``read_until`` what it shows, ``type`` on its keyboard."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        (folder / "script.py").write_text(script)
        self._terminal, self._theirs = pty.openpty()
        # In a new session the first terminal that is opened becomes the one whose Ctrl-C the processes get.
        command = f"exec {sys.executable} -m lockstep run --run-dir run {' '.join(options)} script.py"
        on_terminal = f"{command} <>{os.ttyname(self._theirs)} >&0 2>&0"
        self.process = subprocess.Popen(["sh", "-c", on_terminal], cwd=folder, start_new_session=True)
        self.seen = bytearray()

    def read_until(self, text: bytes) -> None:
        end = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.seen.extend(os.read(self._terminal, 4096))

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        for descriptor in (self._terminal, self._theirs):
            os.close(descriptor)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., OnTerminal]]:
    started: list[OnTerminal] = []

    def start(script: str, *options: str) -> OnTerminal:
        started.append(OnTerminal(tmp_path, RANK + script, *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.slow
def test_a_terminal_gets_a_live_line_and_ctrl_c_reaches_workers_once(
    on_terminal: Callable[..., OnTerminal], tmp_path: Path
) -> None:
    run = on_terminal(
        """
import json, socket
line = socket.socket(fileno=os.dup(int(os.environ["LOCKSTEP_AGENT_FD"])))
print("out")
try:
    line.send(json.dumps({"type": "progress", "step": 7, "epoch": 0, "values": {}}).encode())
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted", "once")
""",
        "-n 1",
    )
    run.read_until(b"step 7")
    assert b"out\r\n" in run.seen
    run.type(b"\x03")
    run.read_until(b"interrupted once\r\n")
    assert run.process.wait(DEADLINE_S) == 130
    assert (tmp_path / "run/workers/0/log.txt").read_text() == "out\ninterrupted once\n"


# -- stdin and debuggers ------------------------------------------------------------------------------


def test_one_worker_reads_the_stdin_of_lockstep_run_and_several_read_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{RANK}print(sys.stdin.read().upper())")
    for workers, shown in (("1", "TYPED\n\n"), ("2", "\n")):
        command = [sys.executable, "-m", "lockstep", "run", "-n", workers, "--run-dir", f"run-{workers}", "script.py"]
        done = subprocess.run(command, cwd=tmp_path, input="typed\n", capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.stdout, done.stderr, done.returncode) == (shown, "", 0)


DEBUGGED = """
value = 41
if rank == {rank}:
    breakpoint()
print("rank", rank, "value", value)
"""


def test_breakpoint_and_the_end_of_the_input_work_on_a_terminal_with_one_worker(on_terminal: Callable[..., OnTerminal]) -> None:
    run = on_terminal(DEBUGGED.format(rank=0) + "print('read', repr(sys.stdin.read()))", "-n 1")
    run.read_until(b"(Pdb) ")
    run.type(b"value += 1\n")
    run.type(b"c\n")
    run.read_until(b"rank 0 value 42\r\n")
    run.type(b"last\n\x04")
    run.read_until(b"read 'last\\n'\r\n")
    assert run.process.wait(DEADLINE_S) == 0


def test_debug_rank_gives_one_of_many_workers_the_terminal_and_ctrl_c(on_terminal: Callable[..., OnTerminal]) -> None:
    after = """
print("on a terminal:", sys.stdin.isatty() and sys.stdout.isatty())
while rank == 1 and value < 50:
    time.sleep(0.01)
print("rank", rank, "ends")
"""
    run = on_terminal(DEBUGGED.format(rank=1) + after, "-n 2", "--debug-rank 1", "--hang-timeout 0.2")
    run.read_until(b"(Pdb) ")
    run.type(b"value += 1\n")
    run.type(b"c\n")
    run.read_until(b"rank 1 value 42\r\non a terminal: True\r\n")
    run.type(b"\x03")
    run.read_until(b"Program interrupted")
    run.seen.clear()
    run.read_until(b"(Pdb) ")
    run.type(b"value = 50\n")
    run.type(b"c\n")
    run.read_until(b"rank 1 ends\r\n")
    assert run.process.wait(DEADLINE_S) == 0
    assert b"hangs" not in run.seen


def test_nobody_is_taken_for_hung_while_a_worker_is_debugged(launch: Callable[..., LaunchedRun]) -> None:
    script = """
import torch, lockstep
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=2, timeout_s=0.3)
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=2):
    if run.step == 1 and run.rank == 1:
        time.sleep(1.5)  # a person thinks
    model(x).sum().backward()
    opt.step(); opt.zero_grad()
open(f"done-{run.rank}", "w").write("done\\n")
"""
    run = launch(script, "-n", "2", "--debug-rank", "1", "--hang-timeout", "0.3")
    assert run.wait() == 0, run.dump()
    assert run.notes("done") == {"0": "done", "1": "done"}
    assert "hang" not in run.stderr()


def test_packets_that_make_no_sense_do_not_harm_the_agent(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import socket
line = socket.socket(fileno=os.dup(int(os.environ["LOCKSTEP_AGENT_FD"])))
for text in ("nonsense", "[]", "3", "{}", '{"type": "ready"}', '{"type": "progress"}', '{"type": "lost", "generation": "x"}'):
    line.send(text.encode())
for data in (bytes([255]), b"[" * 50_000, b'{"type":' * 9_000, b'{"type": "ready", "generation": 1e999, "step": Infinity}'):
    line.send(data)
""",
        "-n",
        "2",
    )
    assert run.wait() == 0, run.stderr()
