"""Checksums of tensors: equal bytes give equal sums, on a CPU and on a GPU; one changed word, or two swapped ones, do not.

Hand-written because hashlib and zlib read host memory alone, byte by byte: these sums are tensor operations, which run at the speed
of memory on the device that holds the tensor.

The bytes, padded with zeros to complete rows, are a matrix of 64-bit words, 1024 to a row. The sums of its rows and of its
columns, modulo 2**64, and the length are hashed with SHA-256, of which 32 hexadecimal digits are kept. A single changed word always
changes the sum of its row and of its column. Two words that are swapped, or that swap bytes, differ in row or in column, so one
sum changes. A checksum finds accidents. It does not protect against somebody who constructs two tensors with equal checksums.
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
"""Small enough for the cache of one core: both sums together read it from memory once."""


class Checksum:
    """The checksum of bytes on the host that are added piece by piece, in order."""

    def __init__(self) -> None:
        self._columns = torch.zeros(WORDS, dtype=torch.int64)
        self._sha = hashlib.sha256()
        self._bytes = 0

    def add(self, piece: Tensor) -> None:
        """Add a flat uint8 tensor. Every piece but the last must consist of complete rows."""
        self._bytes += piece.numel()
        for chunk in piece.split(CHUNK_BYTES):
            words = _words(chunk)
            self._columns += words.sum(0)
            self._sha.update(_raw(words.sum(1)))

    def digest(self) -> str:
        return _digest(self._sha, self._columns, self._bytes)


def checksum(tensor: Tensor) -> str:
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Return the checksum of each tensor. Tensors on a GPU are summed there, and the host waits for them once."""
    on_gpu = [_words(_flat_bytes(tensor)) for tensor in tensors if tensor.is_cuda]
    sums = torch.cat([each for words in on_gpu for each in (words.sum(1), words.sum(0))]).cpu() if on_gpu else torch.empty(0)
    lengths = [length for words in on_gpu for length in (len(words), WORDS)]
    rows_and_columns = iter(sums.split(lengths))
    found: list[str] = []
    for tensor in tensors:
        if tensor.is_cuda:
            rows, columns = next(rows_and_columns), next(rows_and_columns)
            found.append(_digest(hashlib.sha256(_raw(rows)), columns, tensor.nbytes))
        else:
            one = Checksum()
            one.add(_flat_bytes(tensor))
            found.append(one.digest())
    return found


def _digest(sha: hashlib._Hash, columns: Tensor, nbytes: int) -> str:
    """``sha`` has been fed with the sums of the rows."""
    sha.update(_raw(columns))
    sha.update(nbytes.to_bytes(8, "little"))
    return sha.hexdigest()[:32]


def _flat_bytes(tensor: Tensor) -> Tensor:
    return bits(tensor.detach().contiguous())


def _words(flat: Tensor) -> Tensor:
    """Return rows of words. The bytes are copied only if the last row is incomplete or the address is not a multiple of 8."""
    rows = -(-flat.numel() // ROW_BYTES)
    if flat.numel() != rows * ROW_BYTES or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = torch.zeros(rows * ROW_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64).view(rows, WORDS)


def _raw(words: Tensor) -> bytes:
    words = words.contiguous()
    return ctypes.string_at(words.data_ptr(), words.nbytes)
