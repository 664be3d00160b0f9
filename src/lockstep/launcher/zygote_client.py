"""ZygoteClient: starts the zygote, asks it to fork workers, and replaces it if it dies. Knows worker numbers, not what workers do.

The zygote leads a process group of its own, which its workers inherit: Ctrl-C in a terminal reaches the agent alone.
A dead zygote is not reaped before the end: while it is a zombie, no other process group can get its number, and
the group can be killed safely.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from lockstep.launcher import packets
from lockstep.launcher.idle_times import IdleTimes
from lockstep.launcher.worker import WorkerSpec
from lockstep.launcher.zygote_start import Process, ZygoteStart

_MAX_FAILED_STARTS = 3
_SEND_TIMEOUT_S = 30.0


class ZygoteObserver(Protocol):
    def worker_started(self, id: int, pid: int) -> None: ...

    def zygote_died(self, ids: list[int]) -> None:
        """The zygote died before it forked these workers. They must be requested again, with new descriptors."""

    def workers_not_started(self, ids: list[int], why: str, *, is_fatal: bool) -> None:
        """These workers cannot be started. ``is_fatal``: no worker of the run ever was."""


@dataclass
class ZygoteProcess:
    process: Process
    connection: socket.socket
    requested: set[int] = field(default_factory=set)
    """Workers that it was asked for and has not forked yet."""


class ZygoteClient:
    """Call ``start`` once, then ``fork``. Everything else happens when the selector sees a packet."""

    def __init__(self, selector: selectors.BaseSelector, observer: ZygoteObserver, log: Path, how: ZygoteStart) -> None:
        self._selector, self._observer, self._log, self._how = selector, observer, log, how
        self._zygotes: list[ZygoteProcess] = []
        self._current: ZygoteProcess | None = None
        self._failed_starts = 0
        self._has_forked = False
        self._idle_times = IdleTimes()

    @property
    def is_forking(self) -> bool:
        """Whether a worker was requested that the zygote has not reported as forked."""
        return any(zygote.requested for zygote in self._zygotes)

    @property
    def pids(self) -> list[int]:
        """Of all zygotes so far, dead ones included."""
        return [zygote.process.pid for zygote in self._zygotes]

    def start(self) -> ZygoteProcess:
        """Start a zygote. It imports torch in the background."""
        connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._open_log() as log, remote:
            process = self._how.start(remote, log)
        zygote = self._current = ZygoteProcess(process, connection)
        self._zygotes.append(zygote)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_packet(zygote))
        try:
            if self._how.prepare is not None:
                packets.send(connection, self._how.prepare)
        except OSError:
            pass  # the zygote is dead; when the selector sees that, another zygote is started
        connection.setblocking(False)
        return zygote

    def _open_log(self) -> BinaryIO:
        """If the file cannot be written (a full disk), the zygote's output is discarded."""
        try:
            return open(self._log, "ab")
        except OSError:
            return open(os.devnull, "ab")

    def fork(self, specs: Sequence[WorkerSpec], descriptors: Sequence[int]) -> None:
        """Request workers. ``descriptors``: those of each worker (worker.Descriptors), which are closed here."""
        zygote = self._current or self.start()
        zygote.requested.update(spec.id for spec in specs)
        zygote.connection.settimeout(_SEND_TIMEOUT_S)  # the socket takes hundreds of requests before it would block
        try:
            packets.send(zygote.connection, {"type": "fork", "workers": [asdict(spec) for spec in specs]}, descriptors)
        except OSError:
            pass  # the zygote is dead; when the selector sees that, the workers are requested again
        zygote.connection.setblocking(False)
        for descriptor in descriptors:
            os.close(descriptor)

    def kill_if_hung(self, now: float, hang_timeout_s: float) -> str:
        """Kill a zygote that was asked for workers and uses no CPU time; returns what happened, or "".

        To import torch may take long, but not without CPU time.
        """
        zygote = self._current
        watched = {0: zygote.process.pid} if zygote is not None and zygote.requested else {}
        if zygote is None or self._idle_times.measure(watched, now).get(0, 0.0) <= hang_timeout_s:
            return ""
        os.kill(zygote.process.pid, signal.SIGKILL)  # when the selector sees that, the workers are requested again
        ids = ", ".join(str(id) for id in sorted(zygote.requested))
        return (
            f"the process that starts workers (pid {zygote.process.pid}) hangs and is killed: it was asked for worker {ids} "
            f"and has used no CPU time for {hang_timeout_s:g} s. Another one is started. --hang-timeout raises the limit"
        )

    def kill_current(self) -> None:
        """Kill the current zygote. The workers that it has not forked are not started."""
        if self._current is not None:
            os.kill(self._current.process.pid, signal.SIGKILL)
            self._current.requested.clear()
            self._disconnect(self._current)

    def kill_process_groups(self) -> None:
        """Kill all zygotes, their workers, and what these have started in the same process group."""
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # the group is empty

    def close(self) -> None:
        """Called after all processes were reaped."""
        if self._current is not None:
            self._disconnect(self._current)
        self._zygotes = []

    def _on_packet(self, zygote: ZygoteProcess) -> None:
        if zygote is not self._current:
            return
        try:
            packet = packets.receive(zygote.connection)
        except BlockingIOError:
            return
        except OSError:
            packet = None
        if packet is None:
            self._on_death(zygote)
        elif packet["type"] == "forked":
            self._failed_starts, self._has_forked = 0, True
            zygote.requested.discard(packet["worker"])
            self._observer.worker_started(packet["worker"], packet["pid"])
        elif packet["type"] == "not forked":
            self._fail(zygote, packet["workers"], packet["error"])
        elif packet["type"] == "unusable":
            self._fail(zygote, sorted(zygote.requested), packet["error"])

    def _on_death(self, zygote: ZygoteProcess) -> None:
        """Only the imports are lost: its workers continue, and another zygote forks those that are missing."""
        self._disconnect(zygote)
        missing = sorted(zygote.requested)
        if not missing:
            return
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            why = (
                f"the process that imports torch ended {self._failed_starts} times before it could start a worker. "
                f"Its output is in {self._log}. Try `{os.path.basename(sys.executable)} -c 'import torch'`."
            )
            self._fail(zygote, missing, why)
            return
        zygote.requested.clear()
        self._observer.zygote_died(missing)

    def _fail(self, zygote: ZygoteProcess, ids: list[int], why: str) -> None:
        """Without any worker there is no run. If other workers run, they continue, and these count as dead."""
        ids = [id for id in ids if id in zygote.requested]
        zygote.requested.difference_update(ids)
        if ids:
            self._observer.workers_not_started(ids, why, is_fatal=not self._has_forked)

    def _disconnect(self, zygote: ZygoteProcess) -> None:
        if zygote is self._current:
            self._current = None
            self._selector.unregister(zygote.connection)
            zygote.connection.close()
