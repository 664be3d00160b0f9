"""Verifies that all ranks hold the same model before they share anything. Collective."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError


def require_same(
    comm: Comm, params: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any]
) -> None:
    """Raise the same ``UsageError`` on every rank where names, shapes, strides, dtypes or requires_grad differ."""
    if comm.size == 1:
        return
    rows = [["setting", k, str(v)] for k, v in settings.items()] + [
        [kind, name, f"shape {list(t.shape)}, strides {list(t.stride())}, {t.dtype}, requires_grad={t.requires_grad}"]
        for kind, tensors in (("parameter", params), ("buffer", buffers))
        for name, t in tensors
    ]
    text = json.dumps(rows).encode()
    prints = gather_bytes(comm, hashlib.sha256(text).digest(), "the layout's fingerprint")
    if len(set(prints)) == 1:
        return
    layouts = [json.loads(each) for each in gather_bytes(comm, text, "the layouts")]
    raise UsageError(describe_difference(layouts))


def describe_difference(layouts: Sequence[Sequence[Sequence[str]]]) -> str:
    """The first difference between rank 0's rows and another rank's, both sides named. Pure."""
    for rank, other in enumerate(layouts):
        for at in range(max(len(layouts[0]), len(other))):
            mine = layouts[0][at] if at < len(layouts[0]) else None
            theirs = other[at] if at < len(other) else None
            if mine != theirs:
                return (
                    f"rank 0 and rank {rank} hold different models: rank 0 has {_show(mine)}, rank {rank} has {_show(theirs)}. "
                    "Build the same model with the same settings on every rank before replicating it."
                )
    return "the ranks' models differ in their fingerprints, but in no entry. This is a bug in Lockstep."


def _show(row: Sequence[str] | None) -> str:
    return "nothing more" if row is None else f"{row[0]} {row[1]} ({row[2]})"
