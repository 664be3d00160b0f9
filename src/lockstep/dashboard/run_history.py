"""RunHistory: what the supervisor has decided, from the lines of ``events.jsonl``: generations, how workers ended, faults in words.

No files, no clock. A line that it does not know is left out.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_ENTRIES = 1000
"""So many of the newest entries are kept."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``level``: "fault", "change" or "note". ``worker``: -1 if it concerns no single one."""

    at: float
    level: str
    text: str
    worker: int = -1
    mark: str = ""
    """What the timeline shows at the worker: "died", "joined", "stopped", "failed", "saved", or nothing."""
    changed: int = 0


@dataclass(frozen=True)
class Generation:
    number: int
    at: float
    members: tuple[int, ...]
    changed: int = 0


@dataclass
class WorkerLife:
    """``state``: "starting", "training", "ended", "died" or "left". ``ended_at``: 0 while its process exists."""

    state: str = "starting"
    pid: int = 0
    ended_at: float = 0.0
    how: str = ""
    changed: int = 0


@dataclass
class RunHistory:
    """Feed it with ``add``, in the order of the file, without the lines that are damaged (recording/event_lines.py)."""

    began: float = 0.0
    newest: float = 0.0
    ended: float = 0.0
    code: int | None = None
    why: str = ""
    summary: tuple[str, ...] = ()
    """What the supervisor said at the end about the whole run. Empty while the run has not ended."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    is_ending: bool = False
    """The run was told to end: that workers die now is no fault."""
    checkpoint_step: int = -1
    verdict: dict[str, Any] | None = None
    """What the page shows of the last line of kind "verdict", unless it says that it is over. At the end of the run it stays."""
    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=MAX_ENTRIES))
    generations: deque[Generation] = field(default_factory=lambda: deque(maxlen=MAX_ENTRIES))
    workers: dict[int, WorkerLife] = field(default_factory=dict)

    def add(self, line: Line, version: int) -> None:
        """Take one line of the file. ``version`` marks what is new."""
        at, read = line["time"], _READERS.get(line["kind"])
        if read is not None:
            read(self, line, at, version)
        self.began = self.began or at
        self.newest = max(self.newest, at)

    def since(self, version: int) -> dict[str, Any]:
        """What is new after ``version``, as plain data; times count from ``began``."""
        entries = [self._relative(asdict(each)) for each in self.entries if each.changed > version]
        generations = [self._relative(asdict(each)) for each in self.generations if each.changed > version]
        lives = {
            id: [life.state, life.how, round(life.ended_at - self.began, 3) if life.ended_at else 0]
            for id, life in self.workers.items()
            if life.changed > version
        }
        return {"entries": entries, "generations": generations, "lives": lives}

    @property
    def members(self) -> tuple[int, ...]:
        return self.generations[-1].members if self.generations else ()

    def _relative(self, found: dict[str, Any]) -> dict[str, Any]:
        found["t"] = round(found.pop("at") - self.began, 3)
        del found["changed"]
        return found

    def _say(self, at: float, version: int, level: str, text: str, worker: int = -1, mark: str = "") -> None:
        self.entries.append(Entry(at, level, _one_line(text), worker, mark, version))

    def _life(self, worker: int, version: int) -> WorkerLife:
        """The life of a worker, which is about to change."""
        life = self.workers.setdefault(worker, WorkerLife())
        life.changed = version
        return life

    # -- one method for each kind of line -----------------------------------------------------------

    def _begin(self, line: Line, at: float, version: int) -> None:
        self.began, self.pid, self.settings = at, line.get("pid") or 0, line.get("settings") or {}
        size = self.settings.get("size") or 0
        for id in range(min(size, 100_000)):
            self._life(id, version)
        self._say(at, version, "note", f"the run begins with {_workers(size)}" if size else "the run begins")

    def _continue(self, line: Line, at: float, version: int) -> None:
        workers = line["workers"]
        for id in workers:
            self._life(id, version).state = "training"
        self._say(at, version, "change", f"another head has taken over the run with {_workers(len(workers))}")

    def _event(self, line: Line, at: float, version: int) -> None:
        for name, facts in line["event"].items():
            if name == "ScriptRaised":
                worker = facts["worker"]
                error = (facts.get("error") or "") + (f" ({facts['place']})" if facts.get("place") else "")
                self._say(at, version, "fault", f"the script of worker {worker} failed: {error}", worker, "failed")
            elif name == "ScaleRequested":
                self._say(at, version, "change", f"a person asks for {_workers(facts['size'])}")
            elif name == "MachineLost":
                self._say(at, version, "fault", f"a machine was lost: {facts.get('how') or ''}")
            elif name == "MachineJoined":
                self._say(at, version, "change", f"machine {facts['name']} joined, with room for {_workers(facts['workers'])}")
        for action in line.get("actions") or ():
            for name, facts in action.items():
                self._action(name, facts, at, version)

    def _action(self, name: str, facts: Line, at: float, version: int) -> None:
        if name == "Form":
            self._form(facts["number"], tuple(facts["members"]), at, version)
        elif name == "Spawn":
            started = facts["workers"]
            for id in started:
                self._life(id, version)
            if self.generations:
                what = "spare" if facts.get("are_spares") else "worker"
                names = ", ".join(map(str, started))
                self._say(
                    at,
                    version,
                    "note",
                    f"{what}{'s' if len(started) > 1 else ''} {names} {'are' if len(started) > 1 else 'is'} starting",
                )
        elif name == "Kill":
            worker = facts["worker"]
            self._say(at, version, "fault", f"worker {worker} is killed: {facts.get('why') or ''}", worker)
        elif name == "End":
            self.is_ending = True
        elif name == "StartAgain":
            self._say(at, version, "change", f"all workers are started again (restart {facts.get('restarts')})")

    def _form(self, number: int, members: tuple[int, ...], at: float, version: int) -> None:
        before = set(self.members)
        for id in members:
            self._life(id, version).state = "training"
        for id in before - set(members):
            life = self._life(id, version)
            life.state = "left" if life.state == "training" else life.state
        joined = sorted(set(members) - before) if before else []
        self.generations.append(Generation(number, at, members, version))
        who = f"worker{'s' if len(joined) > 1 else ''} {', '.join(map(str, joined))} joined; " if joined else ""
        verb = "train" if joined or not before else "go on" if len(members) > 1 else "goes on"
        verb = "trains" if verb == "train" and len(members) == 1 else verb
        self._say(at, version, "change", f"{who}{_workers(len(members))} {verb}, generation {number}")
        for id in joined:
            self._say(at, version, "note", f"worker {id} takes part", id, "joined")

    def _exited(self, line: Line, at: float, version: int) -> None:
        worker, how = line["worker"], line.get("how") or ""
        life = self._life(worker, version)
        life.pid, life.ended_at, life.how = line.get("pid") or 0, at, how
        pid = f" (pid {life.pid})" if life.pid else ""
        if how == "exit code 0":
            life.state = "ended"
            self._say(at, version, "note", f"worker {worker}{pid} has ended", worker)
            return
        life.state = "died"
        if self.is_ending:
            self._say(at, version, "note", f"worker {worker}{pid} has ended: {how}", worker)
            return
        self._say(at, version, "fault", f"worker {worker}{pid} died: {how}", worker, "died")

    def _saved(self, line: Line, at: float, version: int) -> None:
        self.checkpoint_step = max(self.checkpoint_step, line["step"])
        self._say(at, version, "note", f"the checkpoint of step {line['step']} was saved", -1, "saved")

    def _stopped(self, line: Line, at: float, version: int) -> None:
        worker, text = line["worker"], f"worker {line['worker']} was stopped for {line['seconds']:.3g} s"
        self._say(line.get("at") or at, version, "fault", text, worker, "stopped")

    def _verdict(self, line: Line, at: float, version: int) -> None:
        sentence = line.get("sentence") or ""
        before = self.verdict or {}
        shown = {"sentence": sentence, "speedup": line.get("speedup")}
        shown |= {name: str(line.get(name, "")) for name in ("worker", "rank", "cause")}
        self.verdict = shown if sentence else None
        if sentence and all(before.get(name) == shown[name] for name in ("worker", "cause")):
            return  # only its numbers are new
        self._say(at, version, "change" if sentence else "note", sentence or "no worker is behind the others any more")

    def _signal(self, line: Line, at: float, version: int) -> None:
        name = {2: "SIGINT", 15: "SIGTERM", 1: "SIGHUP"}.get(line["signal"], f"signal {line['signal']}")
        self.is_ending = True
        self._say(at, version, "change", f"the run was told to stop ({name})")

    def _stop_requested(self, line: Line, at: float, version: int) -> None:
        self.is_ending = True
        self._say(at, version, "change", "`lockstep stop` was called")

    def _not_started(self, line: Line, at: float, version: int) -> None:
        self._say(at, version, "fault", line.get("why") or "a worker could not be started")

    def _summary(self, line: Line, at: float, version: int) -> None:
        self.summary = tuple(line["lines"])

    def _end(self, line: Line, at: float, version: int) -> None:
        self.ended, self.code, self.why = at, line["code"], line.get("why") or ""
        self._say(at, version, "note" if self.code == 0 else "fault", f"the run has ended: {self.why}")


_READERS = {
    "begin": RunHistory._begin,
    "continue": RunHistory._continue,
    "event": RunHistory._event,
    "exited": RunHistory._exited,
    "saved": RunHistory._saved,
    "stopped": RunHistory._stopped,
    "verdict": RunHistory._verdict,
    "signal": RunHistory._signal,
    "stop requested": RunHistory._stop_requested,
    "not started": RunHistory._not_started,
    "zygote hung": RunHistory._not_started,
    "end": RunHistory._end,
    "summary": RunHistory._summary,
}


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _one_line(text: str, max_chars: int = 400) -> str:
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
