"""WatchedRun: a run folder, and the RunView that is kept up to date with it. It is read in whatever thread calls ``poll``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.dashboard.run_list import state_of
from lockstep.dashboard.run_view import RunView
from lockstep.recording.reader import RecordingReader

_POLL_BYTES = 1 << 18
_MOST_BYTES_OF_LINE = 1 << 16
_LIVES = count(1)


class WatchedRun:
    """Raises UsageError if there is no run in ``run_dir``."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name, self.run_dir = name, run_dir
        self.state = "running"
        self.life = next(_LIVES)
        """Another number if another run has taken the folder, and in each WatchedRun: its versions begin anew."""
        self.is_current = False
        """Whether all that there was has been read."""
        self._lock = threading.Lock()
        self._reader = RecordingReader(run_dir)
        self._view = RunView(name)
        self._first = self._first_line()

    def poll(self) -> bool:
        """Read what is new. Returns whether there may be more right now. It is called by one thread at a time."""
        first = self._first_line()
        is_other = first != self._first and first is not None  # a new run uses the folder
        if is_other:
            self._reader, self._first = RecordingReader(self.run_dir), first
        found, state = self._reader.poll(max_bytes=_POLL_BYTES), state_of(self.run_dir)
        with self._lock:  # no longer than it needs: requests wait for it
            if is_other:
                self._view, self.life = RunView(self.name), next(_LIVES)
            self._view.feed(found)
            self.state, self.is_current = state, not found.more
        return found.more

    def read_all(self) -> None:
        """Read all that is there now."""
        while self.poll():
            pass

    @property
    def version(self) -> tuple[int, int, str]:
        """Changes whenever there is something new to show."""
        return self.life, self._view.version, self.state

    def changes(self, since: tuple[int, int, str] | None = None) -> tuple[tuple[int, int, str], dict[str, Any]]:
        """The version, and what is new after version ``since``, as plain data."""
        with self._lock:
            version = self.version
            is_known = since is not None and since[0] == self.life
            found = self._view.changes(since[1] if since is not None and is_known else 0)
            found["reset"] = not is_known
            found["run"]["state"] = self.state
            found["run"]["idle"] = round(max(0.0, time.time() - self._view.newest), 1)
            return version, found

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """The view, which does not change in this context."""
        with self._lock:
            yield self._view

    def _first_line(self) -> bytes | None:
        """What tells a run from an earlier one in its folder: it says when the run began. None if it cannot be read now."""
        try:
            with open(self.run_dir / "events.jsonl", "rb") as file:
                line = file.readline(_MOST_BYTES_OF_LINE)
        except OSError:
            return None
        return line or None
