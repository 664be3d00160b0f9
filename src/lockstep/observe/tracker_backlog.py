"""TrackerBacklog: the published averages that the trackers may not hold yet. Equal on every worker, and part of the state.

Only rank 0 hands averages to trackers, and rank 0 can die at any moment. So every worker keeps what was published until rank 0 has
said that its trackers hold it:

    exchange k    rank 0 says up to which step its trackers hold everything; all workers drop these steps, and add those that
                  exchange k publishes
    then          rank 0 hands the steps of the backlog to its trackers, each tracker those after the last step that it holds

Why each step arrives exactly once, in a tracker that can say which step it holds last:

- *Never missing.* A step enters the backlog of every worker when it is published, with the same bits (observe/log.py). It leaves
  the backlog in one way: rank 0 of that generation has said, in an exchange that is complete, that each of its trackers holds it.
  So at any moment and on any worker, a published step is in the backlog or in the trackers. A worker that becomes rank 0 hands
  over its backlog, a newcomer received it with the state, and a checkpoint contains it. Steps after a checkpoint are computed
  again, with the same bits.
- *Never twice.* A tracker has one writer: rank 0. A generation begins when the rank 0 before it has ended (the agent has seen
  that), or has left, or is a member with another rank: then it is not inside a call of a tracker, and makes no more of them. The
  writer begins by asking the tracker for the last step that it holds, and hands over later steps only, in order.
  One case is not covered: if the machine of rank 0 is cut off from the head, the next generation begins while the earlier rank 0
  lives. It makes no step without the others, but a write that it has begun may arrive after the next rank 0 has asked. The lock
  of a file keeps the next rank 0 out until then, and W&B drops steps that it has; MLflow may hold the steps of one exchange twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

_MAX_VALUES = 50_000
"""How many numbers are kept for a tracker that fails: some megabytes in each state that is sent or saved."""


TrackerReport = tuple[int, list[float]]
"""What rank 0 says in an exchange: the step up to which its trackers hold everything, and how many seconds each is not tried."""


class TrackerBacklog:
    """Steps in order, each with its averages. Empty for ever unless ``is_kept``: the run has no trackers."""

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.run_id = ""
        """Names the curves of this run: the same on every worker, and after a resume. Empty until the run has begun."""
        self.held = 0
        """Rank 0 has said that its trackers hold everything up to this step."""
        self.steps: list[tuple[int, dict[str, float]]] = []
        self._next_tries: list[float] = []
        """When each tracker is tried again (time.monotonic). Not a part of the state."""

    @property
    def last_step(self) -> int:
        """The last step that was published, as far as it is known here."""
        return self.steps[-1][0] if self.steps else self.held

    def kept_after(self) -> int:
        """Return the step after which steps are kept for a tracker that fails."""
        left = _MAX_VALUES
        for step, values in reversed(self.steps):
            left -= 1 + len(values)
            if left < 0:
                return step
        return 0

    def begin(self, run_id: str) -> None:
        """Begin new curves. What is here belongs to those of the run that this one has branched from."""
        self.run_id, self.held, self.steps = run_id, 0, []

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the averages of a step that was published. All workers call it."""
        if self.is_kept:
            self.steps.append((step, dict(values)))

    def confirm(self, report: TrackerReport | None) -> None:
        """Drop the steps that rank 0's trackers hold. All workers call it with what rank 0 has said; None: rank 0 does not know."""
        if report is not None:
            held, pauses_s = report
            self.held = max(self.held, held)
            self.steps = [entry for entry in self.steps if entry[0] > self.held]
            now = time.monotonic()
            self._next_tries = [now + pause_s for pause_s in pauses_s]

    def next_try(self, tracker: int) -> float:
        """Return when a worker that becomes rank 0 opens the tracker with this number first (time.monotonic)."""
        return self._next_tries[tracker] if tracker < len(self._next_tries) else 0.0

    def capture(self) -> dict[str, Any]:
        hexes = [[step, {name: float(value).hex() for name, value in values.items()}] for step, values in self.steps]
        return {"run_id": self.run_id, "held": self.held, "steps": json.dumps(hexes)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Adopt what ``capture`` returned. None: the state was made without trackers, or by an earlier version."""
        if state is None or not self.is_kept:
            return
        self.run_id, self.held = state["run_id"], state["held"]
        loaded = json.loads(state["steps"])
        self.steps = [(step, {name: float.fromhex(value) for name, value in values.items()}) for step, values in loaded]
