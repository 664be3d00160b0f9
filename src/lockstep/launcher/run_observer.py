"""RunObserver: what the agent notes of a run, for people: events, steps, stragglers, what the run has come to. Decides nothing.

    supervisor ── record, on_steps, on_progress, on_stopped, forget, on_time ──> RunObserver
        events.jsonl             <- record
        recording/               <- Observation
        terminal, events.jsonl   <- StragglerReports
        `lockstep status`        <- LiveStatus
        last lines of the run    <- RunSummary

Nothing here blocks.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from typing import Any

from lockstep.launcher.console import Console
from lockstep.launcher.last_lines import last_lines
from lockstep.launcher.live_status import LiveStatus
from lockstep.launcher.local_machine import Machines
from lockstep.launcher.observation import Observation
from lockstep.launcher.packets import Packet
from lockstep.launcher.progress_text import Progress
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.straggler_reports import StragglerReports
from lockstep.plan.membership_state import State
from lockstep.recording.costs_text import costs_text
from lockstep.recording.summary import RunSummary


class RunObserver:
    """The supervisor tells it what happens."""

    def __init__(self, run_folder: RunFolder, machines: Machines, console: Console) -> None:
        self._run_folder, self._machines, self._console = run_folder, machines, console
        self._summary = RunSummary()
        self._stragglers = StragglerReports(self.record, console.show_verdict)
        self._observation = Observation(run_folder, socket.gethostname(), machines.host, self._stragglers.add)
        self._live_status = LiveStatus(machines, self._observation, self._stragglers, self._summary)
        self._errors_shown: set[str] = set()

    def record(self, kind: str, **facts: Any) -> None:
        """Write a line of events.jsonl."""
        if kind == "end":
            self._stragglers.write_stops()
        line = {"time": time.time(), "kind": kind, **facts}
        self._summary.add_event(line)
        self._run_folder.append(line)

    def heard(self, worker: int) -> None:
        """A packet has come from the worker."""
        self._live_status.heard(worker)

    def on_steps(self, worker: int, packet: Packet) -> None:
        """What a worker has recorded of its steps."""
        self._observation.on_packet(worker, packet)

    def on_progress(self, progress: Progress, state: State) -> None:
        """What rank 0 says of a step that is committed."""
        generation = state.generation
        self._live_status.progress = progress
        self._summary.add_progress(time.time(), progress.step, generation, progress.samples, progress.values)
        workers, shown = len(state.members) or len(self._machines.ids), generation if generation >= 0 else None
        self._console.show_progress(dataclasses.replace(progress, workers=workers, generation=shown), time.monotonic())

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        """SIGSTOP has stopped the worker (None), or it has continued after so long. 0: the stop was too short to be seen."""
        self._observation.on_stopped(worker, is_stopped=seconds is None)
        if seconds is not None:
            self._stragglers.add_stop(worker, seconds)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._observation.forget(worker)
        self._live_status.forget(worker)

    def on_time(self, now: float) -> None:
        self._run_folder.on_time()
        self._say_error("events.jsonl", self._run_folder.error, "Events")
        self._say_error("recording", self._observation.error, "Records of steps")
        self._console.redraw(now)
        self._stragglers.on_time(now)

    def _say_error(self, name: str, error: OSError | None, what: str) -> None:
        if error is not None and name not in self._errors_shown:
            self._errors_shown.add(name)
            path = self._run_folder.path / name
            self._console.say(f"{path} cannot be written ({error.strerror}). {what} are lost until it can. Training continues.")

    def answer(self, state: State, ranks: Mapping[int, int], request: Packet, *, is_ending: bool) -> Packet:
        """What `lockstep status` asks for."""
        return self._live_status.answer(state, ranks, request, is_ending=is_ending)

    def end(self, *, has_said_where: bool) -> None:
        """The run is over: say what it came to. ``has_said_where``: the terminal shows already where the files are."""
        self.record("summary", lines=self._summary.lines())
        costs = costs_text(list(self._observation.recent))
        self._console.show_last_lines(last_lines(self._summary, costs, self._run_folder.path, has_said_where))

    def close(self) -> None:
        self._stragglers.write_stops()
        self._observation.close()
