"""Retention: names the folders of checkpoints, finds them by age, and removes old and incomplete ones. Does not read tensors."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass

from lockstep.checkpoint.manifest import MAX_BYTES, NAME, Manifest
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.tensor_file import DamagedCheckpointError

_FOLDER = re.compile(r"step-(\d{9,})-([0-9a-f]{12})([0-9a-f]{4})")
_LATEST_MS = 1 << 47
"""In the year 6429. A folder that says to be of a later time counts as the oldest."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one checkpoint. Its name says the step, and when the checkpoint was begun."""

    name: str
    step: int
    begun_ms: int
    """By the clock of rank 0, but later than every checkpoint that was there before, even if the clock was set back."""

    @staticmethod
    def parse(name: str) -> CheckpointFolder | None:
        """Returns None if ``name`` is not the name of a checkpoint's folder."""
        found = _FOLDER.fullmatch(name)
        return CheckpointFolder(name, int(found[1]), int(found[2], 16)) if found else None

    @property
    def age(self) -> tuple[int, int, str]:
        """The greatest is the newest checkpoint, which is not always that of the greatest step: a run may begin anew."""
        return (self.begun_ms if self.begun_ms < _LATEST_MS else 0, self.step, self.name)


class Retention:
    """The checkpoints in ``storage``, of which the ``keep`` newest of a run stay."""

    def __init__(self, storage: Storage, keep: int = 3) -> None:
        self.storage, self._keep = storage, keep
        self._newest_ms: int | None = None
        """When the newest checkpoint that this process knows of was begun. None if it has not looked."""
        self._run_of: dict[str, str] = {}

    def new_folder(self, step: int) -> str:
        """Return a name for a checkpoint of ``step``, newer than every checkpoint in the storage. Rank 0 calls it."""
        if self._newest_ms is None:
            self._newest_ms = 0
            with suppress(OSError):  # a storage that fails now will say so when the checkpoint is written
                self._newest_ms = max((folder.age[0] for folder in self._folders()), default=0)
        begun_ms = max(time.time_ns() // 1_000_000, self._newest_ms + 1)
        return f"step-{step:09d}-{begun_ms:012x}{os.urandom(2).hex()}"

    def begun(self, name: str, run: str) -> None:
        """All workers have agreed on this folder, for a checkpoint of this run. Every worker calls it, as it may become rank 0."""
        folder = CheckpointFolder.parse(name)
        assert folder is not None
        self._run_of[name] = run
        if self._newest_ms is not None:
            self._newest_ms = max(self._newest_ms, folder.begun_ms)

    def published(self) -> list[CheckpointFolder]:
        """Return the checkpoints that have a manifest, newest first."""
        return [folder for folder in self._folders() if self.storage.exists(folder.name, NAME)]

    def links(self) -> list[str]:
        """Return the links that are named like checkpoints. They are not followed: what they point to may be somebody else's."""
        return [name for name in self.storage.links() if CheckpointFolder.parse(name) is not None]

    def manifest(self, folder: CheckpointFolder) -> Manifest:
        """Raises ``DamagedCheckpointError`` if the manifest cannot be read, or belongs to another checkpoint."""
        try:
            manifest = Manifest.parse(self.storage.read(folder.name, NAME, MAX_BYTES))
        except OSError as error:
            raise DamagedCheckpointError(f"{NAME} cannot be read ({error.strerror or error})") from None
        if manifest.step != folder.step:
            raise DamagedCheckpointError(f"{NAME} is of step {manifest.step}: it belongs to another checkpoint")
        return manifest

    def remove_old(
        self, newest: str, run: str, agreed_at: int, distrusted_after: int | None = None, in_use: str | None = None
    ) -> None:
        """Remove all but the ``keep`` newest checkpoints of this run, and folders that were not published. Rank 0 calls it.

        ``newest`` was just published. Checkpoints of other runs stay. The newest checkpoint up to step ``agreed_at``, when replicas
        were known to be equal, stays too, and so does ``in_use``. Checkpoints after step ``distrusted_after`` may hold wrong bits:
        all but ``newest`` are removed. A folder that cannot be removed does not keep the others from being removed; the first
        error is raised at the end.
        """
        last = CheckpointFolder.parse(newest)
        assert last is not None
        folders, published = self._folders(), self.published()
        own = [folder for folder in published if folder.name == newest or self._is_of(folder, run)]
        trusted = [f for f in own if f.name == newest or distrusted_after is None or f.step <= distrusted_after]
        stays = {newest, in_use, *(folder.name for folder in trusted[: self._keep])}
        stays |= {folder.name for folder in [folder for folder in trusted if folder.step <= agreed_at][:1]}
        stays |= {folder.name for folder in published} - {folder.name for folder in own}
        # Workers of a newer generation may be writing to an unpublished folder, if this process is about to be ended.
        stays |= {f.name for f in folders if f not in published and f.step >= last.step and f.age > last.age}
        errors: list[OSError] = []
        for folder in folders:
            if folder.name not in stays:
                try:
                    self.storage.remove(folder.name)
                except OSError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _is_of(self, folder: CheckpointFolder, run: str) -> bool:
        """Whether a checkpoint is of this run, or of no run because it is damaged."""
        if folder.name not in self._run_of:
            try:
                self._run_of[folder.name] = self.manifest(folder).run
            except DamagedCheckpointError:
                return True
        return self._run_of[folder.name] == run

    def _folders(self) -> list[CheckpointFolder]:
        found = [folder for name in self.storage.folders() if (folder := CheckpointFolder.parse(name)) is not None]
        return sorted(found, key=lambda folder: folder.age, reverse=True)
