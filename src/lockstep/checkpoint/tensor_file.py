"""The safetensors format: a length, a JSON header, and the bytes of tensors without gaps. Knows neither files nor torch.

Hand-written because the package ``safetensors`` serializes all tensors of a file at once: we write from one block of memory in
a background thread, know every tensor's position before its bytes, and check every length when we read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import LockstepError

ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
_CODES = {
    **{f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
    **{"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL"},
}
"""The names of dtypes in the format. It has none for complex numbers."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the package ``safetensors``."""


class DamagedCheckpointError(LockstepError):
    """A file of a checkpoint does not hold what was written. The message says which file, and the evidence."""


@dataclass(frozen=True)
class Entry:
    """One tensor, and the position of its bytes in the data of its file (after the header)."""

    number: int
    """The caller's number for the tensor."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def count_bytes(dtype: str, shape: Sequence[int]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def place_tensors(tensors: Sequence[tuple[int, str, str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """Give every (number, name, dtype, shape) a position. Wide items come first: so all are aligned without gaps between them."""
    entries: list[Entry] = []
    begin = 0
    for number, name, dtype, shape in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor[2]]):
        end = begin + count_bytes(dtype, shape)
        entries.append(Entry(number, name, dtype, shape, begin, end))
        begin = end
    return tuple(entries)


def make_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return all that precedes the data, padded to a multiple of 8 bytes. Dtypes without a code are declared as bytes (U8)."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        code = _CODES.get(entry.dtype)
        shape = list(entry.shape) if code is not None else [entry.end - entry.begin]
        table[entry.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_bytes(first_eight: bytes, file_bytes: int, file: str) -> int:
    """Return the length of a file's header, which its first eight bytes tell. They are counted too."""
    if len(first_eight) < 8:
        raise DamagedCheckpointError(f"{file} has {len(first_eight)} bytes: its end is missing")
    (size,) = struct.unpack("<Q", first_eight)
    if size > min(MAX_HEADER_BYTES, file_bytes) - 8:
        raise DamagedCheckpointError(f"{file} says that its header has {size} bytes, but the file has {file_bytes}")
    return 8 + int(size)
