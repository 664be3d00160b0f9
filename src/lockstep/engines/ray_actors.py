"""The actors of a run on Ray: one owns the head, each of the others owns the agent of one node. They know no membership.

Head and agents are child processes, `lockstep head` and `lockstep agent`, that die with the actor. The process of an actor forks no
workers: Ray's own threads run in it. An actor that Ray restarts on another node begins anew, with the same arguments. The token is
one of these arguments; it reaches the child through its standard input.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import lockstep
from lockstep.cluster.address import Address
from lockstep.engines.head_process import ADDRESS_FILE
from lockstep.launcher.outcome import read_outcome

_MAX_KEPT_BYTES = 8 << 20
"""A child that prints faster than the driver reads has to wait."""
_ADDRESS_POLL_S = 0.05
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 30.0
"""An agent that has ended is started again after the first delay, which doubles each time."""
_CANNOT_WORK = 2
"""The exit code of `lockstep` if its arguments cannot work on this machine."""


@dataclass(frozen=True)
class Places:
    """Where the children of actors run and leave their files.

    ``folder``: the current directory of the driver. Workers run there, unless ``has_working_dir``: then in the folder that Ray's
    runtime environment has made on the node. ``run_dir``: the run folder, or None for a new one called ``name`` below
    lockstep-runs, in ``folder`` if it exists on the node, else in the temporary folder.
    """

    folder: str
    has_working_dir: bool
    run_dir: str | None
    name: str

    def run_folder(self, kind: str) -> Path:
        """A folder that no other actor uses, also if all nodes see the same file system."""
        of_user = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
        parent = Path(self.folder) if os.access(self.folder, os.W_OK) else of_user
        run_dir = Path(self.run_dir) if self.run_dir is not None else parent / "lockstep-runs" / self.name
        return run_dir / kind / f"{_node_address()}-{os.getpid()}"


@dataclass(frozen=True)
class News:
    """What the child of an actor has printed since the last call of ``read``, and how it is."""

    actor: str
    """Differs if Ray has restarted the actor."""
    position: int
    output: tuple[tuple[int, bytes], ...]
    """(1 or 2: the stream, what was printed). Stream 0: nothing was printed, but another field has changed."""
    code: int | None
    """The exit code when the child has ended and is not started again."""
    node: str
    head: str
    """Of the head: where it listens. Of an agent: the address that it was told. Empty: not known yet."""
    outcome: dict[str, Any] | None = None
    """Of the head, when it has ended."""


class ChildActor:
    """Starts a child process in a thread of its own. ``read`` returns what happens to it; methods may run at the same time."""

    def __init__(self) -> None:
        self._actor, self._node = secrets.token_hex(8), _node_address()
        self._changed = threading.Condition()
        self._output: list[tuple[int, bytes]] = []
        self._position = 0  # of the first entry of the output that is kept
        self._kept_bytes = 0
        self._code: int | None = None
        self._head = ""
        self._outcome: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, actor: str, position: int, timeout_s: float) -> News:
        """Wait until there is something to tell, at most ``timeout_s``. ``actor``, ``position``: those of the last news."""
        with self._changed:
            if actor == self._actor:
                self._drop(position)
                self._changed.wait_for(lambda: self._output, timeout_s)
            end = self._position + len(self._output)
            return News(self._actor, end, tuple(self._output), self._code, self._node, self._head, self._outcome)

    def send_signal(self, number: int) -> None:
        """To the child, if it runs."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def _start_thread(self) -> None:
        threading.Thread(target=self._supervise, daemon=True).start()

    def _supervise(self) -> None:
        """Start the child and wait for it. This thread lives as long as the child may: the child dies with it."""
        raise NotImplementedError

    def _start(self, words: Sequence[str], token: str, folder: str | None, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command of `lockstep`, and read what it prints."""
        environ = {**os.environ, **variables}
        source = str(Path(lockstep.__file__).parents[1])
        if source not in environ.get("PYTHONPATH", "").split(os.pathsep):
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), source)))
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "lockstep.engines.bound_command", str(os.getpid()), *words]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environ, process_group=0)
        assert process.stdin is not None
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            assert stream is not None
            threading.Thread(target=partial(self._read_stream, number, stream), daemon=True).start()
        try:
            process.stdin.write(f"{token}\n".encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended
        self._process = process
        return process

    def _read_stream(self, number: int, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 1 << 16):
            self._add(number, data)
        stream.close()

    def _add(self, number: int, data: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._kept_bytes < _MAX_KEPT_BYTES)
            self._output.append((number, data))
            self._kept_bytes += len(data)
            self._changed.notify_all()

    def _say(self, sentence: str) -> None:
        self._add(2, f"lockstep: {sentence}\n".encode())

    def _drop(self, position: int) -> None:
        """The driver has everything before ``position``."""
        count = max(0, position - self._position)
        self._kept_bytes -= sum(len(data) for _, data in self._output[:count])
        del self._output[:count]
        self._position += count
        self._changed.notify_all()

    def _tell(self, *, head: str | None = None, code: int | None = None, outcome: dict[str, Any] | None = None) -> None:
        with self._changed:
            self._head = self._head if head is None else head
            self._code, self._outcome = code, outcome
            self._output.append((0, b""))
            self._changed.notify_all()


class HeadActor(ChildActor):
    """``options``: of `lockstep head`, besides its address, its token and its folder."""

    def __init__(self, token: str, options: Sequence[str], places: Places) -> None:
        super().__init__()
        self._token, self._options, self._run_dir = token, options, places.run_folder("heads")
        self._start_thread()

    def _supervise(self) -> None:
        listen = str(Address(self._node, 0))
        words = ["head", "--listen", listen, "--token-file", "-", "--run-dir", str(self._run_dir), *self._options]
        process = self._start(words, self._token, None, {})
        while process.poll() is None and not self._head:
            address = self._read_address()
            if address:
                self._tell(head=address)
            else:
                time.sleep(_ADDRESS_POLL_S)
        code = process.wait()
        if code < 0:
            os._exit(1)  # somebody has killed the head: Ray restarts this actor, and with it the head
        self._tell(code=code, outcome=read_outcome(self._run_dir))

    def _read_address(self) -> str:
        try:
            return (self._run_dir / ADDRESS_FILE).read_text().strip()
        except OSError:
            return ""


class AgentActor(ChildActor):
    """``options``: of `lockstep agent`, and the script. ``function``: what workers call, if ``options`` name no script.

    The function may be large, so ``function`` is a list with a reference to it in Ray's object store, or an empty list. The driver
    keeps the object: Ray itself would drop a large argument of an actor, and could not restart the actor.
    """

    def __init__(self, token: str, options: Sequence[str], function: Sequence[Any], places: Places, threads: int | None) -> None:
        super().__init__()
        self._token, self._places, self._variables = token, places, {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._private = tempfile.TemporaryDirectory(prefix="lockstep-")  # its user alone can read it
        self._head_file = Path(self._private.name) / "head.address"
        self._options, self._calls_function = list(options), bool(function)
        if function:
            import ray

            path = Path(self._private.name) / "function.pickle"
            path.write_bytes(ray.get(function[0]))
            self._variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # Ray has added folders of the driver
            self._options += ["-m", "lockstep.engines.ray_function", str(path)]
        self._run_dirs: list[Path] = []
        self._is_over = threading.Event()
        self._start_thread()

    def set_head(self, address: str) -> None:
        """The head listens at this address now. The agent reads the file before each attempt to connect."""
        temporary = self._head_file.with_suffix(".new")
        temporary.write_text(f"{address}\n")
        temporary.rename(self._head_file)
        with self._changed:
            self._head = address

    def set_over(self) -> None:
        """The run is over: the agent ends, and is not started again."""
        self._is_over.set()

    def result(self, worker: int) -> bytes | None:
        """Returns what the function has returned on a worker, pickled; None if this node did not have the worker."""
        paths = [run_dir / "workers" / str(worker) / "result.pickle" for run_dir in self._run_dirs]
        return next((path.read_bytes() for path in paths if path.exists()), None)

    def _supervise(self) -> None:
        delay_s, folder = _FIRST_DELAY_S, None if self._places.has_working_dir else self._places.folder
        if folder is not None and not os.path.isdir(folder):
            if not self._calls_function:
                copy = f"Let Ray copy it to the nodes: --working-dir {folder}"
                self._say(f"there is no directory {folder} on the node {self._node}. {copy}")
                self._tell(code=_CANNOT_WORK)
                return
            folder = None
        while True:
            run_dir = self._places.run_folder("machines")
            run_dir = run_dir.with_name(f"{run_dir.name}-{len(self._run_dirs)}")
            self._run_dirs.append(run_dir)
            where = ["--head-file", str(self._head_file), "--token-file", "-", "--run-dir", str(run_dir)]
            code = self._start(["agent", *where, *self._options], self._token, folder, self._variables).wait()
            if code in (0, _CANNOT_WORK) or self._is_over.wait(delay_s):
                self._tell(code=code)
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
            self._say(f"the agent on {self._node} {how} and is started again.")


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
