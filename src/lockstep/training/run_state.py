"""Holding: all that every worker holds alike, as one value: to send to a newcomer, to write to a checkpoint, to take over.

Knows what belongs to a run's state, not where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.errors import UsageError
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training.consistency import Consistency
from lockstep.training.evaluation import Evaluations
from lockstep.training.loop import TrainingLoop
from lockstep.training.step_gate import StepGate


class RunState:
    """What a change of workers must carry over (elastic/workers.py: ``Holder``), and what a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        engine: LaneEngine,
        gate: StepGate,
        loop: TrainingLoop,
        evaluations: Evaluations,
        agreement: Consistency,
        settings: dict[str, Any],
    ) -> None:
        self._model, self._engine, self._gate, self._loop, self._evaluations = model, engine, gate, loop, evaluations
        self._agreement = agreement
        self.settings = settings
        """What defines the arithmetic."""
        self._shapes = {name: buffer.shape for name, buffer in engine.buffers.named()}
        self.notes: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        """What others want carried over: how to get it, and how to set it."""
        self._registered: dict[str, Any] = {}
        self._unclaimed: dict[str, Any] = {}
        self.began = False
        """Whether this worker's script has its Run: from then on it has a place in the script."""
        self.on_rebind: Callable[[], None] = lambda: None
        self.resume: Callable[[], bool] = lambda: False
        """At the very beginning: take over a checkpoint's state, if there is one. Collective."""

    # -- a change of workers -------------------------------------------------------------------

    @property
    def committed_steps(self) -> int:
        return self._loop.step

    def give_up(self) -> None:
        if not self._loop.committed:
            self._engine.discard_step()

    def rebind(self, comm: Comm) -> None:
        self._engine.rebind(comm)
        self._agreement.rebind(comm)
        self.on_rebind()

    def agree(self) -> None:
        self._agreement.require_same()
        if not self.resume():
            self._agreement.share_state()

    # -- the state -----------------------------------------------------------------------------

    def register(self, name: str, each: Any) -> None:
        """``each`` belongs to the state from now on. Where the state was received before it was registered, it takes its part."""
        if name in self._registered:
            raise UsageError(f"run.register({name!r}, ...) was called twice. Give every object a name of its own.")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, method, None)):
                raise UsageError(f"run.register({name!r}, ...) got a {type(each).__name__}, which has no {method}().")
        self._registered[name] = each
        if name in self._unclaimed:
            each.load_state_dict(self._unclaimed.pop(name))

    def replicated(self) -> dict[str, Any]:
        """What must have the same bits on every worker. Buffers that are not persistent are caches, and each worker's own."""
        keep = self.persistent()
        return {
            "parameters": {name: param.detach() for name, param in self._engine.named},
            "buffers": {name: buffer.detach() for name, buffer in self._engine.buffers.named() if name in keep},
            "objects": dict(zip(self._gate.names(), (each.state_dict() for each in self._gate.objects), strict=True)),
            "registered": {name: each.state_dict() for name, each in self._registered.items()} | self._unclaimed,
        }

    def capture(self) -> dict[str, Any]:
        return {
            "loop": self._loop.capture(),
            "evaluations": self._evaluations.kept,
            "trainable": self._engine.trainable(),
            "notes": {name: get() for name, (get, _) in self.notes.items()},
            "caches": self._caches(),
            **self.replicated(),
        }

    def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Take over another worker's state, or (``resumes``) a checkpoint's, as all workers do at once.

        In mid-loop, the step this worker missed counts as committed in this turn.
        """
        if list(state["objects"]) != self._gate.names():
            raise UsageError(
                f"the state is of a Run with {', '.join(state['objects']) or 'no objects'}; this one has "
                f"{', '.join(self._gate.names())}. Pass the same optimizers and schedulers in the same order."
            )
        with torch.no_grad():
            for name, param in self._engine.named:
                if param.data_ptr() != state["parameters"][name].data_ptr():
                    param.copy_(state["parameters"][name])
                param.requires_grad_(name in state["trainable"])
            held = {**state["caches"], **state["buffers"]}
            for name, buffer in self._engine.buffers.named():
                if name in held and buffer.shape == held[name].shape and buffer.data_ptr() != held[name].data_ptr():
                    self._engine.buffers.write(buffer, held[name])
        for name, each in zip(self._gate.names(), self._gate.objects, strict=True):
            each.load_state_dict(state["objects"][name])
        self._unclaimed = dict(state["registered"])
        for name, each in self._registered.items():
            if name in self._unclaimed:
                each.load_state_dict(self._unclaimed.pop(name))
        self._evaluations.kept = list(state["evaluations"])
        for name, value in state["notes"].items():
            if name in self.notes:
                self.notes[name][1](value)
        self._loop.restore(state["loop"], joins=not self.began and not resumes)

    def _caches(self) -> dict[str, Tensor]:
        """Buffers that are not persistent, unless they have changed their shape: then each worker computes its own."""
        keep = self.persistent()
        named = {name: buffer.detach() for name, buffer in self._engine.buffers.named() if name not in keep}
        return {name: buffer for name, buffer in named.items() if buffer.shape == self._shapes.get(name)}

    # -- the model's state dict ----------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict, each tensor under one name."""
        keep = self.persistent()
        return {
            **{name: param.detach() for name, param in self._engine.named},
            **{name: buffer for name, buffer in self._engine.buffers.named() if name in keep},
        }

    def persistent(self) -> set[str]:
        return set(self._model.state_dict(keep_vars=True))

    def aliases(self) -> dict[str, str]:
        first: dict[int, str] = {id(tensor): name for name, tensor in reversed(list(self._named()))}
        state = self._model.state_dict(keep_vars=True)
        return {name: first[id(t)] for name, t in state.items() if id(t) in first and first[id(t)] != name}

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*self._engine.named, *self._engine.buffers.named()]
