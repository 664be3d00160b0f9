"""Agent: turns what happens to the workers of one machine into events, and performs what plan/membership decides. Knows no torch.

One loop, no threads. Nothing in it blocks: a decision about a dead worker must not wait for a full pipe.
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

from lockstep.launch import packets
from lockstep.launch.console import Console, Failure, first_line, progress_of
from lockstep.launch.control_socket import ControlSocket
from lockstep.launch.environment import threads_of, worker_environment
from lockstep.launch.exit_status import ExitStatus
from lockstep.launch.logs import Logs
from lockstep.launch.nonblocking_output import NonblockingOutput
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.worker import STACK_SIGNAL, Job
from lockstep.launch.worker_processes import Wanted, WorkerProcesses
from lockstep.plan import membership as plan

_TICK_S = 0.1
_LAST_WORDS_S = 0.5
"""When a run ends because one worker failed, so long the others may say how they fare before they are told to stop."""
_STACK_S = 0.2
"""So long a worker that is to be killed may write down its stack."""
_STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True)
class Settings:
    size: int
    preload: tuple[str, ...] = ()
    grace_s: float = 10.0
    policy: plan.Policy = dataclasses.field(default_factory=plan.Policy)
    ledger: bool = False


class Agent:
    """``run`` blocks until the run is over and every process is gone; it returns the exit code."""

    def __init__(self, settings: Settings, job: Job, run_dir: RunFolder) -> None:
        self._settings, self._job, self._run_dir = settings, job, run_dir
        self._selector = selectors.DefaultSelector()
        self._outlet = NonblockingOutput()
        self._console = Console(self._outlet)
        self._logs = Logs(run_dir, self._console)
        self._fleet = WorkerProcesses(self._selector, self, run_dir.path / "zygote.txt")
        self._door = ControlSocket(run_dir.address, self._selector, self._asked)
        self._state, self._first_actions, _ = plan.begin(settings.size, settings.policy)
        self._ranks: dict[int, int] = {id: id for id in range(settings.size)}
        self._took_part: set[int] = set()
        self._later: list[tuple[float, tuple[int, ...]]] = []  # (when, workers) to spawn
        self._kills: dict[int, float] = {}  # worker -> when
        self._verdict = ExitStatus(self._console)
        self._end: plan.End | None = None
        self._stopped_by: int | None = None
        self._saved: tuple[int, str] | None = None  # the newest checkpoint: (step, where)
        self._stopped_at: int | None = None  # the step after which the workers left because they were told to
        self._term_at = math.inf
        self._kill_at = math.inf

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> int:
        wakeup, theirs = socket.socketpair()
        wakeup.setblocking(False)
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the number arrives at the wakeup socket
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._signalled(wakeup.recv(4096)))
        try:
            self._run_dir.record("begin", settings=dataclasses.asdict(self._settings), pid=os.getpid())
            self._fleet.prepare(self._job, list(self._settings.preload))
            self._perform(self._first_actions, "the run begins")
            while not self._is_over():
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._on_time(time.monotonic())
            return self._leave()
        finally:
            self._fleet.close()
            self._door.close()
            self._console.close()
            self._logs.close()
            signal.set_wakeup_fd(-1)
            self._run_dir.close()

    def _is_over(self) -> bool:
        return (self._end is not None or self._stopped_by is not None) and not self._fleet.children

    def _pause_s(self) -> float:
        now = time.monotonic()
        due = [now + _TICK_S, self._term_at, self._kill_at]
        due += [*(when for when, _ in self._later), *self._kills.values()]
        return max(0.0, min(due) - now)

    def _on_time(self, now: float) -> None:
        self._outlet.flush()
        self._console.redraw(now)
        if now >= self._term_at:
            self._term_at, self._kill_at = math.inf, now + self._settings.grace_s
            self._fleet.give_up_unborn()
            for id in list(self._fleet.children):
                self._fleet.signal(id, signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            names = ", ".join(self._name(id) for id in sorted(self._fleet.children))
            self._console.say(f"{names} did not stop within {self._settings.grace_s:g} s: killed.")
            self._fleet.kill_all()
        for id in [id for id, when in self._kills.items() if when <= now]:
            self._kills[id] = math.inf
            self._fleet.signal(id, signal.SIGKILL)
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry not in due]
        for _, ids in due:
            self._spawn(ids)
        self._decide(plan.Tick())

    def _leave(self) -> int:
        """How the run ended, in a word, and its exit code."""
        goes_on = ""
        if self._saved is not None:
            goes_on = f" The newest checkpoint is of step {self._saved[0]} ({self._saved[1]}); the same command goes on from it."
        if self._stopped_by is not None:
            code, why = _STOPS[signal.Signals(self._stopped_by)], f"stopped by {signal.Signals(self._stopped_by).name}"
            if self._saved is not None and self._stopped_at == self._saved[0] and not self._bad_codes():
                code, why = 0, f"{why} at step {self._stopped_at}, which is saved"
            if goes_on:
                self._console.say(f"{why}.{goes_on}")
        else:
            assert self._end is not None
            code, why = self._verdict.close(self._end.code), self._end.why
            if code != 0:
                self._console.say(
                    f"the run ended with code {code}: {first_line(why)}. Its files are in {self._run_dir.path}.{goes_on}"
                )
        self._run_dir.record("end", code=code, why=why)
        return code

    # -- what happens ----------------------------------------------------------------------------

    def heard(self, worker: int, packet: packets.Packet) -> None:
        """A packet from a worker."""
        news, event = progress_of(packet), event_of(worker, packet)
        if news is not None:
            generation = self._state.generation if self._state.generation >= 0 else None
            workers = len(self._state.members) or len(self._fleet.children)
            self._console.progress(dataclasses.replace(news, workers=workers, generation=generation), time.monotonic())
            return
        if event is None:
            self._note(worker, packet)
            return
        if isinstance(event, plan.Leaving) and self._stopped_by is not None:
            return  # all of them are
        if isinstance(event, plan.Lost | plan.Failed):
            self._fleet.reap()  # whoever they lost may have ended already: that comes first
        if isinstance(event, plan.Failed):
            self._failed(event, packet)
        if isinstance(event, plan.Finished):
            self._verdict.finished(worker)
        self._decide(event)

    def _bad_codes(self) -> list[int]:
        """Of those that took part: one that was still starting is ended by our own signal."""
        return [code for id, code in self._verdict.codes().items() if id in self._took_part]

    def _note(self, worker: int, packet: packets.Packet) -> None:
        """What a worker tells us for the record."""
        kind, step = packet.get("type"), packet.get("step")
        if kind == "saved" and isinstance(step, int):
            self._saved = (step, str(packet.get("where")))
            self._run_dir.record("saved", step=step, where=self._saved[1])
        elif kind == "stopped" and isinstance(step, int):
            self._stopped_at = step
        else:
            self._run_dir.record("unknown packet", worker=worker, packet=packet)

    def wrote(self, worker: int, stream: int, data: bytes) -> None:
        self._logs.write(worker, stream, data)
        if self._ranks.get(worker) == 0:
            self._console.show(stream, data)

    def ended(self, worker: int, status: int) -> None:
        """A worker's process is gone."""
        how = f"exited with code {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
        code = status if status >= 0 else 128 - status
        self._run_dir.record("ended", worker=worker, how=how)
        told = self._verdict.has_told(worker)
        self._verdict.ended(worker, code)
        if code != 0 and not told:
            failure = Failure(self._name(worker), how, str(self._run_dir.log(worker)), traceback=self._logs.tail(worker))
            self._verdict.failed(worker, code, failure, tell=not self._is_stopping())
        if code == 0 and not told and self._state.generation < 0:
            self._decide(plan.Finished(worker))  # os._exit(0): nobody depended on it
        self._decide(plan.Died(worker, how))
        self._logs.end(worker)

    def not_started(self, workers: list[int], why: str, *, is_hopeless: bool) -> None:
        self._console.say(why)
        self._run_dir.record("not started", workers=workers, why=why)
        for id in workers:
            self._logs.end(id)
            if not is_hopeless:
                self._decide(plan.Died(id, "could not be started"))
        if is_hopeless:
            self._wind_down(self._end or plan.End(1, "no worker could be started"))

    def _failed(self, event: plan.Failed, packet: packets.Packet) -> None:
        worker, trace = event.worker, str(packet.get("traceback", ""))
        self._logs.write(worker, 2, trace.encode(errors="replace"))
        failure = Failure(self._name(worker), event.error, str(self._run_dir.log(worker)), event.step, trace)
        self._verdict.failed(worker, packet.get("code", 1), failure, tell=self._stopped_by is None)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._fleet.reap()
            elif number in _STOPS:
                self._stop(number)

    def _stop(self, number: int) -> None:
        if self._stopped_by is not None:
            if number == signal.SIGINT:
                self._kill_at = math.inf
                self._console.say("killing all workers.")
                self._fleet.kill_all()
            return
        self._stopped_by = number
        self._run_dir.record("stop", signal=number)
        self._term_at, self._kill_at = math.inf, time.monotonic() + self._settings.grace_s
        self._later = []
        self._fleet.give_up_unborn()
        again = "; Ctrl-C again kills them at once" if number == signal.SIGINT else ""
        self._console.say(f"{signal.Signals(number).name}: workers have {self._settings.grace_s:g} s to end{again}.")
        for id in list(self._fleet.children):
            if number != signal.SIGINT:
                is_member = id in self._state.members
                self._fleet.send(id, {"type": "stop"} if is_member else {"type": "dismiss", "why": "the run was told to end"})
            self._fleet.signal(id, signal.SIGTERM if number == signal.SIGHUP else number)

    def _asked(self, request: packets.Packet) -> packets.Packet:
        """A request from outside: `lockstep scale`."""
        size = request.get("size")
        if request.get("type") != "scale" or not isinstance(size, int) or size < 1:
            return {"ok": False, "error": f"this agent does not know what to do with {request!r:.200}"}
        if self._is_stopping():
            return {"ok": False, "error": "the run is ending"}
        return {"ok": True, "value": self._decide(plan.Scaled(size))}

    # -- decisions, and what is done about them ---------------------------------------------------

    def _decide(self, event: plan.Event) -> str:
        self._state, actions, why = plan.decide(self._state, event, time.monotonic())
        if actions or not isinstance(event, plan.Tick):
            shown = [{type(action).__name__: dataclasses.asdict(action)} for action in actions]
            self._run_dir.record("event", event={type(event).__name__: dataclasses.asdict(event)}, actions=shown, why=why)
        self._perform(actions, why)
        return why

    def _perform(self, actions: tuple[plan.Action, ...], why: str) -> None:
        for action in actions:
            match action:
                case plan.Form():
                    self._form(action, why)
                case plan.Abort():
                    for id in action.workers:
                        self._fleet.send(id, {"type": "abort", "generation": action.generation, "why": action.why})
                case plan.Change():
                    for id in action.workers:
                        self._fleet.send(id, {"type": "change", "generation": action.generation})
                case plan.Stop():
                    for id in action.workers:
                        self._fleet.send(id, {"type": "stop"})
                case plan.Spawn():
                    if not self._is_stopping():
                        self._later.append((time.monotonic() + action.delay_s, action.workers))
                case plan.Kill():
                    self._kill(action)
                case plan.Dismiss():
                    self._fleet.send(action.worker, {"type": "dismiss", "why": action.why})
                case plan.End():
                    self._wind_down(action)

    def _kill(self, action: plan.Kill) -> None:
        """It first writes down where it stands, if it still can."""
        if action.worker not in self._kills:
            where = self._run_dir.stack(action.worker)
            self._console.say(f"{self._name(action.worker)} is killed: {action.why.rstrip('.')}. Where it stood is in {where}")
            self._kills[action.worker] = time.monotonic() + _STACK_S
            self._fleet.signal(action.worker, STACK_SIGNAL)

    def _form(self, action: plan.Form, why: str) -> None:
        self._ranks = {id: rank for rank, id in enumerate(action.members)}
        if action.number > 0:
            self._console.say(why)
        self._verdict.new_incident()
        self._took_part |= set(action.members)
        packet = {"type": "generation", "number": action.number, "members": action.members}
        for id in action.members:
            self._fleet.send(id, packet)

    def _spawn(self, ids: Sequence[int]) -> None:
        given, wanted = self._settings, []
        threads = threads_of(given.size, os.environ)
        for id in ids:
            self._logs.begin(id)
            hang_timeout_s = given.policy.hang_timeout_s
            env = worker_environment(
                id, given.size, self._run_dir, ledger=given.ledger, hang_timeout_s=hang_timeout_s, environ=os.environ
            )
            wanted.append(Wanted(id, env, threads))
        self._fleet.spawn(wanted)

    def _wind_down(self, end: plan.End) -> None:
        """The run is over: whoever is left may say a last word, then is told to stop, then made to."""
        self._end = end
        self._later = []
        for id in list(self._fleet.children):
            self._fleet.send(id, {"type": "dismiss", "why": end.why})
        if self._stopped_by is None:
            self._term_at = time.monotonic() + _LAST_WORDS_S

    def _is_stopping(self) -> bool:
        return self._end is not None or self._stopped_by is not None

    def _name(self, id: int) -> str:
        return f"rank {self._ranks[id]}" if id in self._ranks else f"worker {id}"


def event_of(worker: int, packet: packets.Packet) -> plan.Event | None:
    """What a worker's packet means; None where it means nothing."""
    try:
        match packet["type"]:
            case "join":
                return plan.Joined(worker, int(packet.get("most", 0)))
            case "ready":
                return plan.Ready(worker, int(packet["generation"]), int(packet["step"]))
            case "lost":
                blamed = tuple(int(id) for id in packet["blamed"])
                return plan.Lost(worker, int(packet["generation"]), blamed, bool(packet["hung"]), str(packet["why"]))
            case "leaving":
                return plan.Leaving(worker)
            case "failed":
                return plan.Failed(worker, int(packet["step"]), str(packet["error"]))
            case "finished":
                return plan.Finished(worker)
    except (KeyError, TypeError, ValueError):
        pass
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
