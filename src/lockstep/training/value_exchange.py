"""Values of the user exchanged between steps: ``run.gather``, ``run.mean``, ``run.broadcast``. Every function is collective.

Values are plain data (comm/plain_state.py). Tensors are returned on the host, the same on every worker.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import from_bytes, to_bytes
from lockstep.errors import UsageError


def gather_values(comm: Comm, value: Any, call: str) -> list[Any]:
    """Return every worker's value, by rank. ``call`` names the caller in errors, such as "run.gather(...)"."""
    skeleton, content = to_bytes(value, f"the value given to {call}")
    skeletons = gather_bytes(comm, skeleton.encode(), f"{call}: the kind of each value")
    contents = gather_bytes(comm, content, call) if any(b'"tensor"' in each for each in skeletons) else [b""] * comm.size
    return [from_bytes(text.decode(), each) for text, each in zip(skeletons, contents, strict=True)]


def mean_of_values(comm: Comm, value: Any) -> Any:
    """Return the mean of every worker's number or tensor, added in the order of the ranks.

    Raises:
        UsageError: The value is something else, or has another kind or shape on another worker.
    """
    if not isinstance(value, (int, float, Tensor)):
        raise UsageError(
            f"run.mean(...) cannot average a {type(value).__name__}. Pass a number or a tensor; run.gather(...) takes other values."
        )
    values = gather_values(comm, value, "run.mean(...)")
    kinds = [f"a tensor of {each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else "a number" for each in values]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UsageError(
                f"run.mean(...) cannot average {kinds[0]} of rank 0 and {kind} of rank {rank}. Pass the same kind and shape on "
                "every worker."
            )
    if not isinstance(value, Tensor):
        return float(values[0]) if values.count(values[0]) == len(values) else math.fsum(values) / len(values)
    if values[0].is_floating_point() and all(torch.equal(each, values[0]) for each in values):
        return values[0]
    if values[0].is_floating_point() or values[0].is_complex():
        dtype, wide = values[0].dtype, torch.complex128 if values[0].is_complex() else torch.float64
    else:
        dtype, wide = torch.get_default_dtype(), torch.float64
    total = values[0].to(wide)
    for each in values[1:]:
        total = total + each.to(wide)
    return (total / len(values)).to(dtype)


def broadcast_value(comm: Comm, value: Any, source: int) -> Any:
    """Return the value of rank ``source``.

    Raises:
        UsageError: There is no such rank.
    """
    if not isinstance(source, int) or not 0 <= source < comm.size:
        raise UsageError(
            f"run.broadcast(..., source={source!r}): there is no such rank, the run has {comm.size} now. Workers come and go, so "
            "source=0 is the only rank that there always is."
        )
    return gather_values(comm, value if comm.rank == source else None, "run.broadcast(...)")[source]
