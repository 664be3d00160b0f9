"""Verification: whether all replicas still hold the same bits. A difference is named, the minority healed from the majority.

Memory and processors change bits, rarely and silently; a replica that has parted goes on parting. Every worker sums its
parameters, buffers and optimizer state (checksum.py), and sixteen bytes of each are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from lockstep.checkpoint.checksum import checksums
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import flatten_named
from lockstep.elastic.transfer import carry
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import CorruptionError
from lockstep.observe.notice import print_notice
from lockstep.plan.step_end import StepEnd


class Held(Protocol):
    """What is compared, and how one worker takes over from another."""

    def replicated(self) -> dict[str, Any]: ...

    def capture(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class ReplicaCheck:
    """A task between steps (loop.py): every ``every`` steps."""

    def __init__(self, held: Held, workers: WorkerGroup, device: torch.device, every: int) -> None:
        self._held, self._workers, self._device, self._every = held, workers, device, every
        self._agreed = -1
        self.on_parted: Callable[[int], None] = lambda agreed: None
        """Called on every worker when a replica was healed, with the last step at which all had been equal."""

    def resumed(self, step: int) -> None:
        """What this worker holds now is what all held at ``step``, when they were equal."""
        self._agreed = step

    def agreed(self) -> int:
        return self._agreed

    def agreed_at(self, step: int) -> int:
        """The last step, up to ``step``, at which replicas were known to be equal; a lone one always is."""
        return step if self._workers.comm.size == 1 else self._agreed

    def is_due(self, now: StepEnd) -> bool:
        if self._workers.comm.size == 1:
            self._agreed = now.step
            return False
        return now.step % self._every == 0

    def perform(self, now: StepEnd) -> list[int]:
        """[the step, that at which all were equal before it, whether they are still]."""
        return [now.step, self._agreed, int(self.compare(self._workers.comm, now.step))]

    def done(self, result: list[int]) -> None:
        self._agreed = result[0]
        if not result[2]:
            self.on_parted(result[1])

    def loop_ended(self, step: int) -> None:
        pass

    def compare(self, comm: Comm, step: int) -> bool:
        """Whether all are equal; afterwards they are. Collective. ``CorruptionError`` where no majority agrees."""
        rows = self._rows()
        mine = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
        prints = [text.decode() for text in gather_bytes(comm, mine.encode(), "the sum of each replica")]
        if len(set(prints)) == 1:
            return True
        everyone = [json.loads(text) for text in gather_bytes(comm, json.dumps(rows).encode(), "the sums of each replica")]
        (common, count), *_ = Counter(prints).most_common()
        good = prints.index(common)
        parted = [rank for rank, each in enumerate(prints) if each != common]
        if 2 * count <= comm.size:
            shown = ", ".join(f"rank {rank} has {each}" for rank, each in enumerate(prints))
            raise CorruptionError(
                f"replicas differ after step {step}, first in {first_difference(everyone[good], everyone[parted[0]])}, and no "
                f"majority agrees on which is right: {shown}. A bit has changed in some worker's memory, or something outside "
                f"the step writes to the model on some workers only. They were equal after step {max(0, self._agreed)}: go back to "
                "a checkpoint of that step or before, and remove those that are newer."
            )
        found = carry(comm, self._held.capture, good, parted, self._device)
        if found is not None:
            self._held.restore(found)
        if comm.rank == 0:
            for rank in parted:
                where = first_difference(everyone[good], everyone[rank])
                print_notice(
                    f"the replica of rank {rank} differed after step {step}, first in {where} (sum {prints[rank]}; {count} others "
                    f"have {common}). It was healed from rank {good}. If this happens again, look at that machine's memory."
                )
        return False

    def _rows(self) -> list[list[str]]:
        skeleton, tensors, paths = flatten_named(self._held.replicated(), "what replicas hold")
        plain = hashlib.sha256(skeleton.encode()).hexdigest()[:32]
        names = [".".join(path) for path in paths]
        return [*([name, total] for name, total in zip(names, checksums(tensors), strict=True)), ["plain values", plain]]


def first_difference(mine: list[list[str]], theirs: list[list[str]]) -> str:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return one[0]
    return "what it holds"
