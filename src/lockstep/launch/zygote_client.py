"""Nursery: the zygote as a process: started, asked for workers, replaced when it dies. Knows their numbers, not their lives.

The zygote leads a process group of its own, in which workers are born: a terminal's Ctrl-C reaches the agent alone.
A dead zygote is not reaped before the end: as long as it is a zombie, its group's number belongs to
nobody else and the group can be killed safely.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import lockstep
from lockstep.launch import packets
from lockstep.launch.environment import OURS, THREADS
from lockstep.launch.worker import Job

_MOST_IN_VAIN = 3
_ASK_TIMEOUT_S = 30.0


class Parent(Protocol):
    def born(self, id: int, pid: int) -> None: ...
    def orphaned(self, ids: list[int]) -> None:
        """The zygote died before it forked these: ask again, with other descriptors."""

    def stillborn(self, ids: list[int], why: str, *, is_hopeless: bool) -> None:
        """These cannot be started. Hopeless: no worker ever was."""


@dataclass
class Zygote:
    process: subprocess.Popen[bytes]
    line: socket.socket
    told: set[int] = field(default_factory=set)
    """Workers it was asked for and has not forked yet."""


class ZygoteClient:
    """``prepare`` once; then ``ask_for``. The rest happens when the selector sees something."""

    def __init__(self, selector: selectors.BaseSelector, parent: Parent, log: Path) -> None:
        self._selector, self._parent, self._log = selector, parent, log
        self._zygotes: list[Zygote] = []
        self._current: Zygote | None = None
        self._in_vain = 0
        self._has_borne = False
        self._env = {name: value for name, value in os.environ.items() if name not in OURS}
        self._prepare: packets.Packet = {}

    @property
    def is_expecting(self) -> bool:
        return any(zygote.told for zygote in self._zygotes)

    @property
    def pids(self) -> list[int]:
        return [zygote.process.pid for zygote in self._zygotes]

    def prepare(self, job: Job, preload: list[str]) -> None:
        """Start importing; nothing waits for it."""
        for name in (*THREADS, "PYTHONHASHSEED", "PYTHONPATH"):
            job.restore[name] = self._env.get(name)
        # One seed for all: sets of texts have the same order in every worker, a replacement's too.
        self._env.setdefault("PYTHONHASHSEED", str(int.from_bytes(os.urandom(4), "big")))
        for name in THREADS:
            self._env[name] = "1"  # a library that starts threads when imported could not be forked
        home = str(Path(lockstep.__file__).parents[1])
        if home not in [os.path.abspath(path) for path in sys.path[1:]]:
            self._env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, self._env.get("PYTHONPATH"))))
        self._prepare = {"type": "prepare", "preload": preload, "job": asdict(job)}
        self._start()

    def ask_for(self, wanted: list[dict[str, Any]], descriptors: list[int]) -> None:
        """Three descriptors for each, which are closed here: line, stdout, stderr."""
        zygote = self._current or self._start()
        zygote.told.update(each["id"] for each in wanted)
        zygote.line.settimeout(_ASK_TIMEOUT_S)  # it takes hundreds of requests before one could block
        try:
            packets.send(zygote.line, {"type": "fork", "workers": wanted}, descriptors)
        except OSError:
            pass  # it is dead: when that is noticed, another one is asked
        zygote.line.setblocking(False)
        for descriptor in descriptors:
            os.close(descriptor)

    def shut(self) -> None:
        """The current zygote ends, with whatever it was asked for."""
        if self._current is not None:
            os.kill(self._current.process.pid, signal.SIGKILL)
            self._current.told.clear()
            self._drop(self._current)

    def kill_groups(self) -> None:
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nobody is left in it

    def close(self) -> None:
        """After all processes were reaped."""
        for zygote in self._zygotes:
            zygote.process.returncode = 0  # subprocess need not look for it
        if self._current is not None:
            self._drop(self._current)
        self._zygotes = []

    def _start(self) -> Zygote:
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-P", "-m", "lockstep.launch.zygote", str(theirs.fileno()), str(os.getpid())]
        with open(self._log, "ab") as log, theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        zygote = self._current = Zygote(process, line)
        self._zygotes.append(zygote)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(zygote))
        try:
            packets.send(line, self._prepare)
        except OSError:
            pass  # the zygote is dead: when that is noticed, another one is asked
        line.setblocking(False)
        return zygote

    def _hear(self, zygote: Zygote) -> None:
        if zygote is not self._current:
            return
        try:
            packet, _ = packets.receive(zygote.line)
        except BlockingIOError:
            return
        except OSError:
            packet = None
        if packet is None:
            self._ended(zygote)
        elif packet["type"] == "forked":
            self._in_vain, self._has_borne = 0, True
            zygote.told.discard(packet["worker"])
            self._parent.born(packet["worker"], packet["pid"])
        elif packet["type"] == "unforked":
            self._give_up(zygote, packet["workers"], packet["error"])
        elif packet["type"] == "unusable":
            self._give_up(zygote, sorted(zygote.told), packet["error"])

    def _ended(self, zygote: Zygote) -> None:
        """Nothing is lost but the imports: workers go on, and who was not forked yet is asked of another."""
        self._drop(zygote)
        if not zygote.told:
            return
        self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            why = (
                f"the process that imports torch ended {self._in_vain} times before it could start a worker. "
                f"What it wrote is in {self._log}; try `{os.path.basename(sys.executable)} -c 'import torch'`."
            )
            self._give_up(zygote, sorted(zygote.told), why)
            return
        unborn = sorted(zygote.told)
        zygote.told.clear()
        self._parent.orphaned(unborn)

    def _give_up(self, zygote: Zygote, ids: list[int], why: str) -> None:
        """Where no worker was ever started there is no run; later, others go on and these count as dead."""
        ids = [id for id in ids if id in zygote.told]
        zygote.told.difference_update(ids)
        if ids:
            self._parent.stillborn(ids, why, is_hopeless=not self._has_borne)

    def _drop(self, zygote: Zygote) -> None:
        if zygote is self._current:
            self._current = None
            self._selector.unregister(zygote.line)
            zygote.line.close()
