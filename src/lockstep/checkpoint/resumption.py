"""Resumption: which checkpoint a run begins from, and which hyperparameters of the script replace those of the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.checkpoint.hyperparameters import Hyperparameters, describe_differences, names_of, override
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import FoundCheckpoint, read_newest, read_one
from lockstep.checkpoint.retention import CheckpointFolder, Retention
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.base import Comm
from lockstep.comm.plain_state import Stateful
from lockstep.errors import UsageError
from lockstep.observe.notice import print_notice


class Resumption:
    """The arguments ``resume`` and ``override`` of ``Run``, and the hyperparameters in the script."""

    def __init__(self, resume: str | os.PathLike[str], names: Sequence[str], script: Hyperparameters) -> None:
        """Raises ``UsageError`` if an argument makes no sense."""
        self._mode, self._names, self._script = os.fspath(resume), tuple(names), script
        self._folder = None if self._mode in ("auto", "never", "must") else _parse(self._mode)
        for name in self._names:
            if isinstance(names, str) or name not in names_of(script):
                raise UsageError(
                    f"override={names!r}: no optimizer of this run has a hyperparameter {name!r}. "
                    f"Choose from these, as in override=('lr',): {', '.join(names_of(script)) or '(there are none)'}."
                )

    def read(self, retention: Retention, comm: Comm, state: Stateful) -> FoundCheckpoint | None:
        """Read the checkpoint to begin from. All workers must call it. Returns None if the run begins anew."""
        if self._mode == "never":
            return None
        if self._folder is not None:
            place, folder = self._folder
            return read_one(Retention(open_storage(place)), folder, comm, state.weights(), state.settings)
        found = read_newest(retention, comm, state.weights(), state.settings, print_notice)
        if found is None and self._mode == "must":
            raise UsageError(
                f'resume="must", but there is no checkpoint in {retention.storage.url}. Correct checkpoint=, or pass resume="auto" '
                "to begin anew if there is none."
            )
        return found

    def override(self, state: dict[str, Any]) -> None:
        """Put the script's values of the overridden hyperparameters into a checkpoint's state, before it is loaded."""
        if self._names:
            override(state["objects"], self._script, self._names)

    def hyperparameters(self, manifest: Manifest, notify: Callable[[str], None]) -> Hyperparameters:
        """Return those that count from now on: the checkpoint's, and the script's if overridden. Names the others that differ."""
        kept = {
            optimizer: [dict(group) for group in groups] for optimizer, groups in (manifest.hyperparameters or self._script).items()
        }
        for optimizer, groups in self._script.items():
            for now, then in zip(groups, kept.get(optimizer, []), strict=False):
                then.update({name: now[name] for name in self._names if name in now})
        differences = describe_differences(self._script, kept)
        if differences:
            notify(
                f"hyperparameters in the script differ from those with which this run began: {'; '.join(differences)}. "
                "The checkpoint's are used. Name those for which the script's value shall be used: Run(..., override=('lr',))."
            )
        return kept


def _parse(path: str) -> tuple[str, CheckpointFolder]:
    """Returns the place and the folder in it."""
    place, _, name = path.rstrip("/").rpartition("/")
    folder = CheckpointFolder.parse(name)
    if folder is None:
        raise UsageError(
            f'resume={path!r} is neither "auto", "never" or "must" nor the folder of a checkpoint, which is named like '
            "step-000000500-01a1e4fd0da4e3df. `lockstep checkpoint list` shows those that there are."
        )
    return place or ("/" if path.startswith("/") else os.curdir), folder
