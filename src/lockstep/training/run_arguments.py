"""RunArguments: what ``lockstep.Run`` was given, checked before anything is constructed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.comm.base import Comm
from lockstep.errors import UsageError
from lockstep.observe.log import Sink
from lockstep.observe.named_trackers import make_trackers
from lockstep.observe.trackers import Tracker


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The arguments of ``lockstep.Run``, under the names they have there. ``objects``: the optimizers and schedulers.

    Raises:
        UsageError: If an argument cannot work, on construction.
    """

    model: nn.Module
    objects: tuple[Any, ...]
    lanes: int | None
    exact: bool
    seed: int
    threads: int | None
    comm: Comm | str | None
    bucket_mb: float
    reduce_dtype: torch.dtype | None
    timeout_s: float
    log_every: int
    on_log: Sink | None
    track: Sequence[str | Tracker]
    checkpoint: str | os.PathLike[str] | None
    every: str
    keep: int
    resume: str | os.PathLike[str]
    override: Sequence[str]
    verify_every: int
    trackers: list[Tracker] = field(init=False)
    """A tracker for each name and object in ``track``."""

    def __post_init__(self) -> None:
        self._check_model()
        self._check_numbers()
        self._check_reduce_dtype()
        self._check_checkpoint()
        object.__setattr__(self, "trackers", make_trackers(self.track))

    def _check_model(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UsageError(
                f"Run takes a torch.nn.Module first, not a {type(self.model).__name__}: lockstep.Run(model, optimizer, ...)."
            )
        for module in self.model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UsageError(
                    "the model has SyncBatchNorm, which talks to all workers in every forward, and they have different numbers of "
                    "lanes. Use BatchNorm: Run averages its statistics over lanes."
                )

    def _check_numbers(self) -> None:
        for name, value, least in (
            ("lanes", self.lanes, 1),
            ("threads", self.threads, 1),
            ("log_every", self.log_every, 1),
            ("verify_every", self.verify_every, 0),
        ):
            if value is not None and (not isinstance(value, int) or value < least):
                raise UsageError(f"{name}={value!r} is not a number of {least} or more. Pass a whole number.")
        if not isinstance(self.seed, int):
            raise UsageError(f"seed={self.seed!r} is not a whole number. Pass an int.")
        if not self.bucket_mb > 0 or not self.timeout_s > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} and timeout_s={self.timeout_s} must both be positive.")

    def _check_reduce_dtype(self) -> None:
        if self.reduce_dtype not in (None, torch.float32, torch.float64):
            raise UsageError(
                f"reduce_dtype={self.reduce_dtype!r} is not a dtype that makes sums more precise. Pass torch.float32, or None to "
                "add gradients in their own dtype."
            )

    def _check_checkpoint(self) -> None:
        if self.checkpoint is None and (self.resume != "auto" or self.override):
            given = f"resume={self.resume!r}" if self.resume != "auto" else f"override={self.override!r}"
            raise UsageError(
                f"{given} without checkpoint=: this run saves nothing, and has no folder to resume from. Name one: "
                'lockstep.Run(..., checkpoint="checkpoints").'
            )


def one_module(model: Any) -> Any:
    """Return one module that contains several models, given as a list or a dict. Anything else is returned as it is."""
    if isinstance(model, Mapping) and model and all(isinstance(each, nn.Module) for each in model.values()):
        return nn.ModuleDict(model)
    if isinstance(model, (list, tuple)) and model and all(isinstance(each, nn.Module) for each in model):
        return nn.ModuleList(model)
    return model
