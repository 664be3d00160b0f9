"""ScriptValues: what the script can read of the run outside its loops, and decide by: run.state, run.logged, run.epoch_means.

A worker that replays the script must read what the run held at that place, or it would take another branch: stop early, or raise a
KeyError. So copies of these values are kept at the end of each loop and at the beginning of each epoch (progress.py: results).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.comm.plain_state import buffer_of, from_bytes, to_bytes
from lockstep.observe.log import LaneLog
from lockstep.training.user_state import UserState


class ScriptValues:
    """``device`` is where tensors are put that were not on the host."""

    def __init__(self, state: UserState, log: LaneLog, device: torch.device) -> None:
        self._state, self._log, self._device = state, log, device

    def copy(self) -> dict[str, Any]:
        """Return a copy, as plain data. It has at most one tensor: there is a copy for each loop of the script."""
        skeleton, content = to_bytes(self._state.capture(), "run.state")
        tensors = [torch.frombuffer(bytearray(content), dtype=torch.uint8)] if content else []
        return {"state": skeleton, "tensors": tensors, **self._log.averages()}

    def adopt(self, copied: Mapping[str, Any]) -> None:
        """Replace the values by what ``copy`` returned."""
        content = b"".join(bytes(buffer_of(tensor)) for tensor in copied["tensors"])
        self._state.restore(from_bytes(copied["state"], content, str(self._device)))
        self._log.adopt_averages(copied)

    def forget_state(self) -> None:
        """Empty run.state, as it is at the beginning of a run."""
        self._state.restore({})

    def start_epoch(self, step: int) -> None:
        """An epoch of ``run.epochs`` begins after ``step`` steps."""
        self._log.start_epoch(step)
