"""Holding: all that every worker holds alike, as one value: to send to a newcomer, to write to a checkpoint, to take over.

Knows what belongs to a run's state, not where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.agreement import Agreement
from lockstep.comm.base import Comm
from lockstep.evaluate import Evaluations
from lockstep.gates import Gates
from lockstep.grads.engine import LaneEngine
from lockstep.loop import Loop


class Holding:
    """What a change of workers must carry over (elastic/crew.py: ``Holder``)."""

    def __init__(self, engine: LaneEngine, gates: Gates, loop: Loop, evaluations: Evaluations, agreement: Agreement) -> None:
        self._engine, self._gates, self._loop, self._evaluations = engine, gates, loop, evaluations
        self._agreement = agreement
        self.began = False
        """Whether this worker's script has its Run: from then on it has a place in the script."""

    @property
    def committed_steps(self) -> int:
        return self._loop.step

    def give_up(self) -> None:
        if not self._loop.committed:
            self._engine.void()

    def rebind(self, comm: Comm) -> None:
        self._engine.rebind(comm)
        self._agreement.rebind(comm)

    def agree(self) -> None:
        self._agreement.require_same()
        self._agreement.share_state()

    def capture(self) -> dict[str, Any]:
        return {
            "loop": self._loop.capture(),
            "evaluations": self._evaluations.kept,
            "trainable": self._engine.trainable(),
            "parameters": {name: param.detach() for name, param in self._engine.named},
            "buffers": {name: buffer.detach() for name, buffer in self._engine.buffers.named()},
            "objects": [each.state_dict() for each in self._gates.objects],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over another worker's state. In mid-loop, the step this worker missed counts as committed in this turn."""
        with torch.no_grad():
            for name, param in self._engine.named:
                param.copy_(state["parameters"][name])
                param.requires_grad_(name in state["trainable"])
            for name, buffer in self._engine.buffers.named():
                self._engine.buffers.write(buffer, state["buffers"][name])
        for each, held in zip(self._gates.objects, state["objects"], strict=True):
            each.load_state_dict(held)
        self._evaluations.kept = list(state["evaluations"])
        self._loop.restore(state["loop"], joins=not self.began)
