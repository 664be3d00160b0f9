"""A tensor's checksum, as fast as memory: equal bytes give equal sums, on a CPU and on a GPU; one changed, or two swapped, do not.

The bytes (padded with zeros to whole rows) are a matrix of 64-bit words, 1024 to a row. The sums of its rows and of its
columns, modulo 2**64, and the length go through SHA-256; 32 hexadecimal digits are kept. A single changed word changes its row's
and its column's sum, always; of two words that change places, or exchange bytes, at least one of row and column differs, so one sum
changes. It finds accidents. It is no defence against somebody who wants two tensors to have one sum.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import bits

WORDS = 1024
ROW_BYTES = 8 * WORDS
CHUNK_BYTES = 128 * ROW_BYTES
"""Small enough for a core's cache: both sums read it once from memory."""


class Sum:
    """A checksum in the making: bytes on the host, in order."""

    def __init__(self) -> None:
        self._columns = torch.zeros(WORDS, dtype=torch.int64)
        self._rows = hashlib.sha256()
        self._bytes = 0

    def add(self, piece: Tensor) -> None:
        """``piece``: flat uint8. All but the last must be whole rows."""
        self._bytes += piece.numel()
        for chunk in piece.split(CHUNK_BYTES):
            words = _words(chunk)
            self._columns += words.sum(0)
            self._rows.update(_raw(words.sum(1)))

    def digest(self) -> str:
        self._rows.update(_raw(self._columns))
        self._rows.update(self._bytes.to_bytes(8, "little"))
        return self._rows.hexdigest()[:32]


def checksum(tensor: Tensor) -> str:
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """One for each. Those on a GPU are summed there, and wait once for all of them."""
    far = [(_words(_bits(t)), t.nbytes) for t in tensors if t.is_cuda]
    sums = torch.cat([each for words, _ in far for each in (words.sum(1), words.sum(0))]).cpu() if far else None
    found: list[str] = []
    at = 0
    there = iter(far)
    for tensor in tensors:
        if tensor.is_cuda:
            assert sums is not None
            words, nbytes = next(there)
            rows, columns = sums[at : at + len(words)], sums[at + len(words) : at + len(words) + WORDS]
            at += len(words) + WORDS
            sha = hashlib.sha256(_raw(rows))
            sha.update(_raw(columns))
            sha.update(nbytes.to_bytes(8, "little"))
            found.append(sha.hexdigest()[:32])
        else:
            one = Sum()
            one.add(_bits(tensor))
            found.append(one.digest())
    return found


def _bits(tensor: Tensor) -> Tensor:
    return bits(tensor.detach().contiguous())


def _words(flat: Tensor) -> Tensor:
    """Rows of words; copied only where the end is ragged or the address is odd."""
    rows = -(-flat.numel() // ROW_BYTES)
    if flat.numel() != rows * ROW_BYTES or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = torch.zeros(rows * ROW_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64).view(rows, WORDS)


def _raw(words: Tensor) -> bytes:
    words = words.contiguous()
    return ctypes.string_at(words.data_ptr(), words.nbytes)
