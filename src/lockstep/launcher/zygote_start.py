"""How a zygote process is started: as a new interpreter that imports torch, or as a fork of this process. Knows no workers.

`lockstep run` starts an interpreter. ``lockstep.launch`` forks: its agent is itself a fork of the user's interpreter, so that the
workers have everything that was defined there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import lockstep
from lockstep.launcher import packets
from lockstep.launcher.environment import THREAD_VARIABLES, inherited_environment
from lockstep.launcher.linux import die_with_parent
from lockstep.launcher.worker import Entrypoint


class Process(Protocol):
    pid: int


class ZygoteStart(Protocol):
    def start(self, remote: socket.socket, log: BinaryIO) -> Process:
        """Start a zygote that leads a process group of its own and writes to ``log``. ``remote`` is its end of the connection."""

    @property
    def prepare(self) -> packets.Packet | None:
        """The first packet for the zygote; None if it needs none."""


class InterpreterStart:
    """Starts `python -m lockstep.launcher.zygote`, which imports the modules ``preload``. Its workers run ``entrypoint``."""

    def __init__(self, entrypoint: Entrypoint, preload: Sequence[str] = ()) -> None:
        self._env = inherited_environment(os.environ)
        restored_env = {name: self._env.get(name) for name in (*THREAD_VARIABLES, "PYTHONHASHSEED", "PYTHONPATH")}
        self.prepare: packets.Packet | None = {
            "type": "prepare",
            "preload": list(preload),
            "entrypoint": asdict(entrypoint),
            "restored_env": restored_env,
        }
        # One seed for all workers and their replacements: sets of strings have the same order in each.
        self._env.setdefault("PYTHONHASHSEED", str(int.from_bytes(os.urandom(4), "big")))
        for name in THREAD_VARIABLES:
            self._env[name] = "1"  # a library that starts threads when it is imported could not be forked
        source = str(Path(lockstep.__file__).parents[1])
        if source not in [os.path.abspath(path) for path in sys.path[1:]]:
            self._env["PYTHONPATH"] = os.pathsep.join(filter(None, (source, self._env.get("PYTHONPATH"))))

    def start(self, remote: socket.socket, log: BinaryIO) -> Process:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-P", "-m", "lockstep.launcher.zygote", str(remote.fileno()), str(os.getpid())]
        process: Any = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._env,
            pass_fds=[remote.fileno()],
            process_group=0,
        )
        process.returncode = 0  # the agent reaps it: keeps subprocess from waiting for it
        return process  # type: ignore[no-any-return]


class _Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid


class ForkStart:
    """Forks this process. ``serve(connection, agent_pid)`` is called in the fork and must not return."""

    prepare: packets.Packet | None = None

    def __init__(self, serve: Callable[[socket.socket, int], NoReturn]) -> None:
        self._serve = serve

    def start(self, remote: socket.socket, log: BinaryIO) -> Process:
        agent_pid = os.getpid()
        pid = os.fork()
        if pid:
            return _Forked(pid)
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)  # the agent's handlers do nothing in this process
            os.setpgid(0, 0)
            die_with_parent(agent_pid)
            for target in (1, 2):
                os.dup2(log.fileno(), target)
            self._serve(remote, agent_pid)
        except BaseException:  # noqa: BLE001 - nothing may leave this fork of the user's interpreter
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
