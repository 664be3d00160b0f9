"""The safetensors format: a length, a JSON header, and the bytes of tensors without holes. Knows no files and no torch.

Written here, and not by the package of that name, because a checkpoint's file is written from one block of memory
behind the training, its tensors' places are known before their bytes are, and every length in it is checked when it is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import LockstepError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
MOST_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""


class Damaged(LockstepError):
    """A file of a checkpoint is not what was written. The message says which, and how that is known."""


@dataclass(frozen=True)
class Entry:
    """One tensor: what it is, and where its bytes lie in the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def count_bytes(dtype: str, shape: Sequence[int]) -> int:
    size = ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    return size


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """(name, dtype, shape) -> places without holes, each at a multiple of its items' size: the wide ones come first."""
    found: dict[str, Entry] = {}
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda each: -ITEM_BYTES[each[1]]):
        size = count_bytes(dtype, shape)
        found[name] = Entry(name, dtype, shape, at, at + size)
        at += size
    return [found[name] for name, _, _ in tensors]


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Everything before the data; its length is a multiple of 8. A dtype that the format does not know is written as bytes."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        code = _CODES.get(entry.dtype)
        shape = list(entry.shape) if code is not None else [entry.end - entry.begin]
        table[entry.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_bytes(first_eight: bytes, file_bytes: int, file: str) -> int:
    """How long the header is, with its length, from the file's first eight bytes."""
    if len(first_eight) < 8:
        raise Damaged(f"{file} has {len(first_eight)} bytes: it was cut off")
    (size,) = struct.unpack("<Q", first_eight)
    if size > min(MOST_HEADER_BYTES, file_bytes - 8):
        raise Damaged(f"{file} says that its header has {size} bytes; the whole file has {file_bytes}")
    return 8 + int(size)
