"""Shelf: the checkpoints of one storage by age: the whole ones, newest first, and what was left half-written. Knows no tensors."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from lockstep.checkpoint.manifest import NAME, Manifest
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.tensor_file import Damaged

_FOLDER = re.compile(r"step-(\d{9,})-([0-9a-f]{16})")


@dataclass(frozen=True)
class Slot:
    """A checkpoint's folder: its name says its step, and when it was begun."""

    folder: str
    step: int
    token: str

    @property
    def age_key(self) -> tuple[int, str]:
        return self.step, self.token


def new_folder(step: int) -> str:
    """A name that no other attempt at this step has; of two, the later one sorts behind."""
    return f"step-{step:09d}-{time.time_ns() // 1_000_000:012x}{os.urandom(2).hex()}"


def slot_of(folder: str) -> Slot | None:
    found = _FOLDER.fullmatch(folder)
    return Slot(folder, int(found[1]), found[2]) if found else None


class Retention:
    """``keep`` newest checkpoints stay."""

    def __init__(self, storage: Storage, keep: int = 3) -> None:
        self.storage, self._open_checkpoints = storage, keep

    def whole(self) -> list[Slot]:
        """Those with a manifest, newest first."""
        return [slot for slot in self._slots() if self.storage.holds(slot.folder, NAME)]

    def manifest(self, slot: Slot) -> Manifest:
        """``Damaged`` where it cannot be read, or is another's."""
        try:
            manifest = Manifest.parse(self.storage.read(slot.folder, NAME))
        except OSError as error:
            raise Damaged(f"{NAME} cannot be read ({error})") from None
        if manifest.step != slot.step:
            raise Damaged(f"{NAME} is of step {manifest.step}: it belongs to another checkpoint")
        return manifest

    def tidy(self, newest: str, agreed: int, suspect: int | None = None) -> None:
        """``newest`` was published: older ones than the ``keep`` newest go, and what was left half-written.

        The newest one up to step ``agreed``, when replicas were known to be equal, stays in any case. ``suspect``: those after this
        step, up to ``newest``, may hold a replica's wrong bits, and go.
        """
        whole = [slot for slot in self.whole() if slot.folder == newest or suspect is None or slot.step <= suspect]
        keep = {slot.folder for slot in whole[: self._open_checkpoints]} | {newest}
        keep |= {slot.folder for slot in [slot for slot in whole if slot.step <= agreed][:1]}
        this = slot_of(newest)
        for slot in self._slots():
            is_later = this is not None and slot.token > this.token  # somebody is writing it
            if slot.folder not in keep and not is_later:
                self.storage.remove(slot.folder)

    def _slots(self) -> list[Slot]:
        found = [slot for folder in self.storage.folders() if (slot := slot_of(folder)) is not None]
        return sorted(found, key=lambda slot: slot.age_key, reverse=True)
