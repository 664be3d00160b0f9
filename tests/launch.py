"""Launches `lockstep run` (or a script alone) in a folder of its own, watches it, and ends it. Every wait has a deadline.

    run = launch("print('hello')", "--no-respawn", workers=2, folder=tmp_path)
    run.wait_for_text("hello")          # polls what was printed
    run.kill(worker=1)
    assert run.wait() == 137            # fails with all that was printed, logged and recorded if the run is not over in time

Each run is forked from tests/fork_server.py and finds torch imported, agent and zygote too. With ``own_imports=True`` it is
a new interpreter, as a user's run is, and its zygote imports torch itself: for the tests of exactly that.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launcher.worker import exit_process
from tests.fork_server import ROOT, Child, fork
from tests.waiting import POLL_S

Process = subprocess.Popen[bytes] | Child
DEADLINE_S = 60.0
_LAST_LINES = 40


class LaunchedRun:
    """One run: the process that was started, what it prints, and the files it leaves.

    Args:
        script: the path of a script, or its text; None if the options name a module.
        options: options of `lockstep run`.
        folder: the working directory of the run, which is made. Scripts leave notes there: ``pid-<worker>``, ``done-<worker>``.
        workers: the number of workers. 0: `python SCRIPT ARGS`, without `lockstep run`. None: what `lockstep run` does without -n.
        args: arguments of the script.
        env: variables added to the environment, of which LOCKSTEP_* and the numbers of threads are removed.
        own_imports: whether the run is a new interpreter that imports torch itself.
    """

    def __init__(
        self,
        script: str | Path | None,
        *options: str,
        folder: Path,
        workers: int | None = None,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        own_imports: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run_dir = folder, folder / "run"
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        if isinstance(script, str):
            (folder / "script.py").write_text(script)
            script = Path("script.py")
        arguments = [*([] if script is None else [str(script)]), *args]
        if workers != 0:
            size = [] if workers is None else ["-n", str(workers)]
            arguments = ["-m", "lockstep", "run", "--run-dir", str(self.run_dir), *size, *options, *arguments]
        clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS") and not k.startswith("LOCKSTEP_")}
        clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [clean.get("PYTHONPATH")])])
        start = _start_interpreter if own_imports else _start_fork
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process: Process = start(folder, arguments, {**clean, **(env or {})}, out.fileno(), err.fileno())

    # -- what it says and leaves ------------------------------------------------------------------

    def stdout(self) -> str:
        return self._out.read_text()

    def stderr(self) -> str:
        return self._err.read_text()

    def output(self) -> str:
        return self.stdout() + self.stderr()

    def log(self, worker: int) -> str:
        return (self.run_dir / "workers" / str(worker) / "log.txt").read_text()

    def notes(self, kind: str) -> dict[str, str]:
        """What the script has written into files named ``kind``-..., each with a line end when it is whole."""
        texts = {path.name.removeprefix(f"{kind}-"): path.read_text() for path in self.folder.glob(f"{kind}-*")}
        return {name: text.strip() for name, text in texts.items() if text.endswith("\n")}

    def results(self) -> set[str]:
        return set(self.notes("done").values())

    def events(self, kind: str = "event") -> list[Any]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]

    def generations(self) -> list[list[int]]:
        """The members of every generation so far."""
        return [action["Form"]["members"] for entry in self.events() for action in entry["actions"] if "Form" in action]

    def dump(self) -> str:
        """Everything there is to know about the run: for the message of a test that fails."""
        files = [self._out, self._err, self.run_dir / "zygote.txt", self.run_dir / "events.jsonl"]
        files += sorted(self.run_dir.glob("workers/*/*.txt"))
        code = self.process.poll()
        parts = [f"process {self.process.pid} " + ("still runs" if code is None else f"ended with code {code}")]
        for path in files:
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                parts.append(f"-- {path.relative_to(self.folder)}: {len(lines)} lines, the last of them:")
                parts += lines[-_LAST_LINES:]
        return "\n".join(parts)

    # -- its workers ------------------------------------------------------------------------------

    def pids(self, count: int) -> list[int]:
        """Waits until ``count`` processes have written a note with their process id, and returns the ids."""
        self.wait_until(lambda: len(self.notes("pid")) >= count, f"{count} processes have said that they run", may_end=True)
        found = [int(pid) for pid in self.notes("pid").values()]
        assert len(found) == count, self.dump()
        return found

    def workers(self) -> dict[int, int]:
        """Worker -> process id, of the workers that run and have not written their result."""
        done = self.notes("done")
        found = {int(worker): int(pid) for worker, pid in self.notes("pid").items() if worker not in done}
        return {worker: pid for worker, pid in found.items() if is_running(pid)}

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(int(self.notes("pid")[str(worker)]), number)

    def zygote(self) -> int:
        """The process id of the zygote, when it has started."""

        def found() -> list[int]:
            pids = {int(pid) for pid in self.notes("pid").values()}
            return [pid for pid in children_of(self.process.pid) if pid not in pids]

        self.wait_until(lambda: (self.run_dir / "zygote.txt").exists() and len(found()) == 1, "the agent has one other child")
        return found()[0]

    def scale(self, size: int) -> None:
        command = [sys.executable, "-m", "lockstep", "scale", str(self.run_dir), str(size)]
        subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S, *, may_end: bool = False) -> None:
        """Poll ``condition``. Fails at the deadline and, unless ``may_end``, if the run ends first."""
        end = time.monotonic() + deadline_s
        while not condition():
            ended = self.process.poll() is not None
            if ended and condition():
                return
            assert not ended or may_end, f"the run ended before {what}.\n{self.dump()}"
            if ended:
                return
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}.\n{self.dump()}"
            time.sleep(POLL_S)

    def wait_for_text(self, text: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the run has printed ``text``."""
        self.wait_until(lambda: text in self.output(), f"it has printed {text!r}", deadline_s)

    def wait_for_generation(self, number: int = 0) -> list[int]:
        """Wait until a generation with this number is formed. Returns its members."""
        self.wait_until(lambda: len(self.generations()) > number, f"generation {number} is formed")
        return self.generations()[number]

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Returns the exit code. A run that is not over at the deadline is killed and fails the test."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            dump = self.dump()
            self.stop()
            raise AssertionError(f"the run is not over after {deadline_s} s.\n{dump}") from None

    def result(self, deadline_s: float = DEADLINE_S) -> str:
        """Waits for the end, which must have exit code 0. Returns the result that every worker has written: the same on each."""
        assert self.wait(deadline_s) == 0, self.dump()
        assert len(self.results()) == 1, f"{self.notes('done')}\n{self.dump()}"
        return self.results().pop()

    def stop(self) -> None:
        """Kill the run if it is not over. May be called twice."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)


def launch(script: str | Path | None, *options: str, **settings: Any) -> LaunchedRun:
    """Start `lockstep run OPTIONS SCRIPT ARGS` and return at once. The arguments are those of ``LaunchedRun``."""
    return LaunchedRun(script, *options, **settings)


# -- processes -----------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended: a zombie has."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _start_interpreter(folder: Path, arguments: list[str], env: dict[str, str], out: int, err: int) -> Process:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _start_fork(folder: Path, arguments: list[str], env: dict[str, str], out: int, err: int) -> Process:
    return fork(_enter, str(folder), arguments, env, descriptors=[err], output=out)


# -- in the forked process -----------------------------------------------------------------------------


def _enter(err: int, folder: str, arguments: list[str], env: dict[str, str]) -> int:
    """What the interpreter would do with these arguments: a script, or `-m lockstep ...`."""
    os.dup2(err, 2)
    os.close(err)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if arguments[0] == "-m":
        return _lockstep(arguments[2:])
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    exit_process(code)


def _lockstep(arguments: list[str]) -> int:
    """The command `lockstep`, whose first zygote is a fork of this process, made while this process has nothing but imports."""
    from lockstep.__main__ import main

    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        line.close()
        return _become_zygote(theirs)
    theirs.close()
    start_process: Any = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        subprocess.Popen = start_process  # type: ignore[misc]  # another zygote is a process of its own
        assert "lockstep.launcher.zygote" in command, command
        (control,) = options["pass_fds"]
        arguments = ["\0" if each == str(control) else each for each in command[command.index("lockstep.launcher.zygote") :]]
        socket.send_fds(line, [json.dumps([arguments, options["env"]]).encode()], [control, options["stdout"].fileno()])
        assert line.recv(1), "the forked zygote has ended"
        line.close()
        return Child(pid, os.open(os.devnull, os.O_RDONLY))

    subprocess.Popen = start  # type: ignore[misc, assignment]
    return main(arguments)


def _become_zygote(line: socket.socket) -> int:
    from lockstep.launcher import zygote

    request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
    if not request:
        return 0  # the command had no use for a zygote
    (control, log), (arguments, env) = descriptors, json.loads(request)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.clear()
    os.environ.update(env)
    os.setpgid(0, 0)
    line.send(b"x")
    line.close()
    sys.argv = [str(control) if each == "\0" else each for each in arguments]
    zygote.main()
    return 0
