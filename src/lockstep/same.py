"""Verifies that all ranks mean the same before they share anything. Collective."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError

Row = Sequence[str]
"""kind, name, value: "parameter", "body.weight", "shape [3, 4], ..." """

MODELS = "hold different models", "Build the same model with the same settings on every rank before replicating it."


def require_same(
    comm: Comm, params: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any]
) -> None:
    """Raise the same ``UsageError`` on every rank where names, shapes, strides, dtypes or requires_grad differ."""
    rows = [["setting", k, str(v)] for k, v in settings.items()] + [
        [kind, name, f"shape {list(t.shape)}, strides {list(t.stride())}, {t.dtype}, requires_grad={t.requires_grad}"]
        for kind, tensors in (("parameter", params), ("buffer", buffers))
        for name, t in tensors
    ]
    require_equal(comm, rows, *MODELS)


def require_equal(comm: Comm, rows: Sequence[Row], differ: str, remedy: str) -> None:
    """Raise the same ``UsageError`` on every rank, which names the first row in which one differs from rank 0."""
    if comm.size == 1:
        return
    text = json.dumps(rows).encode()
    prints = gather_bytes(comm, hashlib.sha256(text).digest(), "a fingerprint")
    if len(set(prints)) == 1:
        return
    everyone = [json.loads(each) for each in gather_bytes(comm, text, "what each rank has")]
    raise UsageError(describe_difference(everyone, differ, remedy))


def describe_difference(everyone: Sequence[Sequence[Row]], differ: str = MODELS[0], remedy: str = MODELS[1]) -> str:
    """The first difference between rank 0's rows and another rank's, both sides named. Pure."""
    for rank, other in enumerate(everyone):
        for at in range(max(len(everyone[0]), len(other))):
            mine = everyone[0][at] if at < len(everyone[0]) else None
            theirs = other[at] if at < len(other) else None
            if mine != theirs:
                return f"rank 0 and rank {rank} {differ}: rank 0 has {_show(mine)}, rank {rank} has {_show(theirs)}. {remedy}"
    return "the ranks differ in their fingerprints, but in no entry. This is a bug in Lockstep."


def _show(row: Row | None) -> str:
    return "nothing more" if row is None else f"{row[0]} {row[1]} ({row[2]})"
