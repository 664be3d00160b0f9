"""Reads a checkpoint's tensors and verifies every byte of them on the way. Nothing that is read can run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from lockstep.checkpoint.checksum import CHUNK_BYTES, Sum
from lockstep.checkpoint.manifest import INDEX, File, Manifest, Stored
from lockstep.checkpoint.snapshot import memory_of
from lockstep.checkpoint.storage import Source, Storage
from lockstep.checkpoint.tensor_file import Damaged, header_bytes
from lockstep.comm.base import bits

_MOST_THREADS = 4
_PIECE_BYTES = 4 * CHUNK_BYTES


def read_tensors(
    storage: Storage, folder: str, manifest: Manifest, into: Mapping[int, Tensor] | None = None, only: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """Number -> tensor on the host, of all (or ``only`` some). ``into``: memory to use for some of them, contiguous, of that
    dtype and shape; it holds anything after an error. ``Damaged`` where a byte is not what was written, or a file is not there.
    """
    wanted = range(len(manifest.tensors)) if only is None else only
    with ExitStack() as opened:
        sources: dict[str, Source] = {}
        for name, file in manifest.files.items():
            sources[name] = opened.enter_context(closing(_open(storage, folder, name, file)))
        found = {number: (into or {}).get(number, _empty(manifest.tensors[number])) for number in wanted}
        largest_first = sorted(wanted, key=lambda number: -manifest.tensors[number].bytes)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            jobs = [(manifest.tensors[n], sources[manifest.tensors[n].file], found[n]) for n in largest_first]
            for _ in pool.map(_read, *zip(*jobs, strict=True)) if jobs else ():
                pass
    return found


def _empty(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))


def _open(storage: Storage, folder: str, name: str, file: File) -> Source:
    """Its size and header are those that were written."""
    try:
        source = storage.open(folder, name)
    except OSError as error:
        raise Damaged(f"{name} cannot be opened ({error.strerror or error})") from None
    try:
        if source.size != file.bytes:
            raise Damaged(f"{name} has {source.size} bytes; {file.bytes} were written")
        head = _bytes(source, 0, file.head, name)
        if name != INDEX and header_bytes(head[:8], source.size, name) != file.head:
            raise Damaged(f"{name} says that its header has another length")
        if hashlib.sha256(head).hexdigest() != file.head_sha256:
            raise Damaged(f"the header of {name} is not the one that was written")
    except BaseException:
        source.close()
        raise
    return source


def _read(stored: Stored, source: Source, target: Tensor) -> None:
    """In pieces that are summed while they are still in the core's cache."""
    flat, total = bits(target.detach()), Sum()
    for begin in range(0, flat.numel(), _PIECE_BYTES):
        piece = flat[begin : begin + _PIECE_BYTES]
        try:
            came = source.read_into(stored.begin + begin, memory_of(piece))
        except OSError as error:
            raise Damaged(f"{stored.file} cannot be read at tensor {stored.name} ({error.strerror or error})") from None
        if came != piece.numel():
            raise Damaged(f"{stored.file} ends inside tensor {stored.name}")
        total.add(piece)
    if total.digest() != stored.sum:
        raise Damaged(f"tensor {stored.name} in {stored.file} is not what was written: its checksum differs")


def _bytes(source: Source, begin: int, count: int, name: str) -> bytes:
    data = bytearray(count)
    try:
        came = source.read_into(begin, memoryview(data))
    except OSError as error:
        raise Damaged(f"{name} cannot be read ({error.strerror or error})") from None
    if came != count:
        raise Damaged(f"{name} ends inside its header")
    return bytes(data)
