"""What a forked process does: becomes a worker, runs the script, tells the agent how it ended. Knows no other worker."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch import packets
from lockstep.launch.linux import die_with_parent

step_now: Callable[[], int] | None = None
"""Set by whoever counts steps in this process: a failure is reported with the step it happened in."""

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Makes a worker write its stack, even one that runs in circles or waits for a lock. Scripts use the others."""
_TRACEBACK_BYTES = 60_000
_UNKNOWN_STEP = -1


@dataclass(frozen=True)
class Job:
    """What every worker of a run runs."""

    script: str | None
    module: str | None
    args: tuple[str, ...]
    agent: int
    first_path: str
    """sys.path[0], as python itself would set it."""
    restore: dict[str, str | None]
    """Variables that the zygote has changed for itself, as the user had them."""


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker has of its own. Descriptors: its line to the agent, its output."""

    id: int
    env: dict[str, str]
    threads: int
    line: int
    stdout: int
    stderr: int


def become(place: WorkerSpec, agent: int) -> None:
    """In the forked process, first of all: wait for the agent to be the parent, and take on what is this worker's own."""
    deadline = time.monotonic() + 30
    parent = os.getppid()
    while os.getppid() == parent != agent:  # the process in between is about to exit
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    die_with_parent(agent)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(place.stdout, 1)
    os.dup2(place.stderr, 2)
    os.close(place.stdout)
    os.close(place.stderr)
    os.set_inheritable(place.line, True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def work(job: Job, place: WorkerSpec) -> int:
    """Run the script; returns the code to leave with. The line is dupped: the script may close its own."""
    line = socket.socket(fileno=os.dup(place.line))
    pid = os.getpid()
    for name, value in job.restore.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.environ.update(place.env, LOCKSTEP_AGENT_FD=str(place.line))
    stack = open(Path(place.env["LOCKSTEP_RUN_DIR"]) / "workers" / str(place.id) / "stack.txt", "w")  # noqa: SIM115 - open to the end
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)
    _settle_libraries(place.threads)
    try:
        _run_as_main(job)
        report: packets.Packet = {"type": "finished", "code": 0}
    except SystemExit as leaving:
        code, text = _meaning(leaving.code)
        if text is not None:
            print(text, file=sys.stderr)
        report = {"type": "finished", "code": 0}
        if code != 0:
            shown = text if text is not None else code
            report = {"type": "failed", "error": f"SystemExit: {shown}"[:2000], "traceback": "", "step": _step(), "code": code}
    except BaseException as error:  # noqa: BLE001 - becomes an event of the agent, and this process's exit code
        report = _failure(error)
    _flush()
    if os.getpid() == pid:
        try:
            packets.send(line, report)
        except OSError:
            print(report.get("traceback", ""), file=sys.stderr)  # nobody hears us, but the log may
    elif report["type"] == "failed":  # a process that the script has forked and that came up here
        print(report["traceback"], file=sys.stderr)
    line.close()
    code = report["code"]
    assert isinstance(code, int)
    return code


def leave(code: int) -> NoReturn:
    """End the process as the interpreter does: threads are joined, exit handlers run, files written.

    But what was imported before the fork is not taken apart: that takes half a second, for which others would wait.
    """
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException:  # noqa: BLE001 - as at the end of any process: shown, and the end goes on
            traceback.print_exc()
    everything = gc.get_objects()
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):
        for each in everything:
            if issubclass(type(each), kinds):
                _flush(each)
    _flush()
    os._exit(code)


def _settle_libraries(threads: int) -> None:
    """As in a process of its own: threads as asked for, random numbers of its own (``random`` sees to itself)."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _run_as_main(job: Job) -> None:
    """As ``python script.py`` or ``python -m module``: the module stays ``__main__`` until the process ends."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if job.script is not None:
        sys.argv = [job.script, *job.args]
        main.__file__ = os.path.abspath(job.script)
        code = compile(Path(job.script).read_bytes(), main.__file__, "exec", dont_inherit=True)
    else:
        assert job.module is not None
        sys.argv = ["-m", *job.args]
        spec = _main_spec(job.module)
        main.__spec__, main.__loader__, main.__file__ = spec, spec.loader, spec.origin
        main.__package__ = spec.parent
        sys.argv[0] = spec.origin or "-m"
        code = spec.loader.get_code(spec.name)
    exec(code, main.__dict__)


def _main_spec(name: str) -> Any:
    """The module to run: of a package, its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise SystemExit(f"No module named {name} ({error})") from None
    if spec is not None and spec.submodule_search_locations is not None:
        return _main_spec(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise SystemExit(f"No module named {name} that could be run: sys.path is {sys.path}.")
    return spec


def _meaning(code: object) -> tuple[int, str | None]:
    """sys.exit's argument -> (exit code, what goes to stderr)."""
    if code is None:
        return 0, None
    if isinstance(code, int):
        return code & 0xFF, None
    return 1, str(code)


def _failure(error: BaseException) -> packets.Packet:
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next  # the user's part begins below ours
    error.__traceback__ = trace
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)
    text = "".join(traceback.format_exception(error))
    if len(text) > _TRACEBACK_BYTES:
        text = text[: _TRACEBACK_BYTES // 4] + "\n...\n" + text[-_TRACEBACK_BYTES * 3 // 4 :]
    last = "".join(traceback.format_exception_only(error)).strip()
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return {"type": "failed", "error": last[:2000], "traceback": text, "step": _step(), "code": code}


def _step() -> int:
    return _UNKNOWN_STEP if step_now is None else step_now()


def _flush(*streams: Any) -> None:
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed by the script
