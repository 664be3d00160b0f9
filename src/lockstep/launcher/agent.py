"""Agent: turns what happens to the workers of one machine into events, and performs what plan/membership.py decides.

One loop, no threads, no torch. Nothing in the loop blocks: a decision about a dead worker must not wait for a full pipe.
"""

from __future__ import annotations

import dataclasses
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.launcher import packets
from lockstep.launcher.console import Console, Failure, worker_name
from lockstep.launcher.control_socket import ControlSocket
from lockstep.launcher.environment import RunSettings, threads_per_worker, worker_environment
from lockstep.launcher.exit_status import ExitStatus
from lockstep.launcher.idle_times import IdleTimes
from lockstep.launcher.key_value_store import KeyValueStore
from lockstep.launcher.local_ranks import LocalRanks
from lockstep.launcher.logs import Logs
from lockstep.launcher.master_port import MasterPort
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.own_clock import OwnClock
from lockstep.launcher.recorded_results import RecordedResults
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.shutdown import Shutdown
from lockstep.launcher.standard_input import StandardInput
from lockstep.launcher.worker import STACK_SIGNAL, WorkerSpec
from lockstep.launcher.worker_messages import event_of, progress_of
from lockstep.launcher.worker_processes import WorkerProcesses
from lockstep.launcher.zygote_start import ZygoteStart
from lockstep.plan import membership_events as events
from lockstep.plan.membership import begin, decide
from lockstep.plan.membership_hangs import is_watching
from lockstep.plan.membership_state import Policy

_TICK_S = 0.1
_STACK_S = 0.2
"""A worker that is to be killed has this long to write its stack."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Settings:
    """The options of `lockstep run`. ``size``: how many workers to start. ``grace_s``: how long they may take to stop.

    ``debug_rank``: the worker that gets the terminal; None: no worker does. ``threads``: of each worker; None: what the user has
    set, or an equal share of the cores.
    """

    size: int
    preload: tuple[str, ...] = ()
    grace_s: float = 10.0
    policy: Policy = dataclasses.field(default_factory=Policy)
    ledger: bool = False
    debug_rank: int | None = None
    threads: int | None = None


class Agent:
    """Runs a script or function on ``settings.size`` workers. Call ``run`` once, in the main thread.

    ``zygote_start``: how the process is started that forks the workers, which knows what they execute.
    """

    def __init__(self, settings: Settings, zygote_start: ZygoteStart, run_folder: RunFolder) -> None:
        self._settings, self._run_folder = settings, run_folder
        self._selector = selectors.DefaultSelector()
        self._output = NonblockingOutput()
        self._console = Console(self._output, shows_progress=settings.debug_rank is None)
        self._logs = Logs(run_folder, self._console)
        self._stdin = StandardInput(self._selector)
        self._workers = WorkerProcesses(self._selector, self, self._stdin, run_folder.path / "zygote.txt", zygote_start)
        self._control_socket = ControlSocket(run_folder.address, self._selector, self._answer)
        self._shutdown = Shutdown(self._workers, self._console, settings.grace_s, self._name)
        self._exit_status = ExitStatus(self._console, run_folder.path)
        self._store = KeyValueStore(self._workers.send)
        self._results = RecordedResults(self._workers.send, self._console.say)
        self._idle_times = IdleTimes()
        self._idle_at = 0.0
        self._run_folder_error_shown = False
        self._clock = OwnClock()
        self._state, self._first_actions, _ = begin(settings.size, settings.policy)
        self._ranks: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        """Rank -> the worker that had this rank when its script reached the end."""
        self._local_ranks = LocalRanks()
        self._master_port = MasterPort()
        self._pending_spawns: list[tuple[float, tuple[int, ...]]] = []  # (when, workers)
        self._pending_kills: dict[int, float] = {}  # worker -> when; infinity: it was killed

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> int:
        """Block until the run is over and every process is gone; returns the exit code."""
        wakeup, signals = socket.socketpair()
        wakeup.setblocking(False)
        signals.setblocking(False)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the number arrives at the wakeup socket
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._on_signals(wakeup.recv(4096)))
        try:
            self._run_folder.record("begin", settings=dataclasses.asdict(self._settings), pid=os.getpid())
            self._workers.start_zygote()
            self._perform(self._first_actions)
            while not self._shutdown.has_begun or self._workers.ids:
                timeout_s = self._select_timeout_s()
                ready = self._selector.select(timeout_s)
                self._clock.advance(timeout_s)
                for key, _ in ready:
                    key.data()
                self._on_time(time.monotonic())
            if self._shutdown.signal is not None:
                code, why = self._exit_status.after_signal(self._shutdown.signal)
            else:
                assert self._shutdown.end is not None
                code, why = self._exit_status.after_end(self._shutdown.end)
            self._run_folder.record("end", code=code, why=why)
            return code
        finally:
            self._workers.close()
            self._stdin.close()
            self._control_socket.close()
            self._master_port.close()
            self._console.close()
            self._logs.close_all()
            signal.set_wakeup_fd(-1)
            self._run_folder.close()

    @property
    def cause(self) -> Failure | None:
        """The failure that ended the run; None if there was none."""
        return self._exit_status.cause

    def _select_timeout_s(self) -> float:
        now = time.monotonic()
        due = [now + _TICK_S, self._shutdown.next_at, *(when for when, _ in self._pending_spawns), *self._pending_kills.values()]
        return max(0.0, min(due) - now)

    def _on_time(self, now: float) -> None:
        self._output.flush()
        self._stdin.on_time()
        if self._run_folder.error is not None and not self._run_folder_error_shown:
            self._run_folder_error_shown = True
            path, why = self._run_folder.path / "events.jsonl", self._run_folder.error.strerror
            self._console.say(f"{path} cannot be written ({why}). Events are lost until it can. Training continues.")
        self._console.redraw(now)
        self._shutdown.on_time(now)
        for id in [id for id, when in self._pending_kills.items() if when <= now and self._workers.pid(id) is not None]:
            self._pending_kills[id] = math.inf
            self._workers.signal(id, signal.SIGKILL)
        due = [entry for entry in self._pending_spawns if entry[0] <= now]
        self._pending_spawns = [entry for entry in self._pending_spawns if entry not in due]
        for _, ids in due:
            self._spawn(ids)
        self._workers.kill_hung_zygote(self._clock.now(), self._settings.policy.hang_timeout_s)
        self._decide(events.Tick(self._measure_idle(self._clock.now())))

    def _measure_idle(self, now: float) -> tuple[tuple[int, float], ...]:
        """How long each worker has used no CPU time, if membership needs it. Measured once a second, or more often if it must."""
        if not is_watching(self._state) or now - self._idle_at < min(1.0, self._settings.policy.hang_timeout_s / 10):
            return ()
        self._idle_at = now
        return tuple(self._idle_times.measure(self._workers.pids, now).items())

    # -- what happens ----------------------------------------------------------------------------

    def on_packet(self, worker: int, packet: packets.Packet) -> None:
        if packet.get("type") == "store":
            if not self._store.handle(worker, packet):
                self._run_folder.record("unknown packet", worker=worker, type="store")
            return
        progress, event = progress_of(packet), event_of(worker, self._workers.pid(worker), packet)
        if progress is not None:
            generation = self._state.generation if self._state.generation >= 0 else None
            workers = len(self._state.members) or len(self._workers.ids)
            self._console.show_progress(dataclasses.replace(progress, workers=workers, generation=generation), time.monotonic())
            self._decide(events.Committed(worker, progress.step))
            return
        if event is None:
            self._on_status(worker, packet)
            return
        if isinstance(event, events.LeaveRequested) and self._shutdown.signal is not None:
            return  # all workers leave
        if isinstance(event, events.PeersLost | events.ScriptRaised):
            self._workers.reap()  # if the lost worker has ended, that is the cause and must be decided first
        if isinstance(event, events.ScriptRaised):
            self._on_script_raised(event, packet)
        if isinstance(event, events.ScriptFinished):
            self._exit_status.worker_finished(worker)
            if worker in self._ranks:
                self.finished[self._ranks[worker]] = worker
        self._decide(event)

    def _on_status(self, worker: int, packet: packets.Packet) -> None:
        """A packet that changes no membership: a result for newcomers, a checkpoint was saved, or the workers have stopped."""
        kind, step = packet.get("type"), packet.get("step")
        if kind == "recorded":
            for id in self._results.record(packet):
                self._decide(events.LeaveRequested(id))
        elif kind == "recall":
            if not self._results.recall(worker, packet):
                self._decide(events.LeaveRequested(worker))
        elif kind == "epoch":
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
        self._logs.write(worker, stream, data)
        if self._ranks.get(worker) == 0:
            self._console.write_output(stream, data)

    def on_exit(self, worker: int, pid: int, status: int) -> None:
        self._store.forget(worker)
        self._results.forget(worker)
        self._local_ranks.release(worker)
        self._pending_kills.pop(worker, None)
        code, how = (status, f"exit code {status}") if status >= 0 else (128 - status, _signal_name(-status))
        self._run_folder.record("exited", worker=worker, pid=pid, how=how)
        has_reported = self._exit_status.has_reported(worker)
        self._exit_status.worker_exited(worker, code)
        if code != 0 and not has_reported:
            error = f"exited with code {status}" if status >= 0 else f"killed by {how}"
            failure = self._failure(worker, pid, error, traceback=self._logs.tail(worker))
            self._exit_status.worker_failed(code, failure, show=not self._is_stopping)
        if code == 0 and not has_reported and self._state.generation < 0:
            self._decide(events.ScriptFinished(worker))  # os._exit(0), and no other worker depends on this one
        self._decide(events.Died(worker, how, exited=status >= 0))
        self._logs.close(worker)

    def on_zygote_hung(self, why: str) -> None:
        self._console.say(why)
        self._run_folder.record("zygote hung", why=why)

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        self._console.say(why)
        self._run_folder.record("not started", workers=workers, why=why)
        for id in workers:
            self._logs.close(id)
            self._local_ranks.release(id)
            self._pending_kills.pop(id, None)
            if not is_fatal:
                self._decide(events.Died(id, "could not be started"))
        if is_fatal:
            self._end(self._shutdown.end or events.End(1, "no worker could be started"))

    def _on_script_raised(self, event: events.ScriptRaised, packet: packets.Packet) -> None:
        worker, trace, code = event.worker, packet.get("traceback"), packet.get("code")
        trace = trace if isinstance(trace, str) else ""
        self._logs.write(worker, 2, trace.encode(errors="replace"))
        failure = self._failure(worker, self._workers.pid(worker), event.error, event.step, trace)
        show = self._shutdown.signal is None and not self._state.restarting
        self._exit_status.worker_failed(code if isinstance(code, int) else 1, failure, show=show)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._workers.reap()
            elif number == signal.SIGINT and self._is_debugging_on_terminal:
                self._run_folder.record("signal", signal=number)  # Ctrl-C belongs to the debugger, which gets it from the terminal
            elif number in _STOP_SIGNALS:
                self._run_folder.record("signal", signal=number)
                self._pending_spawns = []
                self._shutdown.on_signal(number, self._state.members, time.monotonic())

    def _answer(self, request: packets.Packet) -> packets.Packet:
        """A request from the control socket: `lockstep scale`."""
        size = request.get("size")
        if request.get("type") != "scale" or not isinstance(size, int) or size < 1:
            return {"ok": False, "error": "the agent knows one request: {'type': 'scale', 'size': N}, with N at least 1"}
        if self._shutdown.has_begun:
            return {"ok": False, "error": "the run is ending"}
        return {"ok": True, "value": self._decide(events.ScaleRequested(size))}

    # -- decisions, and their actions -------------------------------------------------------------

    def _decide(self, event: events.Event) -> str:
        self._state, actions, why = decide(self._state, event, self._clock.now())
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
                    self._send((action.worker,), {"type": "prepare", "size": action.size})
                case events.SkipLoop():
                    self._send((action.worker,), {"type": "pass", "stage": action.stage})
                case events.Abort():
                    self._send(action.workers, {"type": "abort", "generation": action.generation, "why": action.why})
                case events.Change():
                    self._send(action.workers, {"type": "change", "generation": action.generation})
                case events.PostponeTimeouts():
                    self._send(action.workers, {"type": "alone", "worker": action.alone, "for_s": action.for_s})
                case events.Stop():
                    self._send(action.workers, {"type": "stop"})
                case events.Spawn():
                    if not self._shutdown.has_begun:
                        self._pending_spawns.append((time.monotonic() + action.delay_s, action.workers))
                case events.StopAll():
                    self._stop_all(action)
                case events.StartAgain():
                    self._start_again()
                case events.Kill():
                    self._kill(action)
                case events.Dismiss():
                    self._send((action.worker,), {"type": "dismiss", "why": action.why})
                case events.End():
                    self._end(action)

    def _send(self, workers: Sequence[int], packet: packets.Packet) -> None:
        for id in workers:
            self._workers.send(id, packet)

    def _kill(self, action: events.Kill) -> None:
        """Kill a worker that hangs. It first writes its stack, if it still can."""
        if action.worker not in self._pending_kills:
            path = self._run_folder.stack(action.worker)
            self._console.say(f"{self._name(action.worker)} hangs and is killed: {action.why.rstrip('.')}. Its stack is in {path}")
            self._pending_kills[action.worker] = time.monotonic() + _STACK_S
            self._workers.signal(action.worker, STACK_SIGNAL)

    def _stop_all(self, action: events.StopAll) -> None:
        """Stop the workers that are left, because one has failed: SIGTERM now, SIGKILL after the grace."""
        for id in action.workers:
            is_started = self._workers.pid(id) is not None  # if not, it is killed as soon as it has a process
            self._pending_kills[id] = time.monotonic() + (self._settings.grace_s if is_started else 0.0)
            self._workers.signal(id, signal.SIGTERM)

    def _start_again(self) -> None:
        """All workers are gone. Those that are started in their place must not meet what the others have left."""
        self._exit_status.workers_restart()
        self._run_folder.remove_store()
        self._master_port.close()
        self._master_port = MasterPort()
        self._ranks, self.finished = {}, {}

    def _form(self, action: events.Form) -> None:
        self._ranks, self.finished = {id: rank for rank, id in enumerate(action.members)}, {}
        self._exit_status.generation_formed(action.members)
        self._store.begin(action.number)
        for id in action.members:
            self._results.forget(id)
        self._send(action.members, {"type": "generation", "number": action.number, "members": action.members})

    def _spawn(self, ids: Sequence[int]) -> None:
        if self._state.restarting:
            for id in ids:
                self._decide(events.Died(id, "was not started"))
            return
        given, policy = self._settings, self._settings.policy
        threads = given.threads or threads_per_worker(given.size, os.environ)
        settings = RunSettings(
            given.size,
            given.ledger,
            policy.hang_timeout_s,
            self._master_port.number,
            self._state.restarts,
            policy.max_restarts,
            given.debug_rank,
        )
        specs = []
        for id, local_rank in self._local_ranks.assign(ids).items():
            self._logs.open(id)
            if self._state.generation < 0:
                self._ranks[id] = local_rank
            env = worker_environment(id, local_rank, settings, self._run_folder, threads, os.environ)
            specs.append(WorkerSpec(id, env, threads, given.size == 1, local_rank == given.debug_rank))
        self._workers.spawn(specs)

    def _end(self, end: events.End) -> None:
        self._pending_spawns = []
        self._shutdown.on_end(end, time.monotonic())

    @property
    def _is_debugging_on_terminal(self) -> bool:
        """Whether a worker shares the process group of the agent, and gets Ctrl-C as the agent does."""
        rank = self._settings.debug_rank
        return rank is not None and self._local_ranks.has(rank) and os.isatty(0)

    @property
    def _is_stopping(self) -> bool:
        """Whether workers are being stopped, so that how they end says nothing."""
        return self._shutdown.has_begun or self._state.restarting

    def _name(self, id: int) -> str:
        return worker_name(id, self._ranks.get(id), self._workers.pid(id))

    def _failure(self, worker: int, pid: int | None, error: str, step: int = -1, traceback: str = "") -> Failure:
        name = worker_name(worker, self._ranks.get(worker), pid)
        return Failure(worker, name, error, str(self._run_folder.log(worker)), step, traceback)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
