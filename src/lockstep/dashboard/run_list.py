"""RunList: finds the runs in a folder, and says of each in what state it is, without reading its whole recording."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.dashboard.run_history import RunHistory
from lockstep.errors import UsageError
from lockstep.launcher.file_ends import last_events, last_objects
from lockstep.launcher.run_folder import is_in_use
from lockstep.launcher.run_registry import is_run_folder
from lockstep.launcher.run_status import ENDED, UNKNOWN, read_status
from lockstep.recording.records import Metrics, StepRecord, parse

REMOVED, RUNNING = "removed", "running"
_END_BYTES = 64 << 10
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""What may be raised by code that reads damaged files."""


@dataclass(frozen=True)
class RunEntry:
    """A run of the list. ``state``: one of launcher/run_status.py. ``step``: the newest; -1: none. ``values``: logged last.

    A run whose files are damaged has the state "unknown".
    """

    name: str
    state: str
    command: str
    began: float
    newest: float
    step: int
    workers: int
    values: Mapping[str, str]
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RunList:
    """The runs in ``folder``: itself, if it is a run folder, or the run folders in it.

    Raises:
        UsageError: ``folder`` is no folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder. Name a run, the folder of a run, or a folder that contains run folders.")
        self.folder = folder.absolute()
        self.is_single = is_run_folder(folder)
        self._known: dict[str, tuple[tuple[float, ...], RunEntry]] = {}

    def names(self) -> list[str]:
        """The names of the runs: the newest first, if they are named by time."""
        if self.is_single:
            return [self.folder.name]
        try:
            with os.scandir(self.folder) as found:
                names = [each.name for each in found]
        except OSError:
            return []
        return sorted((name for name in names if is_run_folder(self.folder / name)), reverse=True)

    def path(self, name: str) -> Path | None:
        """The folder of a run; None if there is no run of this name."""
        if self.is_single:
            path = self.folder if name == self.folder.name else None
        else:
            path = None if name in ("", ".", "..") or "/" in name or "\0" in name else self.folder / name
        return path if path is not None and is_run_folder(path) else None

    def entries(self) -> list[RunEntry]:
        """All runs. Files that have not changed since the last call are not read again."""
        return [self._entry(name) for name in self.names()]

    def running(self) -> list[str]:
        """The names of the runs that a process supervises."""
        return [entry.name for entry in self.entries() if entry.state not in (*ENDED, REMOVED)]

    def _entry(self, name: str) -> RunEntry:
        path = self.folder if self.is_single else self.folder / name
        try:
            return self._read(name, path)
        except DAMAGE as error:
            return RunEntry(name, UNKNOWN, "", 0.0, 0.0, -1, 0, {}, f"its files are damaged: {error!r}")

    def _read(self, name: str, path: Path) -> RunEntry:
        times = tuple(map(_changed, (path / "events.jsonl", *_recordings(path)[-1:])))
        known = self._known.get(name)
        if known is None or known[0] != times:
            self._known[name] = known = (times, _read_entry(name, path))
        if known[1].state in ENDED and not _is_in_use(path):
            return known[1]
        return replace(known[1], state=state_of(path))


def state_of(path: Path) -> str:
    """The state of the run in ``path``, from its files and its lock. Its agent is not asked."""
    if not is_run_folder(path):
        return REMOVED
    try:
        return RUNNING if is_in_use(path) else read_status(path, ask=False).state
    except OSError:
        return REMOVED
    except DAMAGE:
        return UNKNOWN


def _read_entry(name: str, path: Path) -> RunEntry:
    try:
        status = read_status(path, ask=False)
    except OSError:
        return RunEntry(name, REMOVED, "", 0.0, 0.0, -1, 0, {}, "")
    newest, size, values = status.ended or 0.0, 0, dict[str, str]()
    for file in _recordings(path)[-1:]:
        for line in last_objects(file, _END_BYTES):
            record = parse(line)
            if isinstance(record, StepRecord):
                newest, size = max(newest, record.at + record.seconds), record.size
            elif isinstance(record, Metrics):
                values |= {name: f"{value:.4g}" for name, value in record.values.items()}
    if not math.isfinite(status.began) or not math.isfinite(newest):
        raise ValueError("a time is not a number")
    history = RunHistory()
    for line in last_events(path, _END_BYTES):
        history.add(line, 1)
    workers = len(history.members) or size  # the last change may be long ago
    return RunEntry(name, status.state, status.command, status.began, newest, status.step, workers, values, status.why)


def _is_in_use(path: Path) -> bool:
    try:
        return is_in_use(path)
    except OSError:
        return False


def _recordings(path: Path) -> list[Path]:
    return sorted((path / "recording").glob("every-1-*.jsonl"))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
