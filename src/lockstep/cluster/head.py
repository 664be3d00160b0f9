"""Head: decides for the workers of many machines, whose agents connect to it. No torch, no threads, no worker of its own.

A head begins with nothing. It gathers the agents that register, and then either starts the run or, if the agents belong to a run
whose head was lost, continues it:

    gathering --agents with room for --min-workers, and no agent of a run has come for a second--> running
    gathering --an agent of a run registers--> recovering --all members, or those that came in time--> running
    running --too few members are left--> gathering (all connections are closed; the agents register again)

A head that is not running keeps agents that know other heads for a few seconds only. The first head of their list keeps them
longest, so that they meet there, or at the head that runs.

How two heads that know the same agents exclude each other is in docs/internals/many_machines.md.
"""

from __future__ import annotations

import base64
import enum
import itertools
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import lockstep
from lockstep.cluster import protocol
from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.listener import Listener
from lockstep.cluster.machines import Machine, RemoteMachines
from lockstep.cluster.messages import Message
from lockstep.cluster.protocol import Registration
from lockstep.cluster.tls import ServerTls
from lockstep.launcher.console import Console
from lockstep.launcher.event_loop import STOP_SIGNALS, EventLoop
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.outcome import write_outcome
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.supervisor import Settings, Supervisor
from lockstep.plan import membership_events as events
from lockstep.plan.membership_recovery import has_majority, is_complete, missing_members, newest, recover
from lockstep.plan.membership_texts import count

_REJOIN_S = 5.0
"""How long a new head waits for the other machines of a run, from the first one on."""
_MAX_PROBES = 8
"""A machine that joins tries to reach this many others, and they try to reach it."""
_PROBE_TIMEOUT_S = 15.0
_END_S = 5.0
"""How long the agents may take to end when the run has ended."""
_SAY_EVERY_S = 30.0
_MAX_NAMES = 16
"""In a message."""
_EARLIER_RUN_S = 1.0
"""How long a new head waits for agents of a run whose head was lost, before it starts another run: they connect in this time."""
_KEEP_FIRST_S, _KEEP_OTHER_S = 5.0, 1.0
"""How long the first head of the agents' list, or another one, keeps agents after the last one has come, if it is not running."""


class _Phase(enum.Enum):
    GATHERING = enum.auto()
    RECOVERING = enum.auto()
    RUNNING = enum.auto()


@dataclass(frozen=True)
class HeadSettings:
    """The options of `lockstep head`. ``run``: those that `lockstep run` has too; its ``size`` is not used."""

    listen: Address
    run: Settings
    min_workers: int = 1
    heartbeat_timeout_s: float = 2.0


@dataclass(eq=False)
class _Candidate:
    """A machine that has registered and does not belong to the run yet: it is not known whether others can reach it."""

    machine: Machine
    waits_for: set[tuple[str, str]]
    """(machine, other machine): the first has not said yet whether it reaches the other. One of them is this machine."""
    since: float
    failures: dict[tuple[str, str], str] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Another machine is lost: nothing follows from who reaches it."""
        self.waits_for = {pair for pair in self.waits_for if name not in pair}
        self.failures = {pair: why for pair, why in self.failures.items() if name not in pair}


class Head:
    """Call ``run`` once, in the main thread."""

    def __init__(self, settings: HeadSettings, token: bytes, tls: ServerTls | None, run_folder: RunFolder) -> None:
        self._settings, self._run_folder = settings, run_folder
        self._output = NonblockingOutput()
        self._console = Console(self._output, is_plain=settings.run.is_plain)
        self._loop = EventLoop(self._on_signal)
        self._machines = RemoteMachines()
        self._candidates: dict[str, _Candidate] = {}  # by the name of the machine
        self._channels: dict[Channel, Machine | None] = {}
        self._phase = _Phase.GATHERING
        self._recovering_since: float | None = None
        self._say_at = time.monotonic() + _SAY_EVERY_S
        self._run_id = ""
        self._is_only_head = True
        self._supervisor: Supervisor | None = None
        self._code: int | None = None
        self._registered_at = time.monotonic()
        self._gathering_since = time.monotonic()
        self._watch_at = 0.0
        self._silent: set[Machine] = set()
        callbacks = ChannelCallbacks(self._on_open, self._on_message, self._on_closed)
        self._listener = Listener(
            settings.listen,
            token,
            self._loop.selector,
            {"agent": protocol.FROM_AGENT},
            callbacks,
            tls=tls,
            on_refused=lambda address, why: run_folder.record("refused", address=str(address), why=why),
        )

    @property
    def address(self) -> Address:
        return self._listener.address

    def run(self) -> int:
        """Block until the run is over; returns the exit code."""
        path = self._run_folder.path / "head.address"
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{self.address}\n")
        temporary.rename(path)
        self._console.say(
            f"this head listens on {self.address} and waits for agents with room for {count(self._settings.min_workers)}. "
            f"Its files are in {self._run_folder.path}."
        )
        with self._loop:
            try:
                while self._code is None:
                    next_at = self._supervisor.next_at if self._supervisor is not None else float("inf")
                    next_at = 0.0 if self._silent else next_at
                    self._loop.run_once(next_at)
                    self._on_time(time.monotonic())
                if self._supervisor is not None:
                    with suppress(OSError):  # its disk may be full
                        write_outcome(self._run_folder.path, self._code, self._supervisor.finished, self._supervisor.cause)
                self._tell_end(self._code)
                return self._code
            finally:
                self._listener.close()
                for channel in list(self._channels):
                    channel.close()
                if self._supervisor is not None:
                    self._supervisor.close()
                self._console.close()
                path.unlink(missing_ok=True)
                self._run_folder.close()

    # -- time ----------------------------------------------------------------------------------------

    def _on_time(self, now: float) -> None:
        self._output.flush()
        self._machines.now = now
        self._listener.on_time(now)
        if now >= self._watch_at or self._silent:  # there may be thousands of machines
            self._watch_at = now + min(0.1, self._settings.heartbeat_timeout_s / protocol.HEARTBEATS / 4)
            self._watch_machines(now)
        if self._phase is _Phase.RECOVERING:
            self._recover_if_possible(now)
        if self._phase is _Phase.GATHERING:
            self._start_if_possible(now)
        if self._phase is not _Phase.RUNNING and now >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            self._say_what_is_missing()
        if self._supervisor is not None:
            self._supervisor.on_time(now)
            if self._supervisor.is_over:
                self._code = self._supervisor.end()

    def _watch_machines(self, now: float) -> None:
        """A machine is lost if it is silent for the timeout, and still when all that has arrived meanwhile was read."""
        own_now = self._loop.clock.now()
        timeout_s = self._settings.heartbeat_timeout_s
        for machine in [machine for machine in self._channels.values() if machine is not None]:
            if now - machine.sent_at > timeout_s / protocol.HEARTBEATS:
                machine.send({"type": "heartbeat"}, now)
        silent = {machine for machine in self._channels.values() if machine and own_now - machine.heard_at > timeout_s}
        lost, self._silent = silent & self._silent, silent - self._silent
        for machine in lost:
            machine.channel.close()
            self._on_closed(machine.channel, f"machine {machine.name} has not answered for {timeout_s:g} s")
        for candidate in list(self._candidates.values()):
            if now - candidate.since > _PROBE_TIMEOUT_S:
                for pair in candidate.waits_for:
                    why = f"machine {pair[0]} has not said within {_PROBE_TIMEOUT_S:g} s whether it reaches machine {pair[1]}"
                    candidate.failures[pair] = why
                candidate.waits_for.clear()
            self._admit_if_reachable(candidate)
        if self._phase is not _Phase.RUNNING:
            self._let_go(now)

    def _say_what_is_missing(self) -> None:
        if self._phase is _Phase.GATHERING:
            machines = f"{len(self._machines)} machines with room for {self._machines.room} workers have registered"
            self._console.say(f"waiting for agents: {machines}, and --min-workers is {self._settings.min_workers}.")
        else:
            missing = missing_members([machine.given.report for machine in self._machines])
            whom = f"the machines of workers {', '.join(map(str, missing))}" if missing else "other machines"
            self._console.say(f"waiting for {whom}, to continue the run.")

    # -- machines that come ----------------------------------------------------------------------------

    def _on_open(self, channel: Channel) -> None:
        self._channels[channel] = None

    def _register(self, channel: Channel, message: Message) -> None:
        try:
            given = protocol.registration_of(message)
        except (TypeError, ValueError) as error:
            self._refuse(channel, f"its registration makes no sense ({error})")
            return
        if message["version"] != protocol.VERSION or message["lockstep"] != lockstep.__version__:
            mine = f"this head has Lockstep {lockstep.__version__} (protocol {protocol.VERSION})"
            self._refuse(
                channel,
                f"machine {given.machine} has Lockstep {message['lockstep']} (protocol {message['version']}), and {mine}. "
                "Install the same version on all machines.",
            )
            return
        known = [each for each in self._channels.values() if each is not None] if given.run_id else []
        for old in [each for each in known if _is_same_agent(each.given, given)]:
            old.channel.close()
            self._on_closed(old.channel, "its agent has connected again")
        if channel.is_closed:
            return  # too few members are left, and all agents register again
        if self._has_name(given.machine):
            number = next(n for n in itertools.count(2) if not self._has_name(f"{given.machine}-{n}"))
            given = replace(given, machine=f"{given.machine}-{number}")
        if self._run_id and given.run_id and given.run_id != self._run_id:
            self._refuse(
                channel, f"machine {given.machine} belongs to another run. Stop its agent, and start it again for this run."
            )
            return
        if self._phase is _Phase.GATHERING and given.head_index > 0 and not given.run_id:
            self._run_folder.record("let go", machine=given.machine, why="only the first head of a list begins a run")
            channel.close()
            self._channels.pop(channel, None)
            return
        now = time.monotonic()
        machine = self._channels[channel] = Machine(given, channel, self._loop.clock.now(), now)
        self._is_only_head = self._is_only_head and given.heads == 1
        self._registered_at = now
        self._run_folder.record("registered", machine=given.machine, host=str(channel.peer_address), room=given.room)
        machine.send(
            {
                "type": "registered",
                "heartbeat_timeout_s": self._settings.heartbeat_timeout_s,
                "hang_timeout_s": self._settings.run.policy.hang_timeout_s,
            },
            now,
        )
        self._probe(machine, now)

    def _has_name(self, name: str) -> bool:
        return self._machines.has_name(name) or name in self._candidates

    def _refuse(self, channel: Channel, why: str) -> None:
        self._console.say(f"an agent at {channel.peer_address} was refused: {why}")
        channel.send({"type": "refused", "why": f"the head has refused this agent: {why}"})
        channel.flush(0.5)
        channel.close()
        self._channels.pop(channel, None)

    def _probe(self, machine: Machine, now: float) -> None:
        """Ask the machine whether it reaches some others, and these whether they reach it. Not within one address."""
        known = [*self._machines.newest(_MAX_PROBES, machine.given.address), *(each.machine for each in self._candidates.values())]
        others = [other for other in known if other.given.address != machine.given.address][-_MAX_PROBES:]
        pairs = {pair for other in others for pair in ((machine.name, other.name), (other.name, machine.name))}
        candidate = self._candidates[machine.name] = _Candidate(machine, pairs, now)
        for other in others:
            other.send({"type": "probe", "machines": {machine.name: _probe_address(machine)}}, now)
        if others:
            machine.send({"type": "probe", "machines": {other.name: _probe_address(other) for other in others}}, now)
        self._admit_if_reachable(candidate)

    def _on_probed(self, machine: Machine, message: Message) -> None:
        named = (*message["reached"], *message["unreachable"])
        for candidate in [self._candidates[name] for name in (machine.name, *named) if name in self._candidates]:
            for name in named:
                pair = (machine.name, name)
                if pair in candidate.waits_for:
                    candidate.waits_for.remove(pair)
                    if name in message["unreachable"]:
                        candidate.failures[pair] = f"machine {pair[0]} cannot reach machine {name}: {message['unreachable'][name]}"
            self._admit_if_reachable(candidate)

    def _admit_if_reachable(self, candidate: _Candidate) -> None:
        if candidate.waits_for or self._candidates.get(candidate.machine.name) is not candidate:
            return
        if candidate.failures and time.monotonic() - candidate.since <= self._settings.heartbeat_timeout_s:
            return  # the other machine may be lost, which is known after this time
        del self._candidates[candidate.machine.name]
        if candidate.failures:
            why = "; ".join(candidate.failures.values())
            self._refuse(candidate.machine.channel, f"{why}. Let the machines reach each other, or name another --interface.")
        else:
            self._admit(candidate.machine)

    def _admit(self, machine: Machine) -> None:
        self._machines.add(machine)
        report = machine.given.report
        if self._phase is _Phase.RUNNING:
            assert self._supervisor is not None
            self._tell_running(machine)
            self._machines.give_kept(machine)
            if report.workers:
                machine.send({"type": "drop", "workers": [worker.id for worker in report.workers]}, time.monotonic())
            if machine.given.room:
                self._supervisor.decide(events.MachineJoined(machine.name, machine.given.room))
            return
        if machine.given.run_id and (report.workers or report.generation >= 0):
            self._run_id = machine.given.run_id
            self._phase = _Phase.RECOVERING
            self._recovering_since = self._recovering_since or time.monotonic()
            return

    # -- the run -----------------------------------------------------------------------------------------

    def _start_if_possible(self, now: float) -> None:
        """Start a run, unless agents of an earlier one may come back to this head, or have it with another head."""
        if not len(self._machines) or self._machines.room < self._settings.min_workers or (self._run_id and not self._is_only_head):
            return
        is_first_head = all(machine.given.head_index == 0 for machine in self._machines)
        if is_first_head and now - self._gathering_since >= (_REJOIN_S if self._run_id else _EARLIER_RUN_S):
            self._start()

    def _start(self) -> None:
        self._phase = _Phase.RUNNING
        names = [f"{machine.name} ({machine.given.room})" for machine in self._machines]
        more = f" and {len(names) - _MAX_NAMES} more machines" if len(names) > _MAX_NAMES else ""
        self._console.say(f"starting {count(self._machines.room)} on {', '.join(names[:_MAX_NAMES])}{more}.")
        self._run_id = self._run_id or secrets.token_hex(8)
        for machine in self._machines:
            self._tell_running(machine)
        self._make_supervisor().start()

    def _tell_running(self, machine: Machine, *, send_kept: bool = False) -> None:
        machine.send({"type": "running", "run_id": self._run_id, "send_kept": send_kept}, time.monotonic())

    def _make_supervisor(self) -> Supervisor:
        settings = replace(self._settings.run, size=self._machines.room, threads=self._machines.threads)
        self._supervisor = Supervisor(
            settings, self._machines, self._run_folder, self._console, self._loop.selector, self._loop.clock.now
        )
        return self._supervisor

    def _recover_if_possible(self, now: float) -> None:
        """Continue the run with the machines that have registered, if all have, or if the others have had their time."""
        reports = [replace(machine.given.report, machine=machine.name) for machine in self._machines]
        if not reports:
            return
        assert self._recovering_since is not None
        missing = missing_members(reports)
        if not is_complete(reports) and now - self._recovering_since < _REJOIN_S:
            return
        members = newest(reports).members
        if members and not self._may_continue(members, [id for id in members if id not in missing]):
            return
        self._phase, self._recovering_since = _Phase.RUNNING, None
        decision, dropped = recover(self._settings.run.policy, reports, self._loop.clock.now())
        kept = {worker.id for worker in decision[0].workers}
        for machine in self._machines:
            self._tell_running(machine, send_kept=bool(machine.given.kept))
            mine = [worker.id for worker in machine.given.report.workers]
            stale = [id for id in mine if id in dropped]
            if stale:
                machine.send({"type": "drop", "workers": stale}, now)
            self._machines.adopt(machine, [id for id in mine if id in kept])
        self._console.say(f"continuing a run with {len(kept)} workers on {len(self._machines)} machines.")
        self._make_supervisor().resume(decision)

    def _may_continue(self, members: tuple[int, ...], present: list[int]) -> bool:
        """Whether no other head can continue the run at the same time: agents know no other, or most members are here."""
        return bool(present) and (self._is_only_head or has_majority(members, present))

    # -- machines that go ----------------------------------------------------------------------------------

    def _on_closed(self, channel: Channel, why: str) -> None:
        machine = self._channels.pop(channel, None)
        if machine is None:
            return
        candidate = self._candidates.get(machine.name)
        if candidate is not None and candidate.machine is machine:
            del self._candidates[machine.name]
        for other in self._candidates.values():
            other.forget(machine.name)
        if machine not in self._machines:
            return
        self._run_folder.record("machine lost", machine=machine.name, why=why)
        workers = self._machines.remove(machine)
        if self._phase is not _Phase.RUNNING or self._code is not None:
            return
        assert self._supervisor is not None
        state = self._supervisor.state
        left = [id for id in state.members if id not in workers]
        has_lost = len(left) < len(state.members)  # a machine whose workers have ended takes no member with it
        if has_lost and not state.ended and not self._is_ending and not self._may_continue(state.formed, left):
            self._lose_run(f"machine {machine.name} is lost ({why})")
            return
        room = 0 if machine.is_leaving else machine.given.room
        how = f"machine {machine.name} is lost: {why}" if workers or room else f"machine {machine.name} has left the run"
        self._supervisor.on_machine_lost(workers, room, how)

    @property
    def _is_ending(self) -> bool:
        return self._supervisor is not None and self._supervisor.is_ending

    def _lose_run(self, why: str) -> None:
        """Too few members are left to continue. Their machines may come back, to this head or to another one."""
        self._console.say(f"{why}, and too few members of the run are left. Waiting for their machines to register again.")
        assert self._supervisor is not None
        self._supervisor.close()
        self._supervisor = None
        self._gather_again()

    def _let_go(self, now: float) -> None:
        """The agents register with their next head, if this head cannot decide for them soon."""
        machines = [machine for machine in self._channels.values() if machine is not None]
        if self._candidates or all(machine.given.heads == 1 for machine in machines):
            return
        keep_s = _KEEP_FIRST_S if machines[0].given.head_index == 0 else _KEEP_OTHER_S
        reports = [machine.given.report for machine in self._machines]
        if now - self._registered_at < keep_s:
            return
        if self._phase is _Phase.RECOVERING and reports:
            missing = missing_members(reports)
            members = newest(reports).members
            if self._may_continue(members, [id for id in members if id not in missing]):
                return
        self._gather_again()

    def _gather_again(self) -> None:
        """Close all connections. The agents register again, here or with another head."""
        self._phase, self._recovering_since = _Phase.GATHERING, None
        self._gathering_since = time.monotonic()
        self._machines = RemoteMachines()
        for channel in list(self._channels):
            channel.close()
        self._channels.clear()
        self._candidates.clear()

    def _leave(self, machine: Machine, why: str) -> None:
        if not machine.is_leaving:
            machine.is_leaving = True
            if self._supervisor is not None:
                self._supervisor.on_machine_lost((), machine.given.room, f"machine {machine.name} leaves the run ({why})")

    # -- messages --------------------------------------------------------------------------------------------

    def _on_message(self, channel: Channel, message: Message) -> None:
        machine = self._channels.get(channel)
        if message["type"] == "register":
            if machine is None:
                self._register(channel, message)
            return
        if machine is None:
            return
        machine.heard_at = self._loop.clock.now()
        if message["type"] == "probed":
            self._on_probed(machine, message)
        elif message["type"] == "leaving":
            self._leave(machine, message["why"])
        elif self._supervisor is not None:
            self._on_worker_message(self._supervisor, machine, message)

    def _on_worker_message(self, supervisor: Supervisor, machine: Machine, message: Message) -> None:
        kind = message["type"]
        worker = message.get("worker", -1)
        if kind == "kept":
            self._machines.keep_again(message["packet"])
            supervisor.on_kept(message["packet"])
        elif kind == "notice":
            self._console.say(message["text"])
        elif kind == "idle":
            self._machines.note_idle(message["idle_s"])
        elif kind == "not started":
            mine = [id for id in message["workers"] if self._machines.has(machine, id)]
            for id in mine:
                self._machines.gone(id)
            supervisor.on_not_started(mine, message["why"], is_fatal=message["is_fatal"] and len(self._machines) == 1)
        elif not self._machines.has(machine, worker):
            return  # the run has gone on without this worker
        elif kind == "packet":
            supervisor.on_packet(worker, message["packet"])
        elif kind == "started":
            self._machines.started(machine, worker, message["pid"])
        elif kind == "stopped":
            supervisor.on_stopped(worker, message["seconds"])
        elif kind == "output":
            supervisor.on_output(worker, message["stream"], base64.b64decode(message["data"]))
        elif kind == "exited":
            self._machines.gone(worker)
            supervisor.on_exit(worker, message["pid"], message["status"], message["last_lines"])

    # -- the end -----------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if self._supervisor is not None:
            self._supervisor.on_signal(number)
        else:
            self._console.say(f"got {signal.Signals(number).name} before training.")
            self._code = 128 + number
            why = f"stopped by {signal.Signals(number).name} before training"
            self._run_folder.record("end", code=self._code, why=why, stopped_after=None, signal=number)

    def _tell_end(self, code: int) -> None:
        """Tell all agents that the run is over, and wait until they have closed their connections.

        If this head does not decide for a run, agents that belong to one are let go: another head may continue it.
        """
        for channel, machine in list(self._channels.items()):
            if machine is None or (machine.given.run_id and self._supervisor is None):
                channel.close()
                del self._channels[channel]
                continue
            machine.send({"type": "end", "code": code, "why": "the run is over"}, time.monotonic())
        deadline = time.monotonic() + _END_S
        while self._channels and time.monotonic() < deadline:
            self._loop.run_once(deadline)


def _is_same_agent(one: Registration, other: Registration) -> bool:
    """Only one process listens on a port."""
    return (one.address, one.probe_port) == (other.address, other.probe_port)


def _probe_address(machine: Machine) -> str:
    return str(Address(machine.given.address, machine.given.probe_port))
