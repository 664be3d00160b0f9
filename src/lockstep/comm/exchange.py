"""Exchanges built from a Comm's operations: bytes from every rank, many tensors from one rank, comparisons of all ranks.

Knows nothing of gradients. All ranks must call every function here.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Pending, bits
from lockstep.errors import InvariantError, UsageError

Row = Sequence[str]
"""One line of a comparison: kind, name, value. For example "parameter", "body.weight", "shape [3, 4], ..."."""

MESSAGE_BYTES = 64 << 20
_SHORT_BYTES = 248
"""Payloads up to this length travel together with their lengths: one operation instead of two."""


def gather_bytes(comm: Comm, payload: bytes, what: str) -> list[bytes]:
    """Return every rank's payload, by rank. Lengths may differ. Payloads are never unpickled.

    Raises:
        UsageError: On every rank, if a rank is in another call: an ``all_gather`` compares ``what`` before its data is used.
    """
    first = len(payload).to_bytes(8, "little") + payload[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
    heads = _gather_equal(comm, first, what)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longest, rests = max(lengths) - _SHORT_BYTES, [b""] * comm.size
    if longest > 0:
        rests = _gather_equal(comm, payload[_SHORT_BYTES:].ljust(longest, b"\0"), f"{what} (its rest)")
    return [(head[8:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]


def _gather_equal(comm: Comm, payload: bytes, what: str) -> list[bytes]:
    """Return every rank's payload; all have the same length."""
    everyone = torch.empty(comm.size, len(payload), dtype=torch.uint8)
    comm.all_gather(everyone, torch.frombuffer(bytearray(payload), dtype=torch.uint8), what).wait()
    return [ctypes.string_at(everyone[r].data_ptr(), len(payload)) for r in range(comm.size)]


class Broadcast:
    """Many tensors from rank ``source`` to all ranks, in few messages. Constructing it starts the broadcast, ``finish`` ends it.

    Each message contains tensors of one dtype and device, so that many small tensors cost little.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor], source: int, what: str) -> None:
        self._receives = comm.rank != source
        self._messages: list[tuple[list[Tensor], Tensor, Pending]] = []
        for group in _group_into_messages(tensors):
            flat = torch.cat([t.detach().reshape(-1) for t in group])
            self._messages.append((group, flat, comm.broadcast(bits(flat), source, what)))

    def finish(self, write: Callable[[Tensor, Tensor], object]) -> None:
        """Wait for the messages; on receiving ranks call ``write(tensor, received)`` for each tensor. Raises ``PeerError``."""
        for group, flat, pending in self._messages:
            pending.wait()
            if self._receives:
                parts = flat.split([t.numel() for t in group])
                for tensor, part in zip(group, parts, strict=True):
                    write(tensor, part.view(tensor.shape))


def broadcast_in_place(comm: Comm, tensors: Sequence[Tensor], source: int, what: str) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, one message at a time, so that little extra memory is needed.

    Raises:
        PeerError: A worker was lost before this rank had all tensors: those of this rank must not be used.
        UsageError: On every rank, if a rank is in another call.
    """
    if comm.size == 1:
        return
    comm.barrier(what)  # compares ``what``, which a broadcast cannot
    with torch.no_grad():
        for group in _group_into_messages(tensors):
            Broadcast(comm, group, source, what).finish(Tensor.copy_)
    comm.await_device()


def _group_into_messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype; a group has at most MESSAGE_BYTES unless it is a single tensor."""
    full: list[list[Tensor]] = []
    growing: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        key = (tensor.device, tensor.dtype)
        group, nbytes = growing.get(key, ([], 0))
        if group and nbytes + tensor.nbytes > MESSAGE_BYTES:
            full.append(group)
            group, nbytes = [], 0
        group.append(tensor)
        growing[key] = (group, nbytes + tensor.nbytes)
    return full + [group for group, _ in growing.values()]


def require_equal(comm: Comm, rows: Sequence[Row], differ: str, remedy: str) -> None:
    """Compare ``rows`` with every rank's.

    Args:
        comm: The comm of all ranks to compare.
        rows: What must be equal on all ranks.
        differ: Completes the error "rank 0 and rank 2 ...", for example "have different models".
        remedy: What the user should do; the last sentence of the error.

    Raises:
        UsageError: On every rank, with the first row in which a rank differs from rank 0.
    """
    if comm.size == 1:
        return
    text = json.dumps(rows).encode()
    check = f"the check whether ranks {differ}"
    digests = gather_bytes(comm, hashlib.sha256(text).digest(), check)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(each) for each in gather_bytes(comm, text, f"{check} (in detail)")]
    raise UsageError(f"{_describe_difference(everyone, differ)}. {remedy}")


def require_same_model(
    comm: Comm, params: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any]
) -> None:
    """Compare the names and layouts of the model's tensors, and ``settings``, on all ranks.

    Raises:
        UsageError: On every rank, if a name, shape, stride, dtype, requires_grad or setting differs.
    """
    rows = [["setting", k, str(v)] for k, v in settings.items()] + [
        [kind, name, f"shape {list(t.shape)}, strides {list(t.stride())}, {t.dtype}, requires_grad={t.requires_grad}"]
        for kind, tensors in (("parameter", params), ("buffer", buffers))
        for name, t in tensors
    ]
    require_equal(
        comm, rows, "have different models", "Build the same model with the same settings on every rank before replicating it."
    )


def _describe_difference(everyone: Sequence[Sequence[Row]], differ: str) -> str:
    """Name the first row in which a rank differs from rank 0, with both values."""
    for rank, other in enumerate(everyone):
        for index in range(max(len(everyone[0]), len(other))):
            mine = everyone[0][index] if index < len(everyone[0]) else None
            theirs = other[index] if index < len(other) else None
            if mine != theirs:
                return f"rank 0 and rank {rank} {differ}: rank 0 has {_show(mine)}, rank {rank} has {_show(theirs)}"
    raise InvariantError("the digests of the ranks differ, but no row does")


def _show(row: Row | None) -> str:
    return "nothing more" if row is None else f"{row[0]} {row[1]} ({row[2]})"
