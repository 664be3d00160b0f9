"""RunSummary: what a run has come to, in a few numbers and sentences, from its events, its records and reports of progress.

It is fed with them as they come, or file by file from a run folder (recording/reader.py), in any order of the files. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.recording.records import Metrics, StepRecord
from lockstep.recording.text import duration, number, plural


@dataclass(frozen=True)
class Fault:
    """A failure of a member of a generation. ``what``: "worker 2 died (SIGKILL)" or "machine c is lost"."""

    at: float
    """In seconds since 1970."""
    what: str
    worker: int
    generation: int
    """The generation that it broke."""
    step: int = 0
    """The newest step that had been committed; 0: none."""
    cost_s: float | None = None
    """From the fault to the next committed step; None: none was committed since."""

    @property
    def is_survived(self) -> bool:
        return self.cost_s is not None


class RunSummary:
    """``state`` is "starting", "running", "stopped" (by a signal), "ended" or "failed".

    A run whose supervising process was killed has written no end: for its files it is "running" for ever.
    """

    def __init__(self) -> None:
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.state = "starting"
        self.code: int | None = None
        self.why = ""
        self.members: tuple[int, ...] = ()
        self.generation = -1
        self.step = 0
        """The newest committed step."""
        self.checkpoint: tuple[int, str] | None = None
        """(step, where) of the newest one that was saved in this run."""
        self.restarts = 0
        """How often all workers of a script without ``lockstep.Run`` were started again."""
        self.values: dict[str, float] = {}
        """The newest averages of what was logged."""
        self._faults: list[Fault] = []  # without step and cost
        self._lost: set[int] = set()  # the members of this generation that are lost
        self._got_signal = self._is_ending = False
        self._first_commits: dict[int, float] = {}  # generation -> when it has first committed a step
        self._last_steps: dict[int, int] = {}  # generation -> the newest step that it has committed
        self._first: tuple[float, int] | None = None  # (when the first step of this run began, as far as known; steps before it)
        self._last_at = 0.0
        self._progress: list[tuple[float, int]] = []  # (when, samples) of the first and the last report
        self._recorded_samples = self._recorded_steps = 0.0

    # -- what it is fed with -----------------------------------------------------------------------

    def add_event(self, line: Mapping[str, Any]) -> None:
        """A line of ``events.jsonl``, which is not damaged (event_lines.py)."""
        kind, at = line["kind"], line["time"]
        if kind in ("begin", "continue"):
            self.began_at = at if self.began_at is None else self.began_at
            self.ended_at = None
        elif kind == "exited":
            how = line.get("how") or "exit code 0"
            if how != "exit code 0":
                self._fault(at, line["worker"], f"worker {line['worker']} died ({how})")
        elif kind == "event":
            self._decided(at, line)
        elif kind == "saved":
            self.checkpoint = line["step"], line["where"]
        elif kind == "signal":
            self._got_signal = True
        elif kind == "end":
            self.code, self.why, self.ended_at = line["code"], line.get("why") or "", at
            is_stopped = self._got_signal or line.get("stopped_after") is not None
            self.state = "stopped" if is_stopped else "ended" if self.code == 0 else "failed"

    def add_record(self, record: StepRecord | Metrics) -> None:
        """A line of the recording."""
        if isinstance(record, Metrics):
            self.values |= record.values
            return
        if record.kind != "step" or not record.committed:
            return
        end = record.at + record.seconds
        before = 0 if record.step <= record.stride else record.step - 1
        self._committed(record.step, end, record.generation, before, record.at)
        self._recorded_samples += record.samples
        self._recorded_steps += 1 / max(1, record.size)

    def add_progress(
        self, at: float, step: int, generation: int, samples: int | None = None, values: Mapping[str, float] | None = None
    ) -> None:
        """A report of rank 0, at ``at`` seconds since 1970: ``step`` steps and ``samples`` samples were committed in all."""
        if step > 0:
            self._committed(step, at, generation, step - 1, at)
        if samples is not None:
            self._progress[1:] = [(at, samples)]
        self.values |= values or {}

    # -- what it says ------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many steps this run has committed. Those before it was resumed do not count."""
        return 0 if self._first is None else self.step - self._first[1]

    def seconds(self, now: float | None = None) -> float:
        """How long the run has lasted: to its end, or to ``now`` (in seconds since 1970), or to the last that is known of it."""
        if self.began_at is None:
            return 0.0
        end = self.ended_at if self.ended_at is not None else now if now is not None else max(self._last_at, self.began_at)
        return max(0.0, end - self.began_at)

    @property
    def samples_per_s(self) -> float | None:
        """Over all steps of this run."""
        if len(self._progress) == 2:
            (first_at, first), (last_at, last) = self._progress
            return (last - first) / (last_at - first_at) if last > first and last_at > first_at else None
        if self._first is None or not self._recorded_steps or self._last_at <= self._first[0]:
            return None
        return self._recorded_samples / self._recorded_steps * self.steps / (self._last_at - self._first[0]) or None

    @property
    def faults(self) -> list[Fault]:
        """All failures of members, in the order in which they were noticed."""
        return [self._with_cost(fault) for fault in self._faults]

    def _with_cost(self, fault: Fault) -> Fault:
        step = max((step for generation, step in self._last_steps.items() if generation <= fault.generation), default=0)
        later = [at for generation, at in self._first_commits.items() if generation > fault.generation and at > fault.at]
        return replace(fault, step=step, cost_s=min(later) - fault.at if later else None)

    @property
    def survived(self) -> list[Fault]:
        """The faults after which another step was committed."""
        return [fault for fault in self.faults if fault.is_survived]

    def lines(self) -> list[str]:
        """What people read at the end of a run, or of a run that lasts: at most four short sentences. Empty: it made no steps."""
        found = [self.steps_text(), self.faults_text(), self.checkpoint_text()]
        if self.state == "failed":
            found.append(f"it failed with code {self.code}: {self.why}")
        return [line for line in found if line]

    def steps_text(self) -> str:
        """ "344 steps in 12.3 s, 5.4k samples/s, loss 0.5321"; empty if there was none."""
        if not self.steps:
            return ""
        text = f"{plural(self.steps, 'step')} in {duration(self.seconds())}"
        if self.samples_per_s is not None:
            text += f", {number(self.samples_per_s)} samples/s"
        return text + (f", loss {number(self.values['loss'])}" if "loss" in self.values else "")

    def faults_text(self) -> str:
        """ "1 failure survived, at a cost of 0.4 s: worker 2 died (SIGKILL) after step 100"; empty if there was none."""
        survived = self.survived
        if not survived:
            return ""
        costs = [fault.cost_s for fault in survived if fault.cost_s is not None]
        text = f"{plural(len(survived), 'failure')} survived"
        if len(survived) == 1:
            return f"{text}, at a cost of {duration(costs[0])}: {survived[0].what} after step {survived[0].step}"
        return f"{text}, at a cost of {duration(max(costs))} at most, and {duration(self.lost_s())} in all"

    def lost_s(self) -> float:
        """How long the run has waited after its faults, in all. Faults at the same time are not counted twice."""
        total = reached = 0.0
        for fault in sorted(self.survived, key=lambda each: each.at):
            until = fault.at + (fault.cost_s or 0.0)
            total += max(0.0, until - max(reached, fault.at))
            reached = max(reached, until)
        return total

    def checkpoint_text(self) -> str:
        """ "the newest checkpoint is of step 300 (PATH)"; empty if there is none."""
        return "" if self.checkpoint is None else f"the newest checkpoint is of step {self.checkpoint[0]} ({self.checkpoint[1]})"

    # -- how it counts -----------------------------------------------------------------------------

    def _decided(self, at: float, line: Mapping[str, Any]) -> None:
        """A decision of plan/membership.py: an event, and the actions that followed."""
        for name, facts in line["event"].items():
            if name == "MachineLost":
                for worker in facts.get("workers") or ():
                    self._fault(at, worker, facts.get("how") or "its machine is lost")
            elif name == "ScriptRaised":
                error = (facts.get("error") or "").partition(":")[0]
                self._fault(at, facts["worker"], f"worker {facts['worker']} raised {error}")
        for action in line.get("actions") or ():
            for name, facts in action.items():
                if name == "Form":
                    self.members, self.generation = tuple(facts["members"]), facts["number"]
                    self._lost = set()
                    self.state = "running"
                elif name == "Kill":
                    self._fault(at, facts["worker"], f"worker {facts['worker']} hung and was killed")
                elif name == "StartAgain":
                    self.restarts, self.members = self.restarts + 1, ()
                elif name == "End":
                    self._is_ending = True

    def _fault(self, at: float, worker: int, what: str) -> None:
        """A member is lost. That it was killed, and then ended, is one fault: the first that is said of it counts."""
        if worker not in self.members or worker in self._lost or self._is_ending or self._got_signal:
            return
        self._lost.add(worker)
        self._faults.append(Fault(at, what, worker, self.generation))

    def _committed(self, step: int, at: float, generation: int, before: int, began_at: float) -> None:
        """``before``: how many steps there were before this one, as far as it is known."""
        if self._first is None or before < self._first[1]:
            self._first = (began_at if self._first is None else min(began_at, self._first[0]), before)
        self.step, self._last_at = max(self.step, step), max(self._last_at, at)
        self._first_commits[generation] = min(at, self._first_commits.get(generation, at))
        self._last_steps[generation] = max(step, self._last_steps.get(generation, step))
