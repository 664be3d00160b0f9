"""Reads the file that wandb writes on this machine (``run-ID.wandb``): which steps of the history it holds.

wandb hands records to a process of its own (wandb-core), which writes them a little later, and ends when this worker ends. So only
the file says what survives this worker. wandb offers no function that reads it; its command ``wandb leet inspect`` does.

The file is a LevelDB log: blocks of 32 KiB with chunks [checksum, length, type, data], and a record is one chunk or several:

    | ":W&B" magic version | chunk | chunk | ... | zeros | chunk | ...
    0                      7                             32768
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_CHUNK_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbFile:
    """One file, which may grow. ``last_step`` is the last step that was found in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = _FILE_HEADER_BYTES
        """Where the first record begins that was not read yet."""
        self.last_step = 0

    def read_on(self) -> int:
        """Read what was written since the last call, and return the last step. A record that is not whole yet is left for later."""
        from wandb.proto.wandb_internal_pb2 import Record

        block = self._at - self._at % _BLOCK_BYTES
        with self._path.open("rb") as file:
            file.seek(block)
            content = file.read()
        for end, data in _records(content, self._at - block):
            self._at = block + end
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                self.last_step = max(self.last_step, _step_of(record.history))
        return self.last_step


def _step_of(history: Any) -> int:
    for item in history.item:
        if (item.key or "/".join(item.nested_key)) == "_step":
            return int(item.value_json)
    return int(history.step.num)


def _records(content: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record from ``at`` on, and where it ends. ``content`` begins with a block. Pure."""
    parts: list[bytes] = []
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _CHUNK_HEADER_BYTES:
            at += left
            continue
        if at + _CHUNK_HEADER_BYTES > len(content):
            return
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + _CHUNK_HEADER_BYTES : at + _CHUNK_HEADER_BYTES + length]
        if len(data) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            return
        at += _CHUNK_HEADER_BYTES + length
        parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
        if kind in (_FULL, _LAST):
            yield at, b"".join(parts)
            parts = []
