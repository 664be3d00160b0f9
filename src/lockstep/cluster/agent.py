"""Agent: starts and watches the workers of one machine, and does what the head of the run says. Decides nothing about membership.

If the head is lost, the workers go on. The agent keeps what they want to tell the head, and connects to the same head or to another
one of its list. It reports what it remembers of the run (run_memory.py). When the head says that it decides for the run, the agent
sends what was kept.
"""

from __future__ import annotations

import base64
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import lockstep
from lockstep.cluster import protocol
from lockstep.cluster.head_link import HeadCallbacks, HeadLink, HeadList
from lockstep.cluster.messages import Message
from lockstep.cluster.own_addresses import interface_of, reachable_host
from lockstep.cluster.reachability import Reachability
from lockstep.cluster.run_memory import RunMemory
from lockstep.cluster.tls import ClientTls
from lockstep.launcher import packets
from lockstep.launcher.console import Console
from lockstep.launcher.environment import threads_per_worker
from lockstep.launcher.event_loop import STOP_SIGNALS, EventLoop
from lockstep.launcher.local_machine import LocalMachine
from lockstep.launcher.master_port import MasterPort
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.zygote_start import ZygoteStart
from lockstep.world import machine_label

_MASTER_PORTS = 4
"""Each start of all workers of a script without ``lockstep.Run`` takes another one."""
_MAX_KEPT = 100_000
"""Messages for the head, while there is none."""
_MAX_OUTPUT_BACKLOG = 1 << 20
_LEFT_OUT = b"\n[lockstep: the connection to the head is too slow; output is left out here. The log files have all of it]\n"


@dataclass(frozen=True)
class AgentSettings:
    """The options of `lockstep agent`.

    ``room``: how many workers it starts. ``command``: the script and its arguments, for people. ``connect_timeout_s``: how long
    the first head may take to answer. ``head_timeout_s``: how long the agent continues without a head.
    """

    heads: HeadList
    room: int
    command: str
    interface: str | None = None
    connect_timeout_s: float = 60.0
    head_timeout_s: float = 600.0
    grace_s: float = 10.0
    ends_with_stdin: bool = False


class Agent:
    """Call ``run`` once, in the main thread."""

    def __init__(
        self, settings: AgentSettings, token: bytes, tls: ClientTls | None, zygote_start: ZygoteStart, run_folder: RunFolder
    ) -> None:
        self._settings, self._run_folder = settings, run_folder
        self._output = NonblockingOutput()
        self._console = Console(self._output, shows_progress=False)
        self._loop = EventLoop(self._on_signal)
        self._machine = LocalMachine(self._loop.selector, zygote_start, run_folder, self._say)
        callbacks = HeadCallbacks(self._on_head, self._on_message, self._on_head_lost, self._console.say)
        self._link = HeadLink(settings.heads, token, tls, self._loop.selector, callbacks, self._loop.clock.now)
        self._reachability = Reachability(token, self._loop.selector, self._report_reachability)
        self._memory = RunMemory()
        self._unsent: list[Message] = []
        self._reported: set[int] = set()  # the workers of which the head knows that they have joined
        self._reported_pids: dict[int, int] = {}
        # Reserved, not listened on: the script of rank 0 listens there, at the address of this machine that others reach.
        self._master_ports = [MasterPort("0.0.0.0") for _ in range(_MASTER_PORTS)]
        self._address = ""
        self._hang_timeout_s = 30.0
        self._has_head = False  # one that decides for the run
        self._is_output_left_out = False
        self._code: int | None = None
        self._leaving_for = ""
        self._kill_at = float("inf")

    def run(self) -> int:
        """Block until the run is over, or this machine has left it; returns the exit code of the run."""
        with self._loop:
            try:
                self._run_folder.record("begin", pid=os.getpid(), command=self._settings.command)
                self._machine.start(self)
                if self._settings.ends_with_stdin:
                    os.set_blocking(0, False)
                    self._loop.selector.register(0, selectors.EVENT_READ, self._read_stdin)
                while self._code is None:
                    self._loop.run_once(self._machine.next_at)
                    self._on_time(time.monotonic())
                return self._code
            finally:
                self._link.close()
                self._reachability.close()
                self._machine.close()
                for port in self._master_ports:
                    port.close()
                self._console.close()
                self._run_folder.close()

    def _on_time(self, now: float) -> None:
        self._output.flush()
        self._machine.on_time(now, self._loop.clock.now(), self._hang_timeout_s)
        self._link.on_time(now)
        self._reachability.on_time(now)
        for id, pid in self._machine.pids.items():
            if self._reported_pids.get(id) != pid:
                self._reported_pids[id] = pid
                self._memory.started(id, pid)
                self._tell({"type": "started", "worker": id, "pid": pid})
        if self._leaving_for and not self._machine.ids:
            self._end(0, f"this machine has left the run: {self._leaving_for}")
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._console.say(f"killing the workers, which did not stop within {self._settings.grace_s:g} s.")
            self._machine.kill_all()
        if not self._has_head and not self._memory.run_id and self._link.away_s > self._settings.connect_timeout_s:
            self._end(1, f"no head answered within {self._settings.connect_timeout_s:g} s: {self._link.reasons}")
        elif self._memory.run_id and self._link.away_s > self._settings.head_timeout_s:
            self._end(1, f"there has been no head for {self._settings.head_timeout_s:g} s: {self._link.reasons}")

    def _end(self, code: int, why: str) -> None:
        self._run_folder.record("end", code=code, why=why)
        if code != 0 or self._leaving_for:
            self._console.say(why.rstrip(".") + ".")
        self._code = code

    # -- the head ----------------------------------------------------------------------------------

    def _on_head(self) -> None:
        """A head has answered: tell it what it must know of this machine."""
        self._address = self._address or reachable_host(self._link.local_host, self._settings.interface)
        self._reachability.listen(self._address)
        room = 0 if self._leaving_for else self._settings.room
        report = self._memory.report(room)
        self._reported = {worker.id for worker in report.workers if worker.has_joined}
        message = {
            "type": "register",
            "version": protocol.VERSION,
            "lockstep": lockstep.__version__,
            "run_id": self._memory.run_id,
            "machine": machine_label(),
            "host": socket.gethostname(),
            "folder": str(self._run_folder.path),
            "command": self._settings.command,
            "room": room,
            "threads": self._memory.threads or threads_per_worker(self._settings.room, os.environ),
            "address": self._address,
            "probe_port": self._reachability.port,
            "master_ports": [port.number for port in self._master_ports],
            "head_index": self._link.head_index,
            "heads": self._settings.heads.count,
            "report": asdict(report),
            "kept": len(self._memory.kept),
        }
        self._link.send(message)

    def _on_head_lost(self, why: str) -> None:
        self._run_folder.record("head lost", why=why)
        self._console.say(f"the head is lost: {why}. The workers continue; one that loses a peer waits until the head is back.")
        self._has_head = False

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "send":
            self._memory.on_answer(message["workers"], message["packet"])
            self._machine.send(message["workers"], message["packet"])
        elif kind == "registered":
            self._link.heartbeat_timeout_s, self._hang_timeout_s = message["heartbeat_timeout_s"], message["hang_timeout_s"]
        elif kind == "running":
            self._on_running(message)
        elif kind == "refused":
            self._end(1, message["why"])
        elif kind == "probe":
            self._reachability.probe(message["machines"])
        elif kind == "spawn":
            self._spawn(message)
        elif kind == "signal":
            self._machine.signal(message["worker"], message["number"])
        elif kind == "stop":
            self._machine.stop(message["worker"], message["grace_s"])
        elif kind == "kill hung":
            self._machine.kill_hung(message["worker"])
        elif kind == "drop":
            self._drop(message["workers"])
        elif kind == "kill all":
            self._machine.kill_all()
        elif kind == "cancel unstarted":
            self._machine.cancel_unstarted()
        elif kind == "forget workers":
            self._machine.forget_workers()
            self._memory.forget_exits()
        elif kind == "watch idle":
            idle_s = self._machine.idle_s(self._loop.clock.now())
            self._link.send({"type": "idle", "idle_s": {str(id): idle for id, idle in idle_s.items()}})
        elif kind == "keep":
            self._memory.kept.add(message["packet"])
        elif kind == "end":
            self._run_folder.record("the run has ended", code=message["code"], why=message["why"])
            self._machine.kill_all()
            self._code = message["code"]

    def _on_running(self, message: Message) -> None:
        """The head decides for the run from now on, and knows what this agent has reported."""
        is_again = bool(self._memory.run_id)
        self._memory.run_id = message["run_id"]
        self._has_head = True
        self._link.settle()
        self._run_folder.record("registered", run_id=message["run_id"])
        if is_again:
            self._console.say("the head is back.")
        else:
            room = f"{self._settings.room} worker{'' if self._settings.room == 1 else 's'}"
            self._console.say(
                f"machine {machine_label()} belongs to the run of the head at {self._link.head_address}, with room for {room}. "
                f"Their output is in {self._run_folder.path / 'workers'}."
            )
        if message["send_kept"]:
            for packet in self._memory.kept:
                self._link.send({"type": "kept", "packet": packet})
        for worker, packet in self._memory.unanswered():
            self._link.send({"type": "packet", "worker": worker, "packet": packet})
        unsent, self._unsent = self._unsent, []
        for each in unsent:
            is_reported = each["type"] == "packet" and each["packet"].get("type") == "join" and each["worker"] in self._reported
            if not is_reported:  # to join twice would be to leave the generation
                self._tell(each)
        for exit in self._memory.exits:
            self._link.send(exit)

    def _tell(self, message: Message) -> None:
        """Send a message to the head, now or when there is one."""
        if self._has_head:
            self._link.send(message)
        elif message["type"] != "output" and len(self._unsent) < _MAX_KEPT:
            self._unsent.append(message)

    def _spawn(self, message: Message) -> None:
        try:
            settings, places = protocol.spawn_order(message)
        except (TypeError, ValueError) as error:
            self._end(1, f"the head has sent an order that makes no sense ({error})")
            return
        interface = interface_of(self._address)
        places = {id: replace(place, interface=interface) for id, place in places.items()}
        self._memory.spawned({id: place.rank for id, place in places.items()}, settings)
        self._machine.spawn(list(places), settings, places)

    def _drop(self, workers: Sequence[int]) -> None:
        """The run has gone on without these workers."""
        alive = [id for id in workers if id in self._machine.ids]
        if alive:
            self._console.say(f"the run has gone on without {len(alive)} workers of this machine. They are killed and start anew.")
        for id in workers:
            self._memory.gone(id)
        for id in alive:
            self._machine.drop(id)

    def _say(self, text: str) -> None:
        self._console.say(text)
        self._tell({"type": "notice", "text": f"{text} ({socket.gethostname()})"})

    def _report_reachability(self, reached: list[str], unreachable: dict[str, str]) -> None:
        self._link.send({"type": "probed", "reached": reached, "unreachable": unreachable})

    # -- what happens to the workers (MachineObserver) -----------------------------------------------

    def on_packet(self, worker: int, packet: packets.Packet) -> None:
        self._memory.on_packet(worker, packet)
        kind = packet.get("type")
        if kind in ("progress", "steps", "store") and not self._has_head:
            return  # the next progress says more; requests to the store are repeated
        if kind in ("progress", "steps") and self._link.backlog > _MAX_OUTPUT_BACKLOG:
            return  # heartbeats must not wait behind it
        self._tell({"type": "packet", "worker": worker, "packet": packet})

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        if worker != self._memory.main_worker:
            return
        is_slow = self._link.backlog > _MAX_OUTPUT_BACKLOG  # what else the workers say must not wait behind it
        if is_slow and self._is_output_left_out:
            return
        self._is_output_left_out = is_slow
        data = _LEFT_OUT if is_slow else data
        self._tell({"type": "output", "worker": worker, "stream": stream, "data": base64.b64encode(data).decode()})

    def on_exit(self, worker: int, pid: int, status: int, last_lines: str) -> None:
        self._run_folder.record("exited", worker=worker, pid=pid, status=status)
        self._reported_pids.pop(worker, None)
        message = {"type": "exited", "worker": worker, "pid": pid, "status": status, "last_lines": last_lines}
        self._memory.exited(worker, message)
        if self._has_head:
            self._link.send(message)

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        self._console.say(why)
        self._tell({"type": "not started", "workers": workers, "why": why, "is_fatal": is_fatal})
        for id in workers:
            self._memory.gone(id)

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        if self._has_head:
            self._link.send({"type": "stopped", "worker": worker, "seconds": seconds})

    def on_zygote_hung(self, why: str) -> None:
        self._say(why)

    # -- the end of this process ---------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._machine.reap()
        elif number in STOP_SIGNALS and not self._leaving_for:
            self._leave(signal.Signals(number).name)
        elif number == signal.SIGINT:
            self._machine.kill_all()

    def _leave(self, why: str) -> None:
        """The workers finish the current step; the rest of the run continues without them."""
        self._leaving_for = why
        self._run_folder.record("leaving", why=why)
        self._console.say(f"got {why}. The workers of this machine have {self._settings.grace_s:g} s to leave the run.")
        self._tell({"type": "leaving", "why": why})
        self._kill_at = time.monotonic() + self._settings.grace_s
        for id in self._machine.ids:
            self._machine.signal(id, signal.SIGTERM)

    def _read_stdin(self) -> None:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.selector.unregister(0)
            self._end(1, "the command that started this agent has ended")
