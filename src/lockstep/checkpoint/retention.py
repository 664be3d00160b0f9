"""Retention: finds the checkpoints in a storage by age, and removes old and incomplete ones. Does not read tensors."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass

from lockstep.checkpoint.manifest import NAME, Manifest
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.tensor_file import DamagedCheckpointError

_FOLDER = re.compile(r"step-(\d{9,})-([0-9a-f]{16})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one checkpoint. Its name says the step, and in ``token`` when the checkpoint was begun."""

    name: str
    step: int
    token: str

    @staticmethod
    def parse(name: str) -> CheckpointFolder | None:
        """Returns None if ``name`` is not the name of a checkpoint's folder."""
        found = _FOLDER.fullmatch(name)
        return CheckpointFolder(name, int(found[1]), found[2]) if found else None


def new_folder_name(step: int) -> str:
    """Return a name that no other attempt at this step has. Of two attempts, the token of the later one is greater."""
    return f"step-{step:09d}-{time.time_ns() // 1_000_000:012x}{os.urandom(2).hex()}"


class Retention:
    """The checkpoints in ``storage``, of which the ``keep`` newest stay."""

    def __init__(self, storage: Storage, keep: int = 3) -> None:
        self.storage, self._keep = storage, keep

    def published(self) -> list[CheckpointFolder]:
        """Return the checkpoints that have a manifest, newest first."""
        return [folder for folder in self._folders() if self.storage.exists(folder.name, NAME)]

    def manifest(self, folder: CheckpointFolder) -> Manifest:
        """Raises ``DamagedCheckpointError`` if the manifest cannot be read, or belongs to another checkpoint."""
        try:
            manifest = Manifest.parse(self.storage.read(folder.name, NAME))
        except OSError as error:
            raise DamagedCheckpointError(f"{NAME} cannot be read ({error})") from None
        if manifest.step != folder.step:
            raise DamagedCheckpointError(f"{NAME} is of step {manifest.step}: it belongs to another checkpoint")
        return manifest

    def remove_old(self, newest: str, agreed_at: int, distrusted_after: int | None = None) -> None:
        """Remove all but the ``keep`` newest checkpoints, and folders that were not published. Rank 0 calls it.

        ``newest`` was just published; folders begun after it stay, because a worker may be writing to them. The newest checkpoint
        up to step ``agreed_at``, when replicas were known to be equal, stays too. Checkpoints after step ``distrusted_after`` may
        hold wrong bits: all but ``newest`` are removed.
        """
        last_trusted = math.inf if distrusted_after is None else distrusted_after
        trusted = [folder for folder in self.published() if folder.name == newest or folder.step <= last_trusted]
        agreed = [folder for folder in trusted if folder.step <= agreed_at][:1]
        stays = {newest, *(folder.name for folder in trusted[: self._keep] + agreed)}
        published = CheckpointFolder.parse(newest)
        for folder in self._folders():
            is_later = published is not None and folder.token > published.token
            if folder.name not in stays and not is_later:
                self.storage.remove(folder.name)

    def _folders(self) -> list[CheckpointFolder]:
        found = [folder for name in self.storage.folders() if (folder := CheckpointFolder.parse(name)) is not None]
        return sorted(found, key=lambda folder: (folder.step, folder.token), reverse=True)
