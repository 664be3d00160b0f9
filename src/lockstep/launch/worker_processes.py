"""Fleet: the workers as processes: started, heard, reaped, and none left behind. Knows no meaning of packets, decides nothing."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from lockstep.launch import linux, packets
from lockstep.launch.worker import Job
from lockstep.launch.zygote_client import ZygoteClient

_AT_ONCE = packets.MOST_DESCRIPTORS // 3
_READ_BYTES = 1 << 16
_MOST_READS = 64
_REAP_S = 5.0


class Listener(Protocol):
    def heard(self, worker: int, packet: packets.Packet) -> None: ...
    def wrote(self, worker: int, stream: int, data: bytes) -> None:
        """``stream``: 1 or 2."""

    def ended(self, worker: int, status: int) -> None:
        """Its process is gone, all it said was handed on. ``status``: its exit code, or minus the signal."""

    def not_started(self, workers: list[int], why: str, *, is_hopeless: bool) -> None:
        """They have no process and will get none. Hopeless: nor will any other."""


@dataclass(frozen=True)
class Wanted:
    id: int
    env: dict[str, str]
    threads: int


@dataclass
class Child:
    wanted: Wanted
    line: socket.socket
    outputs: dict[int, int]
    """Our end of a pipe -> 1 or 2."""
    pid: int | None = None

    @property
    def id(self) -> int:
        return self.wanted.id


class WorkerProcesses:
    """``prepare`` once; then ``spawn``. All else happens when the selector sees something and its data is called."""

    def __init__(self, selector: selectors.BaseSelector, listener: Listener, zygote_log: Path) -> None:
        self.children: dict[int, Child] = {}
        self._selector, self._listener = selector, listener
        self._nursery = ZygoteClient(selector, self, zygote_log)
        linux.adopt_orphans()

    def prepare(self, job: Job, preload: list[str]) -> None:
        """Start importing; nothing waits for it."""
        self._nursery.prepare(job, preload)

    def spawn(self, wanted: list[Wanted]) -> None:
        """Start workers, several with one request: they are forked one after the other, without a word between."""
        for at in range(0, len(wanted), _AT_ONCE):
            some = wanted[at : at + _AT_ONCE]
            self._nursery.ask_for([asdict(each) for each in some], [end for each in some for end in self._open(each)])

    def send(self, id: int, packet: packets.Packet) -> bool:
        """False where it is gone, or reads nothing any more."""
        child = self.children.get(id)
        if child is None:
            return False
        try:
            packets.send(child.line, packet)
        except OSError:
            return False
        return True

    def signal(self, id: int, number: int) -> None:
        child = self.children.get(id)
        if child is not None and child.pid is not None:
            os.kill(child.pid, number)  # not reaped, so the number is its own

    def give_up_unborn(self) -> None:
        """Whoever has no process yet will get none: the zygote ends."""
        unborn = [child for child in self.children.values() if child.pid is None]
        if unborn:
            self._nursery.shut()
        for child in unborn:
            self._forget(child)

    def reap(self) -> None:
        """Children have ended. Each one's last words come before the news of its end."""
        for child in list(self.children.values()):
            if child.pid is None:
                continue
            try:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                continue  # the process between it and the zygote has not exited: a signal will come when it is ours
            if pid == 0:
                continue
            self._hear(child)
            for output in list(child.outputs):
                self._read(child, output)
            self._forget(child)
            self._listener.ended(child.id, os.waitstatus_to_exitcode(status))
        self._end_orphans()

    def close(self) -> None:
        """Kill and reap everything below this process. May be called twice."""
        self.kill_all()
        deadline = time.monotonic() + _REAP_S
        while (pids := linux.children()) and time.monotonic() < deadline:
            for pid in pids:
                _kill_and_reap(pid)
            time.sleep(0.001)
        for child in list(self.children.values()):
            self._forget(child)
        self._nursery.close()

    def kill_all(self) -> None:
        """SIGKILL to every worker, the zygote, and what they have started."""
        self._nursery.kill_groups()
        for child in self.children.values():
            self.signal(child.id, signal.SIGKILL)

    # -- births ----------------------------------------------------------------------------------

    def born(self, id: int, pid: int) -> None:
        child = self.children.get(id)
        if child is not None:
            child.pid = pid
            self.reap()  # it may have ended before we knew it

    def orphaned(self, ids: list[int]) -> None:
        unborn = [self.children[id] for id in ids if id in self.children]
        for child in unborn:
            self._forget(child)
        self.spawn([child.wanted for child in unborn])

    def stillborn(self, ids: list[int], why: str, *, is_hopeless: bool) -> None:
        for child in [self.children[id] for id in ids if id in self.children]:
            self._forget(child)
        self._listener.not_started(ids, why, is_hopeless=is_hopeless)

    def _open(self, wanted: Wanted) -> tuple[int, int, int]:
        """Our ends of a worker's line and output are listened to; the other ends are returned."""
        line, line_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        (out, out_theirs), (err, err_theirs) = os.pipe(), os.pipe()
        child = Child(wanted, line, {out: 1, err: 2})
        self.children[wanted.id] = child
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(child))
        for output in child.outputs:
            os.set_blocking(output, False)
            self._selector.register(output, selectors.EVENT_READ, lambda output=output: self._read(child, output))
        return line_theirs.detach(), out_theirs, err_theirs

    # -- workers ---------------------------------------------------------------------------------

    def _hear(self, child: Child) -> None:
        while child.line.fileno() >= 0:
            try:
                packet, _ = packets.receive(child.line)
            except BlockingIOError:
                return
            except OSError:
                packet = None
            except ValueError:
                continue  # no JSON: a script wrote to a descriptor that is not its own
            if packet is None:
                self._selector.unregister(child.line)
                child.line.close()
            else:
                self._listener.heard(child.id, packet)

    def _read(self, child: Child, output: int) -> None:
        for _ in range(_MOST_READS):
            if output not in child.outputs:
                return  # closed since the selector saw it
            try:
                data = os.read(output, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_output(child, output)
                return
            self._listener.wrote(child.id, child.outputs[output], data)

    def _close_output(self, child: Child, output: int) -> None:
        del child.outputs[output]
        self._selector.unregister(output)
        os.close(output)

    def _forget(self, child: Child) -> None:
        if child.line.fileno() >= 0:
            self._selector.unregister(child.line)
            child.line.close()
        for output in list(child.outputs):
            self._close_output(child, output)
        self.children.pop(child.id, None)

    def _end_orphans(self) -> None:
        """What a dead worker has left behind became our child: data loaders, say."""
        if self._nursery.is_expecting:
            return  # a worker may be our child before we were told
        ours = {*self._nursery.pids, *(child.pid for child in self.children.values())}
        for pid in linux.children():
            if pid not in ours:
                _kill_and_reap(pid)


def _kill_and_reap(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass
