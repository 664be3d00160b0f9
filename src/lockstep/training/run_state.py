"""RunState: everything that every worker holds alike, as one value: to send to a newcomer, to write to a checkpoint, to restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lockstep.errors import UsageError
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.log import LaneLog
from lockstep.training.parameter_groups import Groups, add_groups, missing_groups, read_groups
from lockstep.training.progress import Progress
from lockstep.training.step_gate import StepGate
from lockstep.training.user_state import UserState


class RunState:
    """The state of a run (comm/plain_state.py: ``Stateful``). ``settings`` holds what defines the arithmetic."""

    def __init__(
        self,
        model: nn.Module,
        engine: LaneEngine,
        gate: StepGate,
        progress: Progress,
        log: LaneLog,
        user_state: UserState,
        settings: dict[str, Any],
    ) -> None:
        self._model, self._engine, self._gate, self._progress, self._log = model, engine, gate, progress, log
        self._user_state = user_state
        self.settings = settings
        self._shapes = {name: buffer.shape for name, buffer in engine.buffers.named()}
        self._registered: dict[str, Any] = {}
        self._unclaimed: dict[str, Any] = {}  # received states of objects that the script has not registered yet
        self.began = False
        """Whether ``Run(...)`` has returned: from then on this worker has a place in the script."""

    def register(self, name: str, stateful: Any) -> None:
        """Add an object to the state. If its state was received before, the object loads it now.

        Raises:
            UsageError: The name is taken, or the object has no ``state_dict`` and ``load_state_dict``.
        """
        if name in self._registered:
            raise UsageError(f"run.register({name!r}, ...) was called twice. Give every object a name of its own.")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, method, None)):
                raise UsageError(f"run.register({name!r}, ...) got a {type(stateful).__name__}, which has no {method}().")
        self._registered[name] = stateful
        if name in self._unclaimed:
            stateful.load_state_dict(self._unclaimed.pop(name))

    def replicated(self) -> dict[str, Any]:
        """Return what must have the same bits on every worker.

        Buffers that are not persistent are caches: each worker has its own.
        """
        keep = self.persistent()
        return {
            "parameters": {name: param.detach() for name, param in self._engine.named},
            "buffers": {name: buffer.detach() for name, buffer in self._engine.buffers.named() if name in keep},
            "groups": self._groups(),
            "objects": dict(zip(self._gate.names(), (each.state_dict() for each in self._gate.objects), strict=True)),
            "registered": {name: each.state_dict() for name, each in self._registered.items()} | self._unclaimed,
            "state": self._user_state.capture(),
        }

    def capture(self) -> dict[str, Any]:
        """Return the whole state as plain data. Its tensors are the live ones, not copies."""
        return {
            "progress": self._progress.capture(),
            "log": self._log.capture(),
            "trainable": self._engine.trainable(),
            "caches": self._caches(),
            **self.replicated(),
        }

    def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Adopt the state of another worker, or of a checkpoint, which all workers adopt at once.

        If an optimizer lacks parameter groups of the state, they are added. With ``resumes`` it is left alone, and so are its
        schedulers: the script may add the groups itself, on its way to the place of the checkpoint.
        """
        if list(state["objects"]) != self._gate.names():
            raise UsageError(
                f"the state belongs to a Run with {', '.join(state['objects']) or 'no objects'}; this Run has "
                f"{', '.join(self._gate.names())}. Pass the same optimizers and schedulers in the same order."
            )
        self._restore_tensors(state)
        self._restore_objects(state, resumes)
        self._unclaimed = dict(state["registered"])
        for name, each in self._registered.items():
            if name in self._unclaimed:
                each.load_state_dict(self._unclaimed.pop(name))
        self._user_state.restore(state["state"])
        self._progress.restore(state["progress"])
        self._log.restore(state["log"])

    def _restore_objects(self, state: Mapping[str, Any], resumes: bool) -> None:
        mine = self._groups()
        theirs = state.get("groups", mine)  # checkpoints of earlier versions have no groups
        lacking = {name: missing_groups(name, groups, theirs[name]) for name, groups in mine.items()}
        objects = dict(zip(self._gate.names(), self._gate.objects, strict=True))
        later = {id(objects[name]) for name, groups in lacking.items() if resumes and groups}
        for name, each in objects.items():
            if not later & {id(each), id(getattr(each, "optimizer", None))}:
                add_groups(each, lacking.get(name, []), self._engine.named)
                each.load_state_dict(state["objects"][name])
                if isinstance(each, Optimizer):
                    _adopt_strides(each)

    def _groups(self) -> dict[str, Groups]:
        """Return the parameter groups of each optimizer."""
        self._gate.require_known_parameters()
        objects = zip(self._gate.names(), self._gate.objects, strict=True)
        return {name: read_groups(each, self._engine.named) for name, each in objects if isinstance(each, Optimizer)}

    def _restore_tensors(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, param in self._engine.named:
                if param.data_ptr() != state["parameters"][name].data_ptr():
                    param.copy_(state["parameters"][name])
                param.requires_grad_(name in state["trainable"])
            received = {**state["caches"], **state["buffers"]}
            for name, buffer in self._engine.buffers.named():
                if name in received and buffer.shape == received[name].shape and buffer.data_ptr() != received[name].data_ptr():
                    self._engine.buffers.write(buffer, received[name])

    def _caches(self) -> dict[str, Tensor]:
        """Return the buffers that are not persistent, unless they changed their shape: then each worker computes its own."""
        keep = self.persistent()
        named = {name: buffer.detach() for name, buffer in self._engine.buffers.named() if name not in keep}
        return {name: buffer for name, buffer in named.items() if buffer.shape == self._shapes.get(name)}

    # -- the model's state dict ----------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, each tensor under one name."""
        keep = self.persistent()
        return {
            **{name: param.detach() for name, param in self._engine.named},
            **{name: buffer for name, buffer in self._engine.buffers.named() if name in keep},
        }

    def persistent(self) -> set[str]:
        """Return the names in the model's state dict."""
        return set(self._model.state_dict(keep_vars=True))

    def aliases(self) -> dict[str, str]:
        """Return the names in the model's state dict that share the tensor of another name."""
        named = [*self._engine.named, *self._engine.buffers.named()]
        first: dict[int, str] = {id(tensor): name for name, tensor in reversed(named)}
        state = self._model.state_dict(keep_vars=True)
        return {name: first[id(t)] for name, t in state.items() if id(t) in first and first[id(t)] != name}


def _adopt_strides(optimizer: Optimizer) -> None:
    """Give each tensor of the optimizer's state the strides of its parameter, as it has them in a run that was never interrupted.

    A state arrives in contiguous tensors. If a parameter has other strides (channels_last), torch's kernels would add it to them
    element by element, and round bfloat16 numbers differently than for tensors of equal strides.
    """
    for param, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                values[key] = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
