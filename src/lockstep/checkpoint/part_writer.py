"""PartWriter: writes one worker's part of a checkpoint in a thread, from a snapshot of the state. Does not know other workers."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.checksum import checksum
from lockstep.checkpoint.manifest import INDEX, StoredFile, StoredTensor
from lockstep.checkpoint.snapshot import FilePlan, Snapshot
from lockstep.checkpoint.storage import Storage

PIECE_BYTES = 8 << 20


class Cancelled(Exception):
    """``PartWriter.cancel`` was called. The files written so far do not belong to any checkpoint."""


class PartWriter:
    """Starts to write at once. The snapshot must not change until ``wait`` returns True, not even after ``cancel``."""

    def __init__(self, storage: Storage, folder: str, snapshot: Snapshot, index: bytes | None) -> None:
        """``index`` is the content of the file that maps weights to files, on rank 0; None on the other ranks."""
        self._storage, self._folder, self._snapshot, self._index = storage, folder, snapshot, index
        self._files: dict[str, StoredFile] = {}
        self._tensors: dict[int, StoredTensor] = {}
        self._cancelled = threading.Event()
        self._task = BackgroundTask(self._write, "write")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the writing. Returns whether it has ended, by success or by failure."""
        return self._task.wait(timeout_s)

    def cancel(self) -> None:
        """Ask the thread to end before its next piece. Does not wait."""
        self._cancelled.set()

    def result(self) -> dict[str, Any]:
        """What the manifest must know of this part, as values that JSON can hold. Call it after ``wait`` has returned True."""
        return {
            "error": self._task.error,
            "files": {name: asdict(file) for name, file in self._files.items()},
            "tensors": {str(number): asdict(tensor) for number, tensor in self._tensors.items()},
        }

    def _write(self) -> None:
        self._snapshot.wait()  # before all else: when this thread has ended, the snapshot may be used again
        self._storage.make_folder(self._folder)
        for plan in self._snapshot.file_plans:
            self._write_file(plan)
        if self._index is not None:
            self._storage.write(self._folder, INDEX, [self._index])
            self._files[INDEX] = StoredFile(len(self._index), len(self._index), hashlib.sha256(self._index).hexdigest())

    def _write_file(self, plan: FilePlan) -> None:
        for entry in plan.entries:
            self._raise_if_cancelled()
            digest = checksum(self._snapshot.tensor(plan, entry))
            begin = len(plan.header) + entry.begin
            self._tensors[entry.number] = StoredTensor(entry.name, plan.file, entry.dtype, entry.shape, begin, digest)
        self._storage.write(self._folder, plan.file, itertools.chain([plan.header], self._pieces(self._snapshot.data(plan))))
        header_sha256 = hashlib.sha256(plan.header).hexdigest()
        self._files[plan.file] = StoredFile(len(plan.header) + plan.bytes, len(plan.header), header_sha256)

    def _pieces(self, data: memoryview) -> Iterable[memoryview]:
        for begin in range(0, len(data), PIECE_BYTES):
            self._raise_if_cancelled()
            yield data[begin : begin + PIECE_BYTES]

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled
