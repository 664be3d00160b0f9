"""ScriptReplay: which loops and collectives this worker's script passes without running them.

A newcomer and a resumed run execute the script from its beginning, but the state belongs to a later position in it. Until it
reaches that position, loops over ``run.shard`` are skipped, loops over ``run.epochs`` begin with the current epoch, and collectives
between loops return their recorded results. What the script reads of the run meanwhile (script_values.py) is what it read at that
place before. What the script does to the model, the optimizers or the schedulers on the way has no effect: at that position, the
state is adopted.

    resumed run   the checkpoint names the position; the state is restored again there if the script has changed it
    newcomer      the agent says which epoch and loop the others are in; the state is received at the entry of that loop
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.comm.base import Comm
from lockstep.comm.plain_state import from_bytes, to_bytes
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.training.progress import EpochLoop, Progress
from lockstep.training.script_values import ScriptValues


@dataclass(frozen=True)
class ScriptPosition:
    """A position in the script, after ``results`` results (progress.py): in loop ``stage``, or in run.save before that loop."""

    stage: int
    in_loop: bool
    results: int


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

    def __init__(
        self,
        progress: Progress,
        workers: WorkerGroup,
        values: ScriptValues,
        join: Callable[[Comm], None],
        arrived: Callable[[], None],
    ) -> None:
        self._progress, self._workers, self._values, self._join, self._arrived = progress, workers, values, join, arrived
        self._position: ScriptPosition | None = None
        self._values_there: dict[str, Any] = {}  # at that position
        self._sent = 0  # results that this worker, as rank 0, has sent to the agent

    @property
    def is_replaying(self) -> bool:
        return self._position is not None or self._workers.is_newcomer

    def resume_at(self, position: ScriptPosition) -> None:
        """Replay the script up to ``position``, whose state was restored. Called on all workers, in ``Run(...)``."""
        self._position, self._values_there = position, self._values.copy()
        self._values.forget_state()

    # -- loops over the data -----------------------------------------------------------------

    def enter_loop(self, stage: int) -> LoopEntry:
        """Return how the script enters loop ``stage``. Called at the entry of each loop.

        For a newcomer it blocks until the others take it in at a step of this loop, or have left this loop.

        Raises:
            UsageError: The script has other loops or collectives than before.
        """
        progress, position = self._progress, self._position
        if self._workers.is_newcomer:
            assert self._workers.link is not None
            comm = self._workers.link.join_loop(stage)
            if comm is None:
                self._adopt_values()
                return LoopEntry.SKIP
            self._join(comm)
            self._require_same_script(progress.result_count)
            return LoopEntry.JOIN
        if position is not None and stage < position.stage:
            self._adopt_values()
            return LoopEntry.SKIP
        self._report()
        self._report_stage(stage)
        if position is None:
            return LoopEntry.BEGIN
        self._require_same_script(position.results)
        self._arrive()
        return LoopEntry.RESUME if position.in_loop else LoopEntry.BEGIN

    def leave_loop(self) -> None:
        """The script has left a loop over the data that it was in."""
        self._progress.add_result(self._values.copy())  # sent later: perhaps an exception has ended the loop, on this worker alone

    # -- loops over epochs -------------------------------------------------------------------

    def enter_epochs(self, number: int, count: int) -> int | None:
        """Return the epoch with which the script begins loop ``number`` over ``run.epochs``; None if the run has left the loop."""
        progress = self._progress
        if self._workers.is_newcomer or number == len(progress.epoch_loops):
            return self.next_epoch(number, 0, count)
        loop = progress.epoch_loops[number]
        epoch = self._jump_to(loop)
        if loop.is_exhausted and loop.epoch < count:  # a finished run continues with more epochs
            self._require_arrival(f"has {count} epochs")
        return epoch

    def next_epoch(self, number: int, epoch: int, count: int) -> int | None:
        """Begin an epoch. Returns its number: for a newcomer, perhaps a later one. None if the run has left the loop.

        Also called after the last epoch. For a newcomer it blocks until the others have begun that epoch.
        """
        if self._workers.is_newcomer:
            assert self._workers.link is not None
            latest = self._workers.link.latest_epoch(number)
            if latest is not None and (latest["epoch"] >= epoch or latest["is_left"]):
                return self._jump_to(EpochLoop(**latest))
            self._adopt_values()
            return epoch
        self._require_arrival(f"begins epoch {epoch}")
        self._progress.begin_epoch(number, epoch, count)
        self._values.start_epoch(self._progress.step)
        self._progress.add_result(self._values.copy())
        self._report()
        return epoch

    def leave_epochs(self, number: int) -> None:
        """The script has left loop ``number`` over ``run.epochs`` by ``break``."""
        if self.is_replaying:
            self._progress.results_reached += 1
            return
        self._progress.leave_epochs(number)
        self._progress.add_result(self._values.copy())

    def _jump_to(self, loop: EpochLoop) -> int | None:
        """Pass over all that the script has done in ``loop`` before its current epoch, or in all of it if the run has left it."""
        self._progress.loops_reached, self._progress.results_reached = loop.stage, loop.result
        self._adopt_values()
        return None if loop.is_left else loop.epoch

    # -- results -----------------------------------------------------------------------------

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
        if self._has_arrived():  # the state was captured in this call
            self._arrive()
        return Recorded(self._recall()) if self.is_replaying else None

    def record(self, result: Any) -> None:
        """Keep the result of a collective between loops, which all workers have completed."""
        self._progress.add_result(result)
        self._report()

    def _adopt_values(self) -> None:
        """Let the script read what it could read of the run at this place before."""
        self._values.adopt(self._recall())

    def _recall(self) -> Any:
        progress, position = self._progress, self._position
        number = progress.results_reached
        if self._workers.is_newcomer:
            assert self._workers.link is not None
            progress.results_reached += 1
            return _decode(self._workers.link.recall(number))
        assert position is not None
        if number >= position.results or number not in progress.results:
            raise _differs(f"needs result {number}", f"has {position.results} of them, and dropped those of earlier epochs")
        progress.results_reached += 1
        return progress.results[number]

    # -- what the agent is told --------------------------------------------------------------

    def new_generation(self) -> None:
        """Rank 0 of a new generation tells the agent where the run is: the last rank 0 may have died before it could."""
        if not self._workers.is_newcomer:
            self._report()
            self._report_stage(self._progress.loops_reached - 1)

    def _report(self) -> None:
        """Rank 0 sends the agent the results that it has not sent yet, then the current epoch."""
        link, progress = self._workers.link, self._progress
        if link is None or self._workers.comm.rank != 0:
            return
        for number in sorted(number for number in progress.results if number >= self._sent):
            link.record(number, _encode(progress.results[number]))
        if self._sent < progress.result_count:
            for number, loop in enumerate(progress.epoch_loops):
                link.enter_epoch(number, asdict(loop))
        self._sent = progress.result_count

    def _report_stage(self, stage: int) -> None:
        link = self._workers.link
        if link is not None and self._workers.comm.rank == 0 and stage >= 0:
            link.enter_stage(stage)

    # -- the position ------------------------------------------------------------------------

    def end_script(self) -> None:
        """The script has ended. If the state was captured there, adopt it."""
        if self._has_arrived():
            self._arrive()

    def _has_arrived(self) -> bool:
        progress = self._progress
        return self._position == ScriptPosition(progress.loops_reached, False, progress.results_reached)

    def _require_arrival(self, script: str) -> None:
        if self._has_arrived():
            self._arrive()
        if self._position is not None:
            raise _differs(script, f"was saved in loop {self._position.stage}, or before it")

    def _arrive(self) -> None:
        self._position = None
        self._values.adopt(self._values_there)
        self._arrived()

    def _require_same_script(self, results: int) -> None:
        reached = self._progress.results_reached
        if reached != results:
            calls = "run.evaluate and run.save"
            raise _differs(f"has reached {reached} loops, epochs and calls such as {calls} up to here", f"had reached {results}")


def _differs(script: str, run: str) -> UsageError:
    return UsageError(
        f"the script {script}, but the run that it continues {run}. Start it with the script that the run was begun with."
    )


def _encode(value: Any) -> str:
    skeleton, content = to_bytes(value, "the result of a collective")
    return json.dumps([skeleton, base64.b64encode(content).decode()])


def _decode(text: str) -> Any:
    skeleton, content = json.loads(text)
    return from_bytes(skeleton, base64.b64decode(content))
