"""ReplicaCheck: compares all replicas bit by bit, names a difference, and restores the minority from the majority.

Memory and processors change bits, rarely and silently, and a replica that differs once differs more with every step. Each worker
computes checksums of its parameters, buffers and optimizer state; workers compare 16 bytes of them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable

import torch

from lockstep.checkpoint.checksum import checksums
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import Stateful, flatten_named
from lockstep.elastic.transfer import send_value
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import CorruptionError
from lockstep.observe.notice import print_notice
from lockstep.plan.step_end import StepEnd
from lockstep.recording.records import BETWEEN
from lockstep.training.progress import Progress


class ReplicaCheck:
    """A BetweenStepsTask that compares replicas every ``every`` steps.

    ``on_differed(step)`` is called on every worker when a replica was restored, with the last step at which all were equal.
    """

    phase = BETWEEN

    def __init__(
        self,
        state: Stateful,
        progress: Progress,
        workers: WorkerGroup,
        device: torch.device,
        every: int,
        on_differed: Callable[[int], None],
    ) -> None:
        self._state, self._progress, self._workers, self._device = state, progress, workers, device
        self._every, self._on_differed = every, on_differed

    def is_due(self, now: StepEnd) -> bool:
        if self._workers.comm.size == 1:
            self._progress.equal_at = now.step
            return False
        return now.step % self._every == 0

    def perform(self, now: StepEnd) -> list[int]:
        """Returns [this step, the last step at which all were equal before, whether all are equal now]."""
        return [now.step, self._progress.equal_at, int(self.compare(self._workers.comm, now.step))]

    def done(self, result: list[int]) -> None:
        self._progress.equal_at = result[0]
        if not result[2]:
            self._on_differed(result[1])

    def loop_ended(self, step: int) -> list[int] | None:
        """Compare once more, so that no result of a loop leaves it unchecked."""
        if self._workers.comm.size == 1 or self._progress.equal_at == step:
            return None
        return [step, self._progress.equal_at, int(self.compare(self._workers.comm, step))]

    def compare(self, comm: Comm, step: int) -> bool:
        """Compare all replicas and make them equal. All workers call it.

        Returns:
            Whether they were equal.

        Raises:
            CorruptionError: No majority of the workers agrees on the bits.
        """
        rows = self._rows()
        mine = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
        sums = [text.decode() for text in gather_bytes(comm, mine.encode(), "the checksum of each replica")]
        if len(set(sums)) == 1:
            return True
        everyone = [json.loads(text) for text in gather_bytes(comm, json.dumps(rows).encode(), "the checksums of each replica")]
        (common, count), *_ = Counter(sums).most_common()
        good = sums.index(common)
        wrong = [rank for rank, each in enumerate(sums) if each != common]
        if 2 * count <= comm.size:
            equal_at = max(0, self._progress.equal_at)
            shown = ", ".join(f"rank {rank} has {each}" for rank, each in enumerate(sums))
            raise CorruptionError(
                f"replicas differ after step {step}, first in {_first_difference(everyone[good], everyone[wrong[0]])}, and no "
                f"majority agrees on the right bits: {shown}. A bit has changed in some worker's memory, or code outside the "
                f"step writes to the model or to run.state on some workers only. Replicas were equal after step {equal_at}: "
                "resume from a checkpoint of that step or an earlier one, and remove newer ones."
            )
        state = send_value(comm, self._state.capture, good, wrong, self._device)
        if state is not None:
            self._state.restore(state)
        if comm.rank == 0:
            for rank in wrong:
                name = _first_difference(everyone[good], everyone[rank])
                print_notice(
                    f"the replica of rank {rank} differed after step {step}, first in {name} (checksum {sums[rank]}; {count} "
                    f"others have {common}). It was restored from rank {good}. If this happens again, test that machine's memory."
                )
        return False

    def _rows(self) -> list[list[str]]:
        state = self._state.replicated()
        skeleton, tensors, paths = flatten_named(state, "what replicas hold")
        names = [".".join(path) for path in paths]
        rows = [[name, total] for name, total in zip(names, checksums(tensors), strict=True)]
        rows += [[f"run.state[{name!r}]", _digest(flatten_named(each, name)[0])] for name, each in state["state"].items()]
        return [*rows, ["plain values", _digest(skeleton)]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _first_difference(mine: list[list[str]], theirs: list[list[str]]) -> str:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return one[0]
    return "the number of tensors"
