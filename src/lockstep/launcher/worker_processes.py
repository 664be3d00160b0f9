"""WorkerProcesses: starts the worker processes, reads their packets and output, signals and reaps them, and leaves none behind.

Does not know what packets mean, and decides nothing.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep.launcher import linux, packets
from lockstep.launcher.standard_input import StandardInput
from lockstep.launcher.worker import Descriptors, WorkerSpec
from lockstep.launcher.zygote_client import ZygoteClient
from lockstep.launcher.zygote_start import ZygoteStart

_WORKERS_PER_REQUEST = packets.MAX_DESCRIPTORS // len(Descriptors._fields)
_READ_BYTES = 1 << 16
_MAX_READS = 64
_MAX_UNSENT = 4096
"""More packets are queued only if a script floods its agent with requests and does not read the answers."""
_REAP_TIMEOUT_S = 5.0


class WorkerObserver(Protocol):
    def on_packet(self, worker: int, packet: packets.Packet) -> None: ...

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        """``stream``: 1 for stdout, 2 for stderr."""

    def on_exit(self, worker: int, pid: int, status: int) -> None:
        """The process is gone, and all its packets and output were passed on. ``status``: its exit code, or minus the signal."""

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        """SIGSTOP has stopped the worker (None), or it has continued after so long. 0: the stop was too short to be seen."""

    def on_zygote_hung(self, why: str) -> None: ...

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        """These workers have no process and will get none. ``is_fatal``: neither will any other."""


@dataclass
class WorkerProcess:
    """The agent's side of one worker. ``outputs``: the agent's end of a pipe -> 1 or 2. ``pid`` is None until it is forked."""

    spec: WorkerSpec
    connection: socket.socket
    outputs: dict[int, int]
    pid: int | None = None
    is_reaped: bool = False
    """The process is gone, and its last packets are being read. Another process may have its pid."""
    stopped_at: float | None = None
    """When SIGSTOP has stopped it (time.monotonic); None while it is not stopped."""
    unsent: deque[packets.Packet] = field(default_factory=deque)
    """Packets for which the socket has no room now."""

    @property
    def id(self) -> int:
        return self.spec.id


class WorkerProcesses:
    """Call ``start_zygote`` once, then ``spawn``. The observer is called when the selector sees something, and by ``reap``."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        observer: WorkerObserver,
        stdin: StandardInput,
        zygote_log: Path,
        zygote_start: ZygoteStart,
    ) -> None:
        self._processes: dict[int, WorkerProcess] = {}
        self._selector, self._observer, self._stdin = selector, observer, stdin
        self._zygote = ZygoteClient(selector, self, zygote_log, zygote_start)
        linux.adopt_orphans()

    def start_zygote(self) -> None:
        """Start importing torch in the background."""
        self._zygote.start()

    @property
    def ids(self) -> list[int]:
        """The workers that are running or being started."""
        return list(self._processes)

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers that have a process."""
        return {id: process.pid for id, process in self._processes.items() if process.pid is not None}

    def pid(self, id: int) -> int | None:
        process = self._processes.get(id)
        return None if process is None else process.pid

    def spawn(self, specs: Sequence[WorkerSpec]) -> None:
        """Start workers, many with one request to the zygote."""
        for first in range(0, len(specs), _WORKERS_PER_REQUEST):
            some = specs[first : first + _WORKERS_PER_REQUEST]
            self._zygote.fork(some, [descriptor for spec in some for descriptor in self._open(spec)])

    def send(self, id: int, packet: packets.Packet) -> None:
        """Send a packet, now or as soon as the worker reads. It is discarded if the worker is gone, or never reads."""
        process = self._processes.get(id)
        if process is not None and process.connection.fileno() >= 0 and len(process.unsent) < _MAX_UNSENT:
            process.unsent.append(packet)
            if len(process.unsent) == 1:
                self._send_unsent(process)

    def signal(self, id: int, number: int) -> None:
        process = self._processes.get(id)
        if process is not None and process.pid is not None and not process.is_reaped:
            os.kill(process.pid, number)  # it is not reaped, so no other process can have this pid

    def cancel_unstarted(self) -> None:
        """Workers that have no process yet will get none: the zygote is killed."""
        unstarted = [process for process in self._processes.values() if process.pid is None]
        if unstarted:
            self._zygote.kill_current()
        for process in unstarted:
            self._remove(process)

    def reap(self) -> None:
        """Find the processes that have ended. Passes on the last packets and output of each, then its exit.

        SIGCHLD comes too when a process is stopped or continues.
        """
        for process in list(self._processes.values()):
            if process.pid is None:
                continue
            try:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue  # the intermediate process has not exited yet: SIGCHLD will come when the worker is our child
            if pid == 0:
                self._note_stops(process)
                continue
            process.is_reaped = True
            self._read_packets(process)
            self._read_all_output(process)
            self._remove(process)
            self._observer.on_exit(process.id, pid, os.waitstatus_to_exitcode(status))
        self._kill_orphans()

    def _note_stops(self, process: WorkerProcess) -> None:
        """Ask the kernel whether SIGSTOP has stopped a worker, or SIGCONT has continued it. It tells the last of both alone."""
        assert process.pid is not None
        for _ in range(2):
            try:
                found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            now, since = time.monotonic(), process.stopped_at
            if found.si_code == os.CLD_CONTINUED:
                process.stopped_at = None
                self._observer.on_stopped(process.id, 0.0 if since is None else now - since)
            elif since is None:
                process.stopped_at = now
                self._observer.on_stopped(process.id, None)

    def kill_hung_zygote(self, now: float, hang_timeout_s: float) -> None:
        """Kill the zygote if it was asked for a worker and has used no CPU time for the hang timeout. Another one is started."""
        why = self._zygote.kill_if_hung(now, hang_timeout_s)
        if why:
            self._observer.on_zygote_hung(why)

    def close(self) -> None:
        """Kill and reap all descendants of this process. May be called twice."""
        self.kill_all()
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while (pids := linux.children()) and time.monotonic() < deadline:
            for pid in pids:
                _kill_and_reap(pid)
            time.sleep(0.001)
        for process in list(self._processes.values()):
            self._remove(process)
        self._zygote.close()

    def kill_all(self) -> None:
        """SIGKILL to every worker, the zygote, and what they have started."""
        self._zygote.kill_process_groups()
        for id in self._processes:
            self.signal(id, signal.SIGKILL)

    # -- called by the zygote client -------------------------------------------------------------

    def worker_started(self, id: int, pid: int) -> None:
        process = self._processes.get(id)
        if process is not None:
            process.pid = pid
            self.reap()  # the process may have ended before its pid was known

    def zygote_died(self, ids: list[int]) -> None:
        unstarted = [self._processes[id] for id in ids if id in self._processes]
        for process in unstarted:
            self._remove(process)
        self.spawn([process.spec for process in unstarted])

    def workers_not_started(self, ids: list[int], why: str, *, is_fatal: bool) -> None:
        for process in [self._processes[id] for id in ids if id in self._processes]:
            self._remove(process)
        self._observer.on_not_started(ids, why, is_fatal=is_fatal)

    # -- one worker ------------------------------------------------------------------------------

    def _open(self, spec: WorkerSpec) -> Descriptors:
        """Open the socket, the input and the output pipes of a worker, and watch our ends; returns the worker's ends."""
        connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        process = self._processes[spec.id] = WorkerProcess(spec, connection, {})
        stdin = self._stdin.open(spec)
        if spec.has_terminal:
            return self._watch(process, Descriptors(remote.detach(), stdin, os.dup(1), os.dup(2)))
        (out, remote_out), (err, remote_err) = os.pipe(), os.pipe()
        process.outputs |= {out: 1, err: 2}
        return self._watch(process, Descriptors(remote.detach(), stdin, remote_out, remote_err))

    def _watch(self, process: WorkerProcess, theirs: Descriptors) -> Descriptors:
        connection = process.connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_socket(process))
        for output in process.outputs:
            os.set_blocking(output, False)
            self._selector.register(output, selectors.EVENT_READ, lambda output=output: self._read_output(process, output))
        return theirs

    def _on_socket(self, process: WorkerProcess) -> None:
        if process.unsent:
            self._send_unsent(process)
        self._read_packets(process)

    def _send_unsent(self, process: WorkerProcess) -> None:
        """Send what the socket takes. The selector says when it takes more."""
        while process.unsent:
            try:
                packets.send(process.connection, process.unsent[0])
            except BlockingIOError:
                break
            except OSError:
                pass  # the worker is gone, or the packet is too large
            process.unsent.popleft()
        if process.connection.fileno() >= 0:
            write = selectors.EVENT_WRITE if process.unsent else 0
            key = self._selector.get_key(process.connection)
            if key.events != selectors.EVENT_READ | write:
                self._selector.modify(process.connection, selectors.EVENT_READ | write, key.data)

    def _read_packets(self, process: WorkerProcess) -> None:
        while process.connection.fileno() >= 0:
            try:
                packet = packets.receive(process.connection)
            except BlockingIOError:
                return
            except OSError:
                packet = None
            except ValueError:
                continue  # the script wrote something else to this socket
            if packet is None:
                self._close_connection(process)
            else:
                self._read_all_output(process)  # what the worker has printed before it sent the packet
                self._observer.on_packet(process.id, packet)

    def _read_all_output(self, process: WorkerProcess) -> None:
        for output in list(process.outputs):
            self._read_output(process, output)

    def _read_output(self, process: WorkerProcess, output: int) -> None:
        for _ in range(_MAX_READS):
            if output not in process.outputs:
                return  # closed since the selector saw it
            try:
                data = os.read(output, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_output(process, output)
                return
            self._observer.on_output(process.id, process.outputs[output], data)

    def _close_output(self, process: WorkerProcess, output: int) -> None:
        del process.outputs[output]
        self._selector.unregister(output)
        os.close(output)

    def _close_connection(self, process: WorkerProcess) -> None:
        if process.connection.fileno() >= 0:
            self._selector.unregister(process.connection)
            process.connection.close()

    def _remove(self, process: WorkerProcess) -> None:
        self._close_connection(process)
        for output in list(process.outputs):
            self._close_output(process, output)
        self._processes.pop(process.id, None)

    def _kill_orphans(self) -> None:
        """Kill what dead workers have left behind, such as data loader processes: orphans become children of the agent."""
        if self._zygote.is_forking:
            return  # a worker may be our child before the zygote has reported its pid
        known = {*self._zygote.pids, *(process.pid for process in self._processes.values())}
        for pid in linux.children():
            if pid not in known:
                _kill_and_reap(pid)


def _kill_and_reap(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass
