"""Whether machines can keep their checkpoints in a common place: each writes a file, and reads the files of all others."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.storage import LocalStorage, Storage, open_storage
from lockstep.errors import UsageError

_FILE = "probe"
_EMPTY_S = 1.0
_PAUSE_S = 0.05


class CheckpointProbe:
    """``run``: a name that no other run of the doctor has. ``machine``: the number of this machine among the others."""

    def __init__(self, place: str, run: str, machine: int) -> None:
        self._place, self._run, self._machine = place, run, machine
        self._storage: Storage | None = None
        self._made: list[Path] = []
        """The folders of the place that did not exist before, the innermost first."""

    def write(self) -> str:
        """Write the file of this machine and read it back. Returns why that is not possible, or ""."""
        try:
            self._storage = open_storage(self._place)
            if isinstance(self._storage, LocalStorage):
                path = Path(self._storage.url)
                self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            folder = self._folder(self._machine)
            self._storage.make_folder(folder)
            self._storage.write(folder, _FILE, [self._content(self._machine)])
            return "" if self._reads(self._machine) else "what was written is not what is read"
        except UsageError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  # file systems of others raise what they like
            return f"{type(error).__name__}: {error}".splitlines()[0]

    def unseen(self, machines: list[int]) -> list[int]:
        """Returns the machines whose files this machine cannot read."""
        return [machine for machine in machines if not self._reads(machine)]

    def remove(self) -> None:
        """Remove what this machine has written. Does nothing if that is not possible."""
        if self._storage is None:
            return
        with suppress(Exception):
            self._storage.remove(self._folder(self._machine))
        deadline = time.monotonic() + _EMPTY_S
        for folder in self._made:
            while not _remove_empty(folder) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)  # another machine has not removed its file yet

    def _reads(self, machine: int) -> bool:
        content = self._content(machine)
        try:
            return self._storage is not None and self._storage.read(self._folder(machine), _FILE, len(content)) == content
        except Exception:  # noqa: BLE001
            return False

    def _folder(self, machine: int) -> str:
        return f"lockstep-doctor-{self._run}-{machine}"

    def _content(self, machine: int) -> bytes:
        return f"{self._run}/{machine}".encode()


def _remove_empty(folder: Path) -> bool:
    """Returns whether the folder is gone."""
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
