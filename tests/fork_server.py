"""Forks the processes of all tests from one process, the fork server, which has imported torch, Lockstep and the tests.

    child = fork(target, *args)     # runs target(*args) in a new process, a child of the fork server
    child.wait(10)                  # its exit code, or minus the number of the signal that ended it

An import of torch costs 2 to 3 s of CPU, and a fork some milliseconds. The first ``fork`` starts the fork server. The fork
server imports the module of every target that it is asked for and keeps it, so that the second fork finds it imported.
The fork server has one thread, ends when this process ends, and its children end with it.

Hand-written since multiprocessing's fork server leaves its own state (start method, resource tracker, daemon flag) in the
children, where `lockstep run` and data loaders find it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests import shared_gpu

ROOT = Path(__file__).parents[1]
_IMPORTED = ("pytest", "hypothesis", "numpy", "tests.models", "tests.lane_jobs", "tests.launch", "tests.workers")
_START_S = 120.0


class Child:
    """A process that the fork server has forked. Its methods are those of ``subprocess.Popen``."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self.returncode = pid, None
        self._status = status

    returncode: int | None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, or minus the number of the signal that ended the process. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            status = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(status) if status else -signal.SIGKILL  # the fork server has ended, and its children with it
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(target: Callable[..., Any], *args: Any, descriptors: Sequence[int] = (), output: int | None = None) -> Child:
    """Run ``target(*args)`` in a new process and return at once.

    Args:
        target: a function of a module. An int that it returns is the exit code.
        args: anything that can be pickled.
        descriptors: the target is called with duplicates of these as its first arguments.
        output: the descriptor that is the standard output and the standard error of the process. The default is the null device.
    """
    with contextlib.ExitStack() as stack:
        payload = stack.enter_context(tempfile.TemporaryFile())
        pickle.dump((target, args), payload)
        payload.flush()
        status, their_status = os.pipe()
        stack.callback(os.close, their_status)
        if output is None:
            output = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, output)
        pid = _server().request([payload.fileno(), their_status, output, *descriptors])
    return Child(pid, status)


class _Server:
    """The fork server, as this process sees it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "PYTEST_"))}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
        env |= shared_gpu.environment()
        with theirs:
            command = [sys.executable, "-P", "-m", "tests.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def request(self, descriptors: list[int]) -> int:
        """Returns the process id of a new process that has these descriptors."""
        with self._lock:
            self._line.settimeout(_START_S)
            socket.send_fds(self._line, [b"fork"], descriptors)
            answer = self._line.recv(16)
        assert answer, "the fork server has ended: its last words are in the captured stderr"
        return int(answer)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


_the_server: _Server | None = None
_starting = threading.Lock()


def _server() -> _Server:
    global _the_server
    with _starting:
        if _the_server is None:
            _the_server = _Server()
            atexit.register(_the_server.close)
        return _the_server


# -- in the fork server ------------------------------------------------------------------------------


def _main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # while modules are imported nothing becomes garbage
    from lockstep.launcher.zygote import PRELOAD

    for name in (*PRELOAD, *_IMPORTED):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # tests.chaos runs without the packages of the tests
            importlib.import_module(name)
    work = _serve(line)
    if work is not None:
        gc.enable()
        _run(work)


def _serve(line: socket.socket) -> list[int] | None:
    """Fork as asked. Returns None in the fork server, when the tests are over, and in each child the descriptors it was sent."""
    wakeup, theirs = socket.socketpair()
    wakeup.setblocking(False)
    theirs.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests, which end this process
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the number of the signal arrives at the wakeup socket
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # process id -> descriptor that its exit code is written to
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    selector.register(wakeup, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if wakeup in ready:
            wakeup.recv(4096)
            for pid, code in _ended():
                os.write(statuses[pid], str(code).encode())
                os.close(statuses.pop(pid))
        if line not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(line, 16, 64)
        if not request:
            return None
        _import_modules_of(descriptors[0])
        assert len(os.listdir("/proc/self/task")) == 1, "a process that has threads cannot be forked safely"
        gc.freeze()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (line, wakeup, theirs, selector):
                each.close()
            for status in (*statuses.values(), descriptors[1]):
                os.close(status)
            _die_with(server)
            return descriptors
        statuses[pid] = descriptors[1]
        for descriptor in (descriptors[0], *descriptors[2:]):
            os.close(descriptor)
        line.send(str(pid).encode())


def _ended() -> Iterator[tuple[int, int]]:
    """The process id and exit code of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _import_modules_of(payload: int) -> None:
    """What is imported here need not be imported in the children. A module that fails to be imported fails in the child."""
    with open(os.dup(payload), "rb") as file, contextlib.suppress(Exception):
        pickle.load(file)  # from the process that has started this one


def _die_with(server: int) -> None:
    from lockstep.launcher.linux import die_with_parent

    die_with_parent(server)


# -- in a child --------------------------------------------------------------------------------------


def _run(descriptors: list[int]) -> NoReturn:
    """Exits without exit handlers, like a child of multiprocessing. A target that needs exit handlers calls ``exit_process``."""
    payload, _, output, *given = descriptors
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    try:
        with open(payload, "rb") as file:
            file.seek(0)
            target, args = pickle.load(file)
        code = target(*given, *args)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as at the end of any process: printed, and told by the exit code
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _main()
