"""Supervisor: turns what happens to the workers of a run into events, and performs what plan/membership.py decides.

It does not know on which machines the workers run, or how. No threads, no torch, and nothing blocks: a decision about a dead
worker must not wait for a full pipe.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.launcher import packets
from lockstep.launcher.console import Console
from lockstep.launcher.control_requests import answer
from lockstep.launcher.control_socket import ControlSocket
from lockstep.launcher.environment import RunSettings
from lockstep.launcher.exit_status import ExitStatus
from lockstep.launcher.failure_text import Failure, worker_name
from lockstep.launcher.key_value_store import KeyValueStore
from lockstep.launcher.local_machine import Machines
from lockstep.launcher.recorded_results import RecordedResults
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.run_observer import RunObserver
from lockstep.launcher.shutdown import Shutdown
from lockstep.launcher.worker_messages import event_of, progress_of
from lockstep.plan import membership_events as events
from lockstep.plan.membership import begin, decide
from lockstep.plan.membership_generation import Decision
from lockstep.plan.membership_hangs import is_watching
from lockstep.plan.membership_spares import is_needed
from lockstep.plan.membership_state import Policy, State
from lockstep.recording.text import plural


@dataclass(frozen=True)
class Settings:
    """The options of `lockstep run`. ``size``: how many workers to start. ``grace_s``: how long they may take to stop.

    ``debug_rank``: the worker that gets the terminal; None: no worker does. ``threads``: of each worker; None: what the user has
    set, or an equal share of the cores. ``is_plain``: progress in lines of plain text on a terminal too.
    """

    size: int
    grace_s: float = 10.0
    policy: Policy = dataclasses.field(default_factory=Policy)
    ledger: bool = False
    debug_rank: int | None = None
    threads: int | None = None
    is_plain: bool = False


class Supervisor:
    """Call ``start`` once; then tell it what happens (``on_...``) and call ``on_time`` often, until ``is_over``.

    ``clock()`` is the time without that in which this process was stopped (OwnClock).
    """

    def __init__(
        self,
        settings: Settings,
        machines: Machines,
        run_folder: RunFolder,
        console: Console,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._machines, self._run_folder, self._console = settings, machines, run_folder, console
        self._clock = clock
        self._control_socket = ControlSocket(run_folder.address, selector, lambda request: answer(self, request))
        self._shutdown = Shutdown(machines, console, settings.grace_s, self._name)
        self._exit_status = ExitStatus(console, run_folder.path)
        self._observer = RunObserver(run_folder, machines, console)
        self._record = self._observer.record
        self._store = KeyValueStore(self._send_to_one)
        self._results = RecordedResults(self._send_to_one, console.say)
        self._idle_at = 0.0
        self._state = State(settings.size, settings.policy)
        self._ranks: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        """Rank -> the worker that had this rank when its script reached the end."""
        self._pending_spawns: list[tuple[float, events.Spawn]] = []  # (when, what)

    def start(self) -> None:
        """Start the workers."""
        self._console.show_status(f"starting {plural(self._settings.size, 'worker')}", is_brief=True)
        self._record("begin", settings=dataclasses.asdict(self._settings), pid=os.getpid())
        self._adopt(begin(self._settings.size, self._settings.policy, self._machines.room or 0))

    def resume(self, decision: Decision) -> None:
        """Continue a run that another process has supervised. ``decision``: its state, and what to do first."""
        state = decision[0]
        self._record("continue", generation=state.generation, workers=[worker.id for worker in state.workers])
        if state.generation >= 0:
            self._ranks = {id: rank for rank, id in enumerate(state.formed)}
            self._exit_status.generation_formed(state.formed)
            self._store.begin(state.generation)
        self._adopt(decision)

    def on_kept(self, packet: packets.Packet) -> None:
        """A packet that ``Machines.keep`` was given by the process that has supervised the run before."""
        if packet.get("type") == "epoch":
            self._results.begin_epoch(packet)
        elif packet.get("type") == "recorded":
            self._results.record(packet)

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_ending(self) -> bool:
        """Whether the run has ended or was told to."""
        return self._shutdown.has_begun

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and every worker is gone."""
        return self._shutdown.has_begun and not self._machines.ids

    @property
    def cause(self) -> Failure | None:
        """The failure that ended the run; None if there was none."""
        return self._exit_status.cause

    @property
    def next_at(self) -> float:
        """When ``on_time`` has something to do."""
        return min(self._shutdown.next_at, *(when for when, _ in self._pending_spawns), float("inf"))

    def end(self) -> int:
        """The run is over: show the last messages; returns the exit code."""
        if self._shutdown.signal is not None:
            code, why = self._exit_status.after_signal(self._shutdown.signal)
        else:
            assert self._shutdown.end is not None
            code, why = self._exit_status.after_end(self._shutdown.end)
        facts = {"signal": self._shutdown.signal, "step": self._last_step, "checkpoint": self._exit_status.checkpoint}
        self._record("end", code=code, why=why, stopped_after=self._exit_status.stopped_after, **facts)
        self._observer.end(has_said_where=self._exit_status.has_said_where)
        return code

    @property
    def _last_step(self) -> int:
        """The last committed step that a member has reported."""
        return max(self._state.committed, self._exit_status.stopped_after or 0, *(step for _, step in self._state.ended_at), 0)

    def close(self) -> None:
        self._control_socket.close()
        self._observer.close()
        self._run_folder.remove_socket()

    def on_time(self, now: float) -> None:
        self._observer.on_time(now)
        self._shutdown.on_time(now)
        due = [entry for entry in self._pending_spawns if entry[0] <= now]
        self._pending_spawns = [entry for entry in self._pending_spawns if entry not in due]
        for _, action in due:
            self._spawn(action)
        self.decide(events.Tick(self._measure_idle(self._clock())))

    def _measure_idle(self, now: float) -> tuple[tuple[int, float], ...]:
        """How long each worker has used no CPU time, if membership needs it. Measured once a second, or more often if it must."""
        if not is_watching(self._state) or now - self._idle_at < min(1.0, self._settings.policy.hang_timeout_s / 10):
            return ()
        self._idle_at = now
        return tuple(self._machines.idle_s(now).items())

    # -- what happens ----------------------------------------------------------------------------

    def on_packet(self, worker: int, packet: packets.Packet) -> None:
        self._observer.heard(worker)
        if packet.get("type") == "store":
            if not self._store.handle(worker, packet):
                self._record("unknown packet", worker=worker, type="store")
            return
        if packet.get("type") == "steps":
            self._observer.on_steps(worker, packet)
            return
        progress, event = progress_of(packet), event_of(worker, self._machines.pid(worker), packet)
        if progress is not None:
            self._observer.on_progress(progress, self._state)
            self.decide(events.Committed(worker, progress.step))
            return
        if event is None:
            self._on_status(worker, packet)
            return
        if isinstance(event, events.LeaveRequested) and self._shutdown.signal is not None:
            return  # all workers leave
        if isinstance(event, events.PeersLost | events.ScriptRaised):
            self._machines.reap()  # if the lost worker has ended, that is the cause and must be decided first
        if isinstance(event, events.JoinRequested) and "gpu" in packet:  # a newcomer says it once, and then asks at each loop
            device, room = self._machines.device(worker, event.device)
            event = dataclasses.replace(event, device=device, device_room=room)
        if isinstance(event, events.ScriptRaised):
            self._on_script_raised(event, packet)
        if isinstance(event, events.ScriptFinished):
            self._exit_status.worker_finished(worker)
            if worker in self._ranks:
                self.finished[self._ranks[worker]] = worker
        self.decide(event)

    def _on_status(self, worker: int, packet: packets.Packet) -> None:
        """A packet that changes no membership: a result for newcomers, a checkpoint was saved, or the workers have stopped."""
        kind, step = packet.get("type"), packet.get("step")
        if kind == "recorded":
            self._machines.keep(packet)
            for id in self._results.record(packet):
                self.decide(events.LeaveRequested(id, cannot_join=True))
        elif kind == "recall":
            if not self._results.recall(worker, packet):
                self.decide(events.LeaveRequested(worker, cannot_join=True))
        elif kind == "epoch":
            self._machines.keep(packet)
            self._results.begin_epoch(packet)
        elif kind == "latest epoch":
            self._results.latest_epoch(worker, packet)
        elif kind == "saved" and isinstance(step, int):
            path = str(packet.get("where"))
            self._exit_status.checkpoint_saved(step, path)
            self._record("saved", step=step, where=path)
        elif kind == "stopped" and isinstance(step, int):
            self._exit_status.workers_stopped(step)
        else:
            self._record("unknown packet", worker=worker, type=kind if isinstance(kind, str) else "")

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        if self._ranks.get(worker) == 0:
            self._console.write_output(stream, data)

    def on_exit(self, worker: int, pid: int, status: int, last_lines: str) -> None:
        self._store.forget(worker)
        self._results.forget(worker)
        self._observer.forget(worker)
        code, how = (status, f"exit code {status}") if status >= 0 else (128 - status, _signal_name(-status))
        self._record("exited", worker=worker, pid=pid, how=how)
        has_reported = self._exit_status.has_reported(worker)
        if is_needed(self._state, worker):
            self._exit_status.worker_exited(worker, code)
        if code != 0 and not has_reported:
            error = f"exited with code {status}" if status >= 0 else f"killed by {how}"
            failure = replace(self._failure(worker, pid, error, traceback=last_lines), is_crash=True)
            self._note_failure(code, failure, show=not self._is_stopping)
        if code == 0 and not has_reported and self._state.generation < 0:
            self.decide(events.ScriptFinished(worker))  # os._exit(0), and no other worker depends on this one
        self.decide(events.Died(worker, how, exited=status >= 0, pid=pid))

    def on_machine_lost(self, workers: tuple[int, ...], room: int, how: str) -> None:
        """A machine is lost with these workers, or leaves. It could have started ``room`` workers."""
        for id in workers:
            self._observer.forget(id)
        self.decide(events.MachineLost(workers, room, how))

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        """SIGSTOP has stopped the worker (None), or it has continued after so long. 0: the stop was too short to be seen."""
        self._observer.on_stopped(worker, seconds)

    def on_zygote_hung(self, why: str) -> None:
        self._console.say(why)
        self._record("zygote hung", why=why)

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        self._console.say(why)
        self._record("not started", workers=workers, why=why)
        for id in workers:
            if not is_fatal:
                self.decide(events.Died(id, "could not be started"))
        if is_fatal:
            self._end(self._shutdown.end or events.End(1, "no worker could be started"))

    def _on_script_raised(self, event: events.ScriptRaised, packet: packets.Packet) -> None:
        worker, trace, code = event.worker, packet.get("traceback"), packet.get("code")
        trace = trace if isinstance(trace, str) else ""
        failure = self._failure(worker, self._machines.pid(worker), event.error, event.step, trace)
        where, source = (text if isinstance(text := packet.get(key), str) else "" for key in ("where", "source"))
        failure = replace(failure, where=where, source=source, place=event.place)
        show = self._shutdown.signal is None and not self._state.restarting
        self._note_failure(code if isinstance(code, int) else 1, failure, show=show)

    def _note_failure(self, code: int, failure: Failure, *, show: bool) -> None:
        if is_needed(self._state, failure.worker):
            self._exit_status.worker_failed(code, failure, show=show)
        else:
            self._exit_status.spare_failed(failure, show=show)

    def on_signal(self, number: int) -> None:
        """This process got a signal by which people end programs."""
        self._record("signal", signal=number)
        if number == signal.SIGINT and self._machines.holds_terminal:
            return  # Ctrl-C belongs to the debugger, which gets it from the terminal
        self._pending_spawns = []
        self._shutdown.on_signal(number, self._state.members, time.monotonic())

    # -- requests (control_requests.py) ----------------------------------------------------------

    @property
    def room(self) -> int | None:
        return self._machines.room

    def status(self, request: packets.Packet) -> packets.Packet:
        return self._observer.answer(self._state, self._ranks, request, is_ending=self._shutdown.has_begun)

    def scale(self, size: int) -> str:
        self._machines.keep({"type": "wanted", "size": size})
        return self.decide(events.ScaleRequested(size))

    def stop(self, *, kill: bool) -> float:
        """Do what SIGTERM to this process does. ``kill``: do not wait until the workers have saved."""
        self._record("stop requested", kill=kill)
        if not self._shutdown.has_begun:
            self.on_signal(signal.SIGTERM)
        if kill:
            self._machines.kill_all()
        return self._settings.grace_s

    # -- decisions, and their actions -------------------------------------------------------------

    def decide(self, event: events.Event) -> str:
        """Let membership decide about an event, and perform what it decides. Returns the reason."""
        self._state, actions, why = decide(self._state, event, self._clock())
        if actions or not isinstance(event, events.Tick | events.Committed):
            shown = [{type(action).__name__: dataclasses.asdict(action)} for action in actions]
            self._record("event", event={type(event).__name__: dataclasses.asdict(event)}, actions=shown, why=why)
        self._perform(actions)
        return why

    def _perform(self, actions: tuple[events.Action, ...]) -> None:
        for action in actions:
            match action:
                case events.Report():
                    if not self._shutdown.has_begun:
                        self._console.show_event(f"{action.text.rstrip('.')}.")
                case events.Form():
                    self._form(action)
                case events.Prepare():
                    self._machines.send((action.worker,), {"type": "prepare", "size": action.size})
                case events.SkipLoop():
                    self._machines.send((action.worker,), {"type": "pass", "stage": action.stage})
                case events.Abort():
                    self._machines.send(action.workers, {"type": "abort", "generation": action.generation, "why": action.why})
                case events.Change():
                    self._machines.send(action.workers, {"type": "change", "generation": action.generation})
                case events.PostponeTimeouts():
                    self._machines.send(action.workers, {"type": "alone", "worker": action.alone, "for_s": action.for_s})
                case events.Stop():
                    self._machines.send(action.workers, {"type": "stop"})
                case events.Spawn():
                    if not self._shutdown.has_begun:
                        self._pending_spawns.append((time.monotonic() + action.delay_s, action))
                case events.StopAll():
                    for id in action.workers:
                        self._machines.stop(id, self._settings.grace_s)
                case events.StartAgain():
                    self._start_again()
                case events.Kill():
                    self._kill(action)
                case events.Dismiss():
                    self._machines.send((action.worker,), {"type": "dismiss", "why": action.why})
                case events.End():
                    self._end(action)

    def _adopt(self, decision: Decision) -> None:
        self._state, actions, _ = decision
        self._perform(actions)

    def _send_to_one(self, worker: int, packet: packets.Packet) -> None:
        self._machines.send((worker,), packet)

    def _kill(self, action: events.Kill) -> None:
        """Kill a worker that hangs. It first writes its stack, if it still can."""
        where = self._machines.stack(action.worker)
        name, why = self._name(action.worker), action.why.rstrip(".")
        self._console.show_event(f"{name} hangs and is killed: {why}. Its stack is in {where}")
        self._machines.kill_hung(action.worker)

    def _start_again(self) -> None:
        """All workers are gone. Those that are started in their place must not meet what the others have left."""
        self._exit_status.workers_restart()
        self._machines.forget_workers()
        self._store.begin(self._state.generation)
        self._ranks, self.finished = {}, {}

    def _form(self, action: events.Form) -> None:
        self._ranks, self.finished = {id: rank for rank, id in enumerate(action.members)}, {}
        self._exit_status.generation_formed(action.members)
        if action.number == 0:
            self._console.show_status(f"{plural(len(action.members), 'worker')}, before the first step")
        self._store.begin(action.number)
        for id in action.members:
            self._results.forget(id)
        self._machines.send(action.members, {"type": "generation", "number": action.number, "members": action.members})

    def _spawn(self, action: events.Spawn) -> None:
        ids = action.workers
        if self._state.restarting:
            for id in ids:
                self.decide(events.Died(id, "was not started"))
            return
        given, policy = self._settings, self._settings.policy
        restarts = self._state.restarts, policy.max_restarts
        size = self._state.size if self._state.restarts else given.size  # a machine may be lost since the workers began
        settings = RunSettings(size, given.ledger, policy.hang_timeout_s, *restarts, given.debug_rank, given.threads)
        ranks = self._machines.spawn(ids, settings, are_spares=action.are_spares)
        self._record("started", ranks=ranks, are_spares=action.are_spares)
        if self._state.generation < 0:
            self._ranks.update(ranks)
        for id in ids:
            if id not in ranks:
                self.decide(events.Died(id, "there was no room for it"))

    def _end(self, end: events.End) -> None:
        self._pending_spawns = []
        self._shutdown.on_end(end, time.monotonic())

    @property
    def _is_stopping(self) -> bool:
        """Whether workers are being stopped, so that how they end says nothing."""
        return self._shutdown.has_begun or self._state.restarting

    def _name(self, id: int) -> str:
        return worker_name(id, self._ranks.get(id), self._machines.pid(id))

    def _failure(self, worker: int, pid: int | None, error: str, step: int = -1, traceback: str = "") -> Failure:
        name = worker_name(worker, self._ranks.get(worker), pid)
        return Failure(worker, name, error, self._machines.log(worker), step, traceback, self._machines.host(worker))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
