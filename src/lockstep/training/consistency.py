"""Consistency: compares what must be equal on every worker, and shares rank 0's initial state. Every method is collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.comm.exchange import broadcast_in_place, gather_bytes, require_equal, require_same_model
from lockstep.comm.plain_state import digest, empty_tensors, flatten, unflatten
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training.step_gate import StepGate


class Consistency:
    """Each difference is a ``UsageError`` that names it, the same on every rank.

    ``settings`` holds the settings of the run that define the arithmetic, such as ``lanes`` and ``seed``.
    """

    def __init__(
        self, workers: WorkerGroup, engine: LaneEngine, gate: StepGate, device: torch.device, settings: Mapping[str, Any]
    ) -> None:
        self._workers, self._engine, self._gate, self._device, self._settings = workers, engine, gate, device, settings
        self._agreed = {tuple(engine.trainable())}  # the sets of trained parameters that were compared

    def new_generation(self) -> None:
        """Forget what the workers of the last generation agreed on."""
        self._agreed = {tuple(self._engine.trainable())}

    def require_same(self) -> None:
        """Compare the model's layout and the settings, before anything is shared."""
        on_host = all(not param.is_cuda for param in self._engine.params)
        settings = {
            **self._settings,
            "threads": torch.get_num_threads() if self._settings["exact"] and on_host else "any",
            "torch": torch.__version__,
            "objects": self._gate.names(),
        }
        require_same_model(self._workers.comm, self._engine.named, self._engine.buffers.named(), settings)

    def share_state(self) -> None:
        """Give rank 0's parameters, buffers, optimizer and scheduler states to all workers."""
        comm = self._workers.comm
        tensors = [*(p for _, p in self._engine.named), *self._engine.buffers.tensors()]
        broadcast_in_place(comm, tensors, 0, "the initial parameters")
        if comm.size == 1:
            return
        for name, each in zip(self._gate.names(), self._gate.objects, strict=True):
            skeleton, held = flatten(each.state_dict(), f"the state of {name}")
            digests = gather_bytes(comm, digest(skeleton, held), f"the fingerprint of {name}")
            if len(set(digests)) == 1:
                continue
            texts = gather_bytes(comm, skeleton.encode() if comm.rank == 0 else b"", f"the state of {name}")
            if comm.rank != 0:
                skeleton = texts[0].decode()
                held = empty_tensors(skeleton, str(self._device))
            broadcast_in_place(comm, held, 0, f"the state of {name}")
            if comm.rank != 0:
                each.load_state_dict(unflatten(skeleton, held))

    def compare_trainable(self) -> None:
        """Compare which parameters are trained, if this worker trains a set of them for the first time in this generation."""
        trainable = tuple(self._engine.trainable())
        if trainable not in self._agreed:
            require_equal(
                self._workers.comm,
                [["trainable", "parameter", name] for name in trainable],
                "train different parameters",
                "Freeze and unfreeze the same parameters at the same step on every worker.",
            )
            self._agreed.add(trainable)

    def compare_data(self, arguments: Mapping[str, Any]) -> None:
        """Compare the arguments of ``run.shard`` at the beginning of a loop."""
        require_equal(
            self._workers.comm,
            [["argument", name, str(value)] for name, value in arguments.items()],
            "are about to train on different data",
            "Pass the same dataset and arguments to run.shard on every worker.",
        )

    def compare_order(self, fingerprint: int) -> None:
        """Compare the order of the samples in an epoch."""
        require_equal(
            self._workers.comm,
            [["order", "of the samples", f"fingerprint {fingerprint:08x}"]],
            "have samplers that disagree",
            "A sampler must give the same order on every worker: seed it alike, or pass shuffle=True instead.",
        )

    def compare_buffers(self, step: int) -> None:
        """Compare the model's buffers (BatchNorm statistics) after ``step`` steps."""
        require_equal(
            self._workers.comm,
            self._engine.buffer_fingerprints(),
            f"began step {step} with different buffers",
            "Code outside the forward and backward of a lane changes them, differently on each worker: for example a second "
            "forward in train mode after backward(). Run it in eval mode, or before backward().",
        )

    def settings_differ(self, step: int, rank: int | None) -> None:
        """Report that hyperparameters differ in a step.

        Args:
            step: The step.
            rank: The first rank whose control word differs from rank 0's, on every rank alike. None: they changed between two
                lanes on this worker.

        Raises:
            UsageError: Always, with the first hyperparameter that differs.
        """
        if rank is None:
            raise UsageError(
                f"learning rates (or other hyperparameters) changed between two lanes of step {step}: how often that happens "
                "depends on the number of workers. Pass the scheduler to Run after the optimizer, or change them under run.every."
            )
        require_equal(
            self._workers.comm,
            [["hyperparameters of group", str(k), str(values)] for k, values in enumerate(self._gate.describe())],
            f"step differently in step {step}",
            "Change learning rates only by what is equal on every worker: a schedule, or the result of run.evaluate.",
        )
