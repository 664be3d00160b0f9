"""Reads checkpoints: the newest intact one when a run resumes, and the tensors of one. Verifies every byte; executes nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.checksum import CHUNK_BYTES, Checksum
from lockstep.checkpoint.manifest import INDEX, Manifest, StoredFile, StoredTensor
from lockstep.checkpoint.retention import CheckpointFolder, Retention
from lockstep.checkpoint.snapshot import memory_of
from lockstep.checkpoint.storage import Storage, StorageFile
from lockstep.checkpoint.tensor_file import DamagedCheckpointError, header_bytes
from lockstep.comm.base import Comm, bits
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import dtype_name, unflatten
from lockstep.errors import UsageError

_MAX_THREADS = 4
_PIECE_BYTES = 4 * CHUNK_BYTES


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was read."""

    retention: Retention
    folder: CheckpointFolder
    manifest: Manifest
    state: dict[str, Any] = field(repr=False)


def read_newest(
    retention: Retention, comm: Comm, weights: Mapping[str, Tensor], settings: Mapping[str, Any], notify: Callable[[str], None]
) -> FoundCheckpoint | None:
    """Read the newest checkpoint that is intact on every worker. All workers must call it; each reads the files itself.

    The checkpoint must fit the model's ``weights`` and the run's ``settings``, else a ``UsageError`` is raised, as it is if every
    checkpoint is damaged. Weights in contiguous host memory are read into directly. Rank 0 calls ``notify`` for each damaged one.
    Returns None if there is no checkpoint.
    """
    mine = b""
    if comm.rank == 0:
        mine = json.dumps([folder.name for folder in retention.published()]).encode()
        for name in retention.links():
            notify(f"{retention.storage.url}/{name} is a symbolic link, which is not followed. Put the folder itself there.")
    names = json.loads(gather_bytes(comm, mine, "which checkpoints there are")[0])
    damages: list[str] = []
    for name in names:
        folder = CheckpointFolder.parse(name)
        assert folder is not None
        found, damage = _read_together(retention, folder, comm, weights, settings)
        if found is not None:
            return found
        damages.append(damage)
        if comm.rank == 0:
            notify(f"the checkpoint {retention.storage.url}/{damages[-1]}. The checkpoint before it is used.")
    if damages:
        raise UsageError(
            f"every checkpoint in {retention.storage.url} is damaged. The newest: {damages[0]}. "
            "Restore one of them from a copy, or pass another checkpoint folder to start from the beginning."
        )
    return None


def read_one(
    retention: Retention, folder: CheckpointFolder, comm: Comm, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> FoundCheckpoint:
    """Read this checkpoint. All workers must call it. Raises ``UsageError`` on all of them if it is damaged on one."""
    found, damage = _read_together(retention, folder, comm, weights, settings)
    if found is None:
        raise UsageError(f"the checkpoint {retention.storage.url}/{damage}. `lockstep checkpoint list` shows others.")
    return found


def _read_together(
    retention: Retention, folder: CheckpointFolder, comm: Comm, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[FoundCheckpoint | None, str]:
    """Returns None, and what is damaged, if the checkpoint is not intact on every worker."""
    found, damage = None, ""
    try:
        found = read_state(retention, folder, weights, settings)
    except DamagedCheckpointError as error:
        damage = str(error)
    everyone = gather_bytes(comm, damage.encode(errors="backslashreplace"), "whether the checkpoint is intact")
    for rank, text in enumerate(everyone):
        if text:
            return None, f"{folder.name} is damaged: {text.decode()} (seen by rank {rank})"
    return found, ""


def read_state(
    retention: Retention, folder: CheckpointFolder, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> FoundCheckpoint:
    """Read a checkpoint. This worker does it alone. Raises ``DamagedCheckpointError``, or ``UsageError`` if it does not fit."""
    manifest = retention.manifest(folder)
    require_fit(manifest, weights, settings, f"{retention.storage.url}/{folder.name}")
    targets = {
        number: weights[name]
        for name, number in manifest.model.items()
        if name in weights and not weights[name].is_cuda and weights[name].is_contiguous() and weights[name].numel()
    }
    with torch.no_grad():
        tensors = read_tensors(retention.storage, folder.name, manifest, targets)
    try:
        state = unflatten(json.dumps(manifest.skeleton), [tensors[number] for number in range(len(manifest.tensors))])
        if not isinstance(state, dict):
            raise TypeError("the state is not a dict")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as error:
        raise DamagedCheckpointError(f"its skeleton cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
    return FoundCheckpoint(retention, folder, manifest, state)


def require_fit(manifest: Manifest, weights: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> None:
    """Raise a ``UsageError`` that names the first difference, if the checkpoint ``where`` is of another model or other settings."""
    tensors = {name: manifest.tensors[number] for name, number in manifest.model.items()}
    saved = {name: f"has shape {list(t.shape)} and dtype {t.dtype}" for name, t in tensors.items()}
    here = {name: f"has shape {list(t.shape)} and dtype {dtype_name(t.dtype)}" for name, t in weights.items()}
    for name in {**here, **saved}:
        if saved.get(name) != here.get(name):
            raise UsageError(
                f"the checkpoint {where} is of another model: {name} {saved.get(name, 'is missing')} in the checkpoint, and "
                f"{here.get(name, 'is missing')} in this model. Build the model that was saved, or pass another checkpoint folder."
            )
    for name, value in settings.items():
        before = manifest.settings.get(name)
        if before != value:
            raise UsageError(
                f"the checkpoint {where} was made with {name}={before!r}, this run has {name}={value!r}: the result would be that "
                f"of neither run. Pass {name}={before!r}, or another checkpoint folder."
            )


def read_tensors(
    storage: Storage, folder: str, manifest: Manifest, into: Mapping[int, Tensor] | None = None, only: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """Read and verify all tensors of a checkpoint, or those with the numbers ``only``. Returns them by number, on the host.

    ``into`` holds contiguous host tensors to read into instead of new memory; after an error their values are undefined. Raises
    ``DamagedCheckpointError`` if a file is missing, or a byte is not the one that was written.
    """
    into, tensors = into or {}, manifest.tensors
    numbers = sorted(range(len(tensors)) if only is None else only, key=lambda number: -tensors[number].bytes)
    with ExitStack() as stack, ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        files: dict[str, StorageFile] = {}
        for name, stored in manifest.files.items():
            files[name] = stack.enter_context(closing(_open(storage, folder, name, stored)))
        found = _allocate(manifest, numbers, into)
        for _ in pool.map(lambda n: _read_tensor(tensors[n], files[tensors[n].file], found[n]), numbers):
            pass
    return found


def _allocate(manifest: Manifest, numbers: Sequence[int], into: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return a tensor to read each of ``numbers`` into. Memory that this machine does not have was not needed to write them."""
    try:
        stored = ((n, manifest.tensors[n]) for n in numbers)
        return {n: into[n] if n in into else torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for n, t in stored}
    except (RuntimeError, MemoryError) as error:
        nbytes = sum(manifest.tensors[n].bytes for n in numbers)
        raise DamagedCheckpointError(f"its {nbytes} bytes do not fit into memory ({str(error).splitlines()[0][:120]})") from None


def _open(storage: Storage, folder: str, name: str, stored: StoredFile) -> StorageFile:
    """Open a file, and verify its size and its header."""
    try:
        file = storage.open(folder, name)
    except OSError as error:
        raise DamagedCheckpointError(f"{name} cannot be opened ({error.strerror or error})") from None
    try:
        if file.size != stored.bytes:
            raise DamagedCheckpointError(f"{name} has {file.size} bytes; {stored.bytes} were written")
        header = bytearray(stored.head)
        _read_exactly(file, 0, memoryview(header), f"the header of {name}")
        if name != INDEX and header_bytes(bytes(header[:8]), file.size, name) != stored.head:
            raise DamagedCheckpointError(f"{name} says that its header has another length")
        if hashlib.sha256(header).hexdigest() != stored.head_sha256:
            raise DamagedCheckpointError(f"the header of {name} is not the one that was written")
    except BaseException:
        file.close()
        raise
    return file


def _read_tensor(stored: StoredTensor, file: StorageFile, target: Tensor) -> None:
    """Read one tensor in pieces, and add each piece to the checksum while it is in the cache of the core."""
    flat, total = bits(target.detach()), Checksum()
    where = f"tensor {stored.name} in {stored.file}"
    for begin in range(0, flat.numel(), _PIECE_BYTES):
        piece = flat[begin : begin + _PIECE_BYTES]
        _read_exactly(file, stored.begin + begin, memory_of(piece), where)
        total.add(piece)
    if total.digest() != stored.sum:
        raise DamagedCheckpointError(f"{where} is not what was written: its checksum differs")


def _read_exactly(file: StorageFile, begin: int, target: memoryview, where: str) -> None:
    try:
        count = file.read_into(begin, target)
    except OSError as error:
        raise DamagedCheckpointError(f"{where} cannot be read ({error.strerror or error})") from None
    if count != len(target):
        raise DamagedCheckpointError(f"the file ends inside {where}")
