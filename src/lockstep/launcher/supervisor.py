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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.launcher import packets
from lockstep.launcher.console import Console, Failure, worker_name
from lockstep.launcher.control_socket import ControlSocket
from lockstep.launcher.environment import RunSettings
from lockstep.launcher.exit_status import ExitStatus
from lockstep.launcher.key_value_store import KeyValueStore
from lockstep.launcher.local_machine import Machines
from lockstep.launcher.recorded_results import RecordedResults
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.shutdown import Shutdown
from lockstep.launcher.worker_messages import event_of, progress_of
from lockstep.plan import membership_events as events
from lockstep.plan.membership import begin, decide
from lockstep.plan.membership_generation import Decision
from lockstep.plan.membership_hangs import is_watching
from lockstep.plan.membership_state import Policy, State


@dataclass(frozen=True)
class Settings:
    """The options of `lockstep run`. ``size``: how many workers to start. ``grace_s``: how long they may take to stop.

    ``debug_rank``: the worker that gets the terminal; None: no worker does. ``threads``: of each worker; None: what the user has
    set, or an equal share of the cores.
    """

    size: int
    grace_s: float = 10.0
    policy: Policy = dataclasses.field(default_factory=Policy)
    ledger: bool = False
    debug_rank: int | None = None
    threads: int | None = None


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
        self._control_socket = ControlSocket(run_folder.address, selector, self._answer)
        self._shutdown = Shutdown(machines, console, settings.grace_s, self._name)
        self._exit_status = ExitStatus(console, run_folder.path)
        self._store = KeyValueStore(self._send_to_one)
        self._results = RecordedResults(self._send_to_one, console.say)
        self._idle_at = 0.0
        self._run_folder_error_shown = False
        self._state = State(settings.size, settings.policy)
        self._ranks: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        """Rank -> the worker that had this rank when its script reached the end."""
        self._pending_spawns: list[tuple[float, tuple[int, ...]]] = []  # (when, workers)

    def start(self) -> None:
        """Start the workers."""
        self._run_folder.record("begin", settings=dataclasses.asdict(self._settings), pid=os.getpid())
        self._adopt(begin(self._settings.size, self._settings.policy, self._machines.room or 0))

    def resume(self, decision: Decision) -> None:
        """Continue a run that another process has supervised. ``decision``: its state, and what to do first."""
        state = decision[0]
        self._run_folder.record("continue", generation=state.generation, workers=[worker.id for worker in state.workers])
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
        """The run is over: show the last message; returns the exit code."""
        if self._shutdown.signal is not None:
            code, why = self._exit_status.after_signal(self._shutdown.signal)
        else:
            assert self._shutdown.end is not None
            code, why = self._exit_status.after_end(self._shutdown.end)
        self._run_folder.record("end", code=code, why=why, stopped_after=self._exit_status.stopped_after)
        return code

    def close(self) -> None:
        self._control_socket.close()
        self._run_folder.remove_socket()

    def on_time(self, now: float) -> None:
        if self._run_folder.error is not None and not self._run_folder_error_shown:
            self._run_folder_error_shown = True
            path, why = self._run_folder.path / "events.jsonl", self._run_folder.error.strerror
            self._console.say(f"{path} cannot be written ({why}). Events are lost until it can. Training continues.")
        self._console.redraw(now)
        self._shutdown.on_time(now)
        due = [entry for entry in self._pending_spawns if entry[0] <= now]
        self._pending_spawns = [entry for entry in self._pending_spawns if entry not in due]
        for _, ids in due:
            self._spawn(ids)
        self.decide(events.Tick(self._measure_idle(self._clock())))

    def _measure_idle(self, now: float) -> tuple[tuple[int, float], ...]:
        """How long each worker has used no CPU time, if membership needs it. Measured once a second, or more often if it must."""
        if not is_watching(self._state) or now - self._idle_at < min(1.0, self._settings.policy.hang_timeout_s / 10):
            return ()
        self._idle_at = now
        return tuple(self._machines.idle_s(now).items())

    # -- what happens ----------------------------------------------------------------------------

    def on_packet(self, worker: int, packet: packets.Packet) -> None:
        if packet.get("type") == "store":
            if not self._store.handle(worker, packet):
                self._run_folder.record("unknown packet", worker=worker, type="store")
            return
        progress, event = progress_of(packet), event_of(worker, self._machines.pid(worker), packet)
        if progress is not None:
            generation = self._state.generation if self._state.generation >= 0 else None
            workers = len(self._state.members) or len(self._machines.ids)
            self._console.show_progress(dataclasses.replace(progress, workers=workers, generation=generation), time.monotonic())
            self.decide(events.Committed(worker, progress.step))
            return
        if event is None:
            self._on_status(worker, packet)
            return
        if isinstance(event, events.LeaveRequested) and self._shutdown.signal is not None:
            return  # all workers leave
        if isinstance(event, events.PeersLost | events.ScriptRaised):
            self._machines.reap()  # if the lost worker has ended, that is the cause and must be decided first
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
                self.decide(events.LeaveRequested(id))
        elif kind == "recall":
            if not self._results.recall(worker, packet):
                self.decide(events.LeaveRequested(worker))
        elif kind == "epoch":
            self._machines.keep(packet)
            self._results.begin_epoch(packet)
        elif kind == "latest epoch":
            self._results.latest_epoch(worker, packet)
        elif kind == "saved" and isinstance(step, int):
            path = str(packet.get("where"))
            self._exit_status.checkpoint_saved(step, path)
            self._run_folder.record("saved", step=step, where=path)
        elif kind == "stopped" and isinstance(step, int):
            self._exit_status.workers_stopped(step)
        else:
            self._run_folder.record("unknown packet", worker=worker, type=kind if isinstance(kind, str) else "")

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        if self._ranks.get(worker) == 0:
            self._console.write_output(stream, data)

    def on_exit(self, worker: int, pid: int, status: int, last_lines: str) -> None:
        self._store.forget(worker)
        self._results.forget(worker)
        code, how = (status, f"exit code {status}") if status >= 0 else (128 - status, _signal_name(-status))
        self._run_folder.record("exited", worker=worker, pid=pid, how=how)
        has_reported = self._exit_status.has_reported(worker)
        self._exit_status.worker_exited(worker, code)
        if code != 0 and not has_reported:
            error = f"exited with code {status}" if status >= 0 else f"killed by {how}"
            failure = self._failure(worker, pid, error, traceback=last_lines)
            self._exit_status.worker_failed(code, failure, show=not self._is_stopping)
        if code == 0 and not has_reported and self._state.generation < 0:
            self.decide(events.ScriptFinished(worker))  # os._exit(0), and no other worker depends on this one
        self.decide(events.Died(worker, how, exited=status >= 0))

    def on_zygote_hung(self, why: str) -> None:
        self._console.say(why)
        self._run_folder.record("zygote hung", why=why)

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        self._console.say(why)
        self._run_folder.record("not started", workers=workers, why=why)
        for id in workers:
            if not is_fatal:
                self.decide(events.Died(id, "could not be started"))
        if is_fatal:
            self._end(self._shutdown.end or events.End(1, "no worker could be started"))

    def _on_script_raised(self, event: events.ScriptRaised, packet: packets.Packet) -> None:
        worker, trace, code = event.worker, packet.get("traceback"), packet.get("code")
        trace = trace if isinstance(trace, str) else ""
        failure = self._failure(worker, self._machines.pid(worker), event.error, event.step, trace)
        show = self._shutdown.signal is None and not self._state.restarting
        self._exit_status.worker_failed(code if isinstance(code, int) else 1, failure, show=show)

    def on_signal(self, number: int) -> None:
        """This process got a signal by which people end programs."""
        self._run_folder.record("signal", signal=number)
        if number == signal.SIGINT and self._machines.holds_terminal:
            return  # Ctrl-C belongs to the debugger, which gets it from the terminal
        self._pending_spawns = []
        self._shutdown.on_signal(number, self._state.members, time.monotonic())

    def _answer(self, request: packets.Packet) -> packets.Packet:
        """A request from the control socket: `lockstep scale`."""
        size = request.get("size")
        if request.get("type") != "scale" or not isinstance(size, int) or size < 1:
            return {"ok": False, "error": "the agent knows one request: {'type': 'scale', 'size': N}, with N at least 1"}
        if self._shutdown.has_begun:
            return {"ok": False, "error": "the run is ending"}
        room = self._machines.room
        if room is not None and size > room:
            error = f"the machines of the run have room for {room} workers. Start `lockstep agent` on another machine to add more"
            return {"ok": False, "error": error}
        self._machines.keep({"type": "wanted", "size": size})
        return {"ok": True, "value": self.decide(events.ScaleRequested(size))}

    # -- decisions, and their actions -------------------------------------------------------------

    def decide(self, event: events.Event) -> str:
        """Let membership decide about an event, and perform what it decides. Returns the reason."""
        self._state, actions, why = decide(self._state, event, self._clock())
        if actions or not isinstance(event, events.Tick | events.Committed):
            shown = [{type(action).__name__: dataclasses.asdict(action)} for action in actions]
            self._run_folder.record("event", event={type(event).__name__: dataclasses.asdict(event)}, actions=shown, why=why)
        self._perform(actions)
        return why

    def _perform(self, actions: tuple[events.Action, ...]) -> None:
        for action in actions:
            match action:
                case events.Report():
                    if not self._shutdown.has_begun:
                        self._console.say(action.text)
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
                        self._pending_spawns.append((time.monotonic() + action.delay_s, action.workers))
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
        self._console.say(f"{self._name(action.worker)} hangs and is killed: {action.why.rstrip('.')}. Its stack is in {where}")
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
        self._store.begin(action.number)
        for id in action.members:
            self._results.forget(id)
        self._machines.send(action.members, {"type": "generation", "number": action.number, "members": action.members})

    def _spawn(self, ids: Sequence[int]) -> None:
        if self._state.restarting:
            for id in ids:
                self.decide(events.Died(id, "was not started"))
            return
        given, policy = self._settings, self._settings.policy
        restarts = self._state.restarts, policy.max_restarts
        size = self._state.size if self._state.restarts else given.size  # a machine may be lost since the workers began
        settings = RunSettings(size, given.ledger, policy.hang_timeout_s, *restarts, given.debug_rank, given.threads)
        ranks = self._machines.spawn(ids, settings)
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
