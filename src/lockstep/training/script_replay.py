"""ScriptReplay: which loops and collectives this worker's script passes without running them.

A newcomer and a resumed run execute the script from its beginning, but the state belongs to a later position in it. Until it
reaches that position, loops are skipped and collectives between loops return their recorded results. What the script does to the
model, the optimizers or the schedulers on the way has no effect: at that position, the state is adopted.

    resumed run   the checkpoint names the position; the state is restored again there if the script has changed it
    newcomer      the agent says which loop the others are in; the state is received at the entry of that loop
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.comm.base import Comm
from lockstep.comm.plain_state import from_bytes, to_bytes
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.training.progress import Progress


@dataclass(frozen=True)
class ScriptPosition:
    """A position in the script: in loop ``stage``, or before it, after ``collectives`` collectives between loops."""

    stage: int
    in_loop: bool
    collectives: int


class LoopEntry(enum.Enum):
    """How a worker enters a loop."""

    SKIP = "the run has passed this loop already"
    BEGIN = "all workers begin it"
    RESUME = "all workers continue it, from a checkpoint"
    JOIN = "this worker joins the others in it"


@dataclass(frozen=True)
class Recorded:
    """The recorded result of a collective."""

    value: Any


class ScriptReplay:
    """``join(comm)`` makes a newcomer a member, with the others' state. ``arrived()`` restores a checkpoint's state if needed."""

    def __init__(self, progress: Progress, workers: WorkerGroup, join: Callable[[Comm], None], arrived: Callable[[], None]) -> None:
        self._progress, self._workers, self._join, self._arrived = progress, workers, join, arrived
        self._position: ScriptPosition | None = None
        self._sent = 0  # results that this worker, as rank 0, has sent to the agent

    def resume_at(self, position: ScriptPosition) -> None:
        """Replay the script up to ``position``, whose state was restored. Called on all workers, in ``Run(...)``."""
        self._position = position
        self._stop_if_arrived()

    def enter_loop(self, stage: int) -> LoopEntry:
        """Return how the script enters loop ``stage``. Called at the entry of each loop.

        For a newcomer it blocks until the others take it in at a step of this loop, or have left this loop.

        Raises:
            UsageError: The script has other collectives between loops than before.
        """
        progress, position = self._progress, self._position
        if self._workers.is_newcomer:
            assert self._workers.link is not None
            comm = self._workers.link.join_loop(stage)
            if comm is None:
                return LoopEntry.SKIP
            self._join(comm)
            self._require_same_script(len(progress.results))
            return LoopEntry.JOIN
        if position is not None and stage < position.stage:
            self._stop_if_arrived()
            return LoopEntry.SKIP
        self._report_stage(stage)
        if position is None:
            return LoopEntry.BEGIN
        self._require_same_script(position.collectives)
        self._position = None
        self._arrived()
        return LoopEntry.RESUME

    def next_loop_position(self) -> tuple[int, int] | None:
        """Return the cursor at which the script's next loop begins, or None if the run has passed that loop already.

        A newcomer does not know where the others are: for it, every loop begins at the beginning.
        """
        position, stage = self._position, self._progress.loops_reached
        if position is None or stage > position.stage:
            return (0, 0)
        return self._progress.position if stage == position.stage else None

    def next_result(self) -> Recorded | None:
        """Return the recorded result of the collective between loops that the script has reached, or None if it must run.

        For a newcomer it blocks until the others have completed the collective.
        """
        number = self._progress.collectives_reached
        self._progress.collectives_reached += 1
        if self._workers.is_newcomer:
            assert self._workers.link is not None
            return Recorded(_decode(self._workers.link.recall(number)))
        if self._position is None:
            return None
        if number >= self._position.collectives:
            self._require_same_script(self._position.collectives)
        result = Recorded(self._progress.results[number])
        self._stop_if_arrived()
        return result

    def record(self, result: Any) -> None:
        """Keep the result of a collective between loops, which all workers have completed."""
        self._progress.results.append(result)
        self.send_results()

    def new_generation(self) -> None:
        """Rank 0 of a new generation tells the agent where the run is: the last rank 0 may have died before it could."""
        if not self._workers.is_newcomer:
            self._report_stage(self._progress.loops_reached - 1)
            self.send_results()

    def send_results(self) -> None:
        link = self._workers.link
        if link is not None and self._workers.comm.rank == 0:
            for number in range(self._sent, len(self._progress.results)):
                link.record(number, _encode(self._progress.results[number]))
            self._sent = len(self._progress.results)

    def _report_stage(self, stage: int) -> None:
        link = self._workers.link
        if link is not None and self._workers.comm.rank == 0 and stage >= 0:
            link.enter_stage(stage)

    def _stop_if_arrived(self) -> None:
        position, progress = self._position, self._progress
        here = ScriptPosition(progress.loops_reached, False, progress.collectives_reached)
        if position == here:
            self._position = None
            self._arrived()

    def _require_same_script(self, collectives: int) -> None:
        reached = self._progress.collectives_reached
        if reached != collectives:
            raise UsageError(
                f"the script has called run.evaluate, run.save and the like {reached} times between loops up to here, but the run "
                f"that it continues had called them {collectives} times. Start it with the script that the run was begun with."
            )


def _encode(value: Any) -> str:
    skeleton, content = to_bytes(value, "the result of a collective")
    return json.dumps([skeleton, base64.b64encode(content).decode()])


def _decode(text: str) -> Any:
    skeleton, content = json.loads(text)
    return from_bytes(skeleton, base64.b64decode(content))
