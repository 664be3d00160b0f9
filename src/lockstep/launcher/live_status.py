"""LiveStatus: what an agent answers to {"type": "status"} on its control socket. Decides nothing, and changes nothing.

The answer is one JSON object:

    state        "starting", "running", "recovering" or "stopping"
    pid, began   of the process that supervises the run; when it began, in seconds since 1970
    generation   -1 before the first
    wanted       how many workers the run should have; members: how many belong to the generation
    step         the newest step that rank 0 has reported; epoch, samples, values: what it said with it; NaN and infinity
                 are texts
    verdict      which worker slows the run down, as in a line of the kind "verdict"; null if none does
    checkpoint   the step and the place of the newest checkpoint; null if there is none
    summary      what the run has come to so far, in sentences
    now          the time of the answer
    worker_count how many workers there are; workers: at most 256 of them, from number ``first`` of the request on. Each has
                 worker, rank, pid, host, status, is_spare, and, if known: step, phase, since, lanes, memory_bytes, heard_s,
                 stopped_since
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lockstep.launcher.local_machine import Machines
from lockstep.launcher.observation import Observation
from lockstep.launcher.packets import Packet
from lockstep.launcher.progress_text import Progress
from lockstep.launcher.run_status import RECOVERING, RUNNING, STARTING, STOPPING
from lockstep.launcher.straggler_reports import StragglerReports
from lockstep.plan.membership_state import State, Worker
from lockstep.recording.costs_text import costs_text
from lockstep.recording.json_lines import number
from lockstep.recording.summary import RunSummary

_MAX_WORKERS = 256
"""In one answer: the kernel limits the size of a packet."""


class LiveStatus:
    """The supervisor tells it what it hears, by ``heard``, ``forget`` and ``progress``."""

    def __init__(self, machines: Machines, observation: Observation, stragglers: StragglerReports, summary: RunSummary) -> None:
        self._machines, self._observation, self._stragglers, self._summary = machines, observation, stragglers, summary
        self._began = time.time()
        self._heard_at: dict[int, float] = {}
        self.progress: Progress | None = None
        """What rank 0 has reported last."""

    def heard(self, worker: int) -> None:
        """A packet has come from the worker."""
        self._heard_at[worker] = time.monotonic()

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._heard_at.pop(worker, None)

    def answer(self, state: State, ranks: Mapping[int, int], request: Packet, *, is_ending: bool) -> Packet:
        first = request.get("first")
        first = first if isinstance(first, int) and first >= 0 else 0
        progress = self.progress
        placed = set(self._machines.ids)
        workers = sorted(state.workers, key=lambda worker: (worker.id not in state.members, ranks.get(worker.id, 0), worker.id))
        return {
            "state": run_state(state, is_ending=is_ending, has_processes=self._has_processes(state)),
            "pid": os.getpid(),
            "began": self._began,
            "now": time.time(),
            "generation": state.generation,
            "wanted": state.size,
            "members": len(state.members),
            "step": state.committed if progress is None else progress.step,
            "epoch": None if progress is None else progress.epoch,
            "samples": None if progress is None else progress.samples,
            "values": {} if progress is None else {name: number(each) for name, each in progress.values.items()},
            "verdict": self._verdict(),
            "checkpoint": self._summary.checkpoint,
            "summary": [each for each in self._sentences() if each],
            "worker_count": len(workers),
            "workers": [self._describe(each, state, ranks, placed) for each in workers[first : first + _MAX_WORKERS]],
        }

    def _sentences(self) -> tuple[str, ...]:
        return self._summary.steps_text(), self._summary.faults_text(), costs_text(list(self._observation.recent))

    def _verdict(self) -> dict[str, Any] | None:
        verdict = self._stragglers.verdict
        return None if verdict is None else {"sentence": verdict.sentence(), **asdict(verdict)}

    def _has_processes(self, state: State) -> bool:
        return any(self._machines.pid(worker.id) is not None for worker in state.workers)

    def _describe(self, worker: Worker, state: State, ranks: Mapping[int, int], placed: Collection[int]) -> Packet:
        """``placed``: the workers that run or are being started. Others will be, and have no machine yet."""
        pid, heard_at = self._machines.pid(worker.id), self._heard_at.get(worker.id)
        is_member = worker.id in state.members
        found: Packet = {
            "worker": worker.id,
            "rank": ranks.get(worker.id) if is_member or state.generation < 0 else None,
            "pid": pid,
            "host": self._machines.host(worker.id) if worker.id in placed else "",
            "status": "finished" if worker.finished else "leaving" if worker.leaving else worker.status.value,
            "is_spare": worker.is_spare and not is_member,
        }
        if heard_at is not None:
            found["heard_s"] = round(time.monotonic() - heard_at, 3)
        now = self._observation.workers.get(worker.id)
        if now is not None:
            found |= {"step": now.step, "phase": now.phase, "since": round(now.since, 3)}
            found |= {"lanes": list(now.lanes), "memory_bytes": now.memory_bytes}
            if now.stopped_since is not None:
                found["stopped_since"] = round(now.stopped_since, 3)
        return found


def run_state(state: State, *, is_ending: bool, has_processes: bool) -> str:
    """``has_processes``: whether a worker runs already. A script without ``lockstep.Run`` runs without a generation."""
    if is_ending or state.ended:
        return STOPPING
    if state.restarting or (state.generation >= 0 and state.broken_at is not None):
        return RECOVERING
    if state.generation < 0 and not has_processes:
        return RECOVERING if state.restarts else STARTING
    return RUNNING
