"""What a worker process does: take its descriptors, run the script, report to the agent how it ended. Knows no other worker."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import lockstep
from lockstep.launcher import packets, rank_reads
from lockstep.launcher.linux import die_with_parent
from lockstep.launcher.user_frame import user_frame
from lockstep.world import patch_requested

step_now: Callable[[], int] | None = None
"""lockstep.Run sets this in its process: returns the current step, which is reported if the script raises."""

script_ended: Callable[[], None] | None = None
"""lockstep.Run sets this in its process: called when the script has ended, also by an exception (``sys.exc_info()``)."""

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Makes a worker write its stack, even if it loops or waits for a lock. The other real-time signals are left to scripts."""
_MAX_TRACEBACK_CHARS = 60_000
_UNKNOWN_STEP = -1


@dataclass(frozen=True)
class Entrypoint:
    """What every worker of a run executes: a script or a module."""

    script: str | None
    module: str | None
    args: tuple[str, ...]
    sys_path_0: str
    """As Python itself would set it."""

    @property
    def words(self) -> list[str]:
        """As it was typed."""
        return [*(["-m", self.module] if self.module is not None else [str(self.script)]), *self.args]


@dataclass(frozen=True)
class WorkerSpec:
    """What is particular to one worker. ``env`` is added to the user's environment."""

    id: int
    env: dict[str, str]
    threads: int
    reads_stdin: bool = False
    """Whether it gets the stdin of the agent."""
    has_terminal: bool = False
    """Whether it gets the stdin, stdout and stderr of the agent directly, for a debugger."""


class Descriptors(NamedTuple):
    """The worker's ends of its socket to the agent, of its input and of its output pipes."""

    agent: int
    stdin: int
    stdout: int
    stderr: int


def become_worker(spec: WorkerSpec, descriptors: Descriptors, agent_pid: int) -> None:
    """The first call in the forked process: wait until the agent is its parent, and take its own signals, input and output."""
    deadline = time.monotonic() + 30
    parent = os.getppid()
    while os.getppid() == parent != agent_pid:  # the parent is about to exit; then the agent adopts this process
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    die_with_parent(agent_pid)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGTTIN):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if spec.has_terminal and os.isatty(descriptors.stdin):
        os.setpgid(0, os.getpgid(agent_pid))  # the kernel stops a process that reads the terminal of another process group
    for target, source in enumerate(descriptors[1:]):
        os.dup2(source, target)
        os.close(source)
    os.set_inheritable(descriptors.agent, True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_worker(execute: Callable[[], None], spec: WorkerSpec, restored_env: dict[str, str | None], agent: int) -> int:
    """Call ``execute``, which runs the script, and report its end to the agent; returns the exit code.

    ``restored_env``: variables that the zygote has changed.
    """
    connection = socket.socket(fileno=os.dup(agent))  # the script may close its own
    pid = os.getpid()
    for name, value in restored_env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.environ.update(spec.env, LOCKSTEP_AGENT_FD=str(agent))
    faulthandler.register(STACK_SIGNAL, _open_stack_file(spec), all_threads=True)
    _set_up_libraries(spec.threads)
    rank_reads.watch(lambda needs_peers: _send(connection, {"type": "rank read", "needs_peers": needs_peers}, pid))
    report: packets.Packet = {"type": "finished", "code": 0}
    try:
        if patch_requested():
            lockstep.patch()
        try:
            execute()
        finally:
            if script_ended is not None:
                script_ended()
    except SystemExit as exit:
        code, text = _exit_code(exit.code)
        if text is not None:
            print(text, file=sys.stderr)
        if code != 0:
            error = f"SystemExit: {code if text is None else text}"[:2000]
            report = {"type": "failed", "error": error, "traceback": "", "step": _step(), "code": code, **_frame(exit)}
    except BaseException as error:  # noqa: BLE001 - becomes an event of the agent, and the exit code of this process
        report = _failure(error)
    if report["type"] == "finished":
        report["step"] = _step()
    _flush()
    if not _send(connection, report, pid) and report["type"] == "failed":
        print(report["traceback"], file=sys.stderr)  # for the log
    connection.close()
    code = report["code"]
    assert isinstance(code, int)
    return code


def _send(connection: socket.socket, packet: packets.Packet, pid: int) -> bool:
    """Send a packet to the agent. Returns False if it does not read, or if this is a process that worker ``pid`` has forked."""
    if os.getpid() != pid:
        return False
    try:
        packets.send(connection, packet)
    except OSError:
        return False
    return True


def exit_process(code: int) -> NoReturn:
    """Exit as the interpreter does: join threads, run exit handlers, flush files.

    But do not destroy the modules that were imported before the fork: that takes half a second, and other workers would wait.
    """
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException:  # noqa: BLE001 - as at the end of any Python process: printed, and the exit continues
            traceback.print_exc()
    objects = gc.get_objects()
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):
        for each in objects:
            if issubclass(type(each), kinds):
                _flush(each)
    _flush()
    os._exit(code)


def _set_up_libraries(threads: int) -> None:
    """Undo what the fork shares: give this process its threads and its own random seeds. ``random`` reseeds itself."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run_as_main(entrypoint: Entrypoint) -> None:
    """As ``python script.py`` or ``python -m module``. The module stays ``__main__`` until the process exits."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if entrypoint.script is not None:
        sys.argv = [entrypoint.script, *entrypoint.args]
        main.__file__ = os.path.abspath(entrypoint.script)
        code = compile(Path(entrypoint.script).read_bytes(), main.__file__, "exec", dont_inherit=True)
    else:
        assert entrypoint.module is not None
        sys.argv = ["-m", *entrypoint.args]
        spec = _main_spec(entrypoint.module)
        main.__spec__, main.__loader__, main.__file__ = spec, spec.loader, spec.origin
        main.__package__ = spec.parent
        sys.argv[0] = spec.origin or "-m"
        code = spec.loader.get_code(spec.name)
    exec(code, main.__dict__)


def _main_spec(name: str) -> Any:
    """The spec of the module to run. For a package, this is its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise SystemExit(f"No module named {name} ({error})") from None
    if spec is not None and spec.submodule_search_locations is not None:
        return _main_spec(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise SystemExit(f"No module named {name} can be run: sys.path is {sys.path}.")
    return spec


def _exit_code(code: object) -> tuple[int, str | None]:
    """The argument of sys.exit -> (exit code, what Python prints to stderr)."""
    if code is None:
        return 0, None
    if isinstance(code, int):
        return code & 0xFF, None
    return 1, str(code)


def _failure(error: BaseException) -> packets.Packet:
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next  # skip our own frames
    error.__traceback__ = trace
    sys.last_value = error  # as the interpreter does: exit handlers see that an exception has ended the script
    if sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch."):  # torch's only prints
        sys.excepthook(type(error), error, trace)
    text = "".join(traceback.format_exception(error))
    if len(text) > _MAX_TRACEBACK_CHARS:
        text = text[: _MAX_TRACEBACK_CHARS // 4] + "\n...\n" + text[-_MAX_TRACEBACK_CHARS * 3 // 4 :]
    last = "".join(traceback.format_exception_only(error)).strip()
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return {"type": "failed", "error": last[:2000], "traceback": text, "step": _step(), "code": code, **_frame(error)}


def _frame(error: BaseException) -> packets.Packet:
    """Where the exception came from: ``where``, ``source`` and ``place`` (launcher/user_frame.py)."""
    return asdict(user_frame(error))


def _open_stack_file(spec: WorkerSpec) -> Any:
    """The file for the stacks of a worker that hangs. If it cannot be made (a full disk), they go to the log."""
    try:
        return open(Path(spec.env["LOCKSTEP_RUN_DIR"]) / "workers" / str(spec.id) / "stack.txt", "w")  # open to the end
    except OSError:
        return sys.stderr


def _step() -> int:
    return _UNKNOWN_STEP if step_now is None else step_now()


def _flush(*streams: Any) -> None:
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed by the script
