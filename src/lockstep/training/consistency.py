"""What must be equal on every worker of a run: verified, and where one word must count, taken from rank 0. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes, require_equal, require_same_model
from lockstep.comm.plain_state import digest, empty_tensors, flatten, unflatten
from lockstep.errors import UsageError
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training.step_gate import StepGate


class Consistency:
    """Every difference is a ``UsageError`` that names it, the same on every rank. ``settings``: what must be equal besides."""

    def __init__(self, comm: Comm, engine: LaneEngine, gate: StepGate, device: torch.device, settings: Mapping[str, Any]) -> None:
        self._comm, self._engine, self._gate, self._device, self._settings = comm, engine, gate, device, settings
        self._trainable = engine.trainable()

    def rebind(self, comm: Comm) -> None:
        self._comm = comm
        self._trainable = self._engine.trainable()

    def require_same(self) -> None:
        """Before anything is shared: the model's layout and all that defines the arithmetic."""
        on_host = all(not param.is_cuda for param in self._engine.params)
        settings = {
            **self._settings,
            "threads": torch.get_num_threads() if self._settings["exact"] and on_host else "any",
            "torch": torch.__version__,
            "objects": self._gate.names(),
        }
        require_same_model(self._comm, self._engine.named, self._engine.buffers.named(), settings)

    def share_state(self) -> None:
        """Rank 0's parameters, buffers, and whatever optimizers and schedulers hold already, to all."""
        tensors = [*(p for _, p in self._engine.named), *self._engine.buffers.tensors()]
        broadcast_in_place(self._comm, tensors, 0, "the initial parameters")
        if self._comm.size == 1:
            return
        is_main = self._comm.rank == 0
        for name, each in zip(self._gate.names(), self._gate.objects, strict=True):
            skeleton, held = flatten(each.state_dict(), f"the state of {name}")
            prints = gather_bytes(self._comm, digest(skeleton, held), f"the fingerprint of {name}")
            if len(set(prints)) == 1:
                continue
            texts = gather_bytes(self._comm, skeleton.encode() if is_main else b"", f"the state of {name}")
            if not is_main:
                skeleton = texts[0].decode()
                held = empty_tensors(skeleton, str(self._device))
            broadcast_in_place(self._comm, held, 0, f"the state of {name}")
            if not is_main:
                each.load_state_dict(unflatten(skeleton, held))

    def compare_trainable(self) -> None:
        """Where parameters were frozen or unfrozen since the last step."""
        trainable = self._engine.trainable()
        if trainable != self._trainable:
            require_equal(
                self._comm,
                [["trainable", "parameter", name] for name in trainable],
                "train different parameters",
                "Freeze and unfreeze the same parameters at the same step on every worker.",
            )
            self._trainable = trainable

    def compare_buffers(self, step: int) -> None:
        require_equal(
            self._comm,
            self._engine.buffer_fingerprints(),
            f"began step {step} with different buffers",
            "Something outside a lane's forward and backward changes them, differently on each worker: a second forward in train "
            "mode after backward(), say. Do that in eval mode, or before backward().",
        )

    def settings_differ(self, step: int, rank: int | None) -> None:
        """The control words say so (of ``rank``), or they changed here between two lanes (None)."""
        if rank is None:
            raise UsageError(
                f"learning rates (or other hyperparameters) changed between two lanes of step {step}: how often that happens "
                "depends on the number of workers. Pass the scheduler to Run after the optimizer, or change them under run.every."
            )
        rows = [["hyperparameters of group", str(k), str(values)] for k, values in enumerate(self._gate.describe())]
        require_equal(
            self._comm,
            rows,
            f"step differently in step {step}",
            "Change learning rates only by what is equal on every worker: a schedule, or the result of run.evaluate.",
        )
