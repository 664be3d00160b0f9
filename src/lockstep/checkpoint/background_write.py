"""Writing: one worker's part of a checkpoint on its way to the storage, behind the training. Tells what it wrote, or why not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.checkpoint.checksum import checksum
from lockstep.checkpoint.manifest import INDEX, File, Stored
from lockstep.checkpoint.snapshot import FilePlan, Snapshot
from lockstep.checkpoint.state_layout import index_file
from lockstep.checkpoint.storage import Stopped, Storage, in_pieces

PIECE_BYTES = 8 << 20


class Behind:
    """Something done by a thread of its own. ``error`` is what went wrong, in words; empty: nothing."""

    def __init__(self, act: Callable[[], None], what: str, *, outlives: bool = False) -> None:
        """``outlives``: the interpreter waits for it before it ends."""
        self.error = ""
        self._act = act
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"lockstep-{what}", daemon=not outlives).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over."""
        return self._over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._act()
        except Stopped:
            self.error = "it was given up"
        except Exception as error:  # noqa: BLE001 - storage raises what it likes; training goes on, and the error is told
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._over.set()


class Writing:
    """``part`` holds, once ``is_over``, what a manifest must know of it, as JSON; or why it failed."""

    def __init__(self, storage: Storage, folder: str, snapshot: Snapshot, index: bytes | None) -> None:
        self._storage, self._folder, self._snapshot, self._index = storage, folder, snapshot, index
        self._files: dict[str, File] = {}
        self._stored: dict[int, Stored] = {}
        self._given_up = threading.Event()
        self._behind = Behind(self._write, "write")

    @property
    def is_over(self) -> bool:
        return self._behind.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._behind.wait(timeout_s)

    def give_up(self) -> None:
        """The snapshot's memory is free again when it ``is_over``: a write, or an fsync, may take its time."""
        self._given_up.set()

    def part(self) -> dict[str, Any]:
        return {
            "error": self._behind.error,
            "files": {name: asdict(file) for name, file in self._files.items()},
            "tensors": {str(number): asdict(stored) for number, stored in self._stored.items()},
        }

    def _write(self) -> None:
        self._storage.make(self._folder)
        for file_plan in self._snapshot.file_plans:
            self._write_file_plan(file_plan)
        if self._index is not None:
            self._storage.write(self._folder, INDEX, [self._index])
            self._files |= index_file(self._index)

    def _write_file_plan(self, file_plan: FilePlan) -> None:
        for number, entry in zip(file_plan.numbers, file_plan.entries, strict=True):
            if self._given_up.is_set():
                raise Stopped
            total = checksum(self._snapshot.tensor(file_plan, entry))
            begin = len(file_plan.head) + entry.begin
            self._stored[number] = Stored(entry.name, file_plan.file, entry.dtype, entry.shape, begin, total)
        pieces = in_pieces(self._snapshot.data(file_plan), PIECE_BYTES, self._given_up.is_set)
        self._storage.write(self._folder, file_plan.file, itertools.chain([file_plan.head], pieces))
        self._files[file_plan.file] = File(len(file_plan.head) + file_plan.bytes, len(file_plan.head), file_plan.head_sha256)
