"""RunFolder: the folder of one run and the paths in it, readable by its user alone. Knows nothing of processes."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher.event_thinning import EventThinning
from lockstep.launcher.file_ends import first_events, last_events
from lockstep.recording.json_lines import JsonLinesFile
from lockstep.recording.text import printable

_FILES = ("events.jsonl", "recording", "workers", "ledger", "tracking", "zygote.txt", "outcome.json")
"""What a run writes into its folder, and leaves there."""
_PATH_BYTES = 100
"""The path of a unix socket may have 107 bytes."""
_LOCK_S = 0.5
"""`lockstep ls` holds the lock of a folder for an instant, to see whether a run has it."""
_ELSEWHERE_S = 300.0
"""A run of another machine that has written nothing for so long, and has not said that it ended, was killed."""


class RunFolder:
    """Made by ``create``. ``record`` appends to ``events.jsonl`` without buffering: a killed agent loses no line but those that
    wait (event_thinning.py).

    ``folder``: a descriptor of the folder. Its lock shows that a run uses the folder, and ends with this process.
    """

    def __init__(self, path: Path, folder: int) -> None:
        self.path = path
        self.socket_path = path / "agent.sock"
        self.error: OSError | None = None
        """The first error of ``record``."""
        self._folder = folder
        self._events, self._thinning = JsonLinesFile(path / "events.jsonl"), EventThinning()

    @staticmethod
    def create(requested: str | None, now: float) -> RunFolder:
        """Make the folder ``requested``, or one named by time and pid under ./lockstep-runs. Moves files of an earlier run aside.

        Raises UsageError if the folder cannot be made, belongs to another user, or if another run uses it now.
        """
        name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{os.getpid()}"
        path = Path(os.path.abspath(requested if requested is not None else Path("lockstep-runs") / name))
        if requested is None and path.exists():  # this process has started another run in this second
            path = next(other for count in itertools.count(2) if not (other := path.with_name(f"{name}-{count}")).exists())
        _require_utf8(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            _require_own(folder, path)
            os.fchmod(folder, 0o700)
            _require_not_elsewhere(path, now)
            _lock(folder, path)
            _move_aside(path)
            (path / "workers").mkdir(mode=0o700)
            return RunFolder(path, folder)
        except OSError as error:
            raise UsageError(
                f"the run folder {path} cannot be made ({error.strerror}: {error.filename}). Choose another one with --run-dir DIR."
            ) from error

    def worker(self, id: int) -> Path:
        return self.path / "workers" / str(id)

    def log(self, id: int) -> Path:
        return self.worker(id) / "log.txt"

    def log_times(self, id: int) -> Path:
        return self.worker(id) / "log.times"

    def stack(self, id: int) -> Path:
        return self.worker(id) / "stack.txt"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def address(self) -> str:
        """A path of ``agent.sock`` that fits into a socket address."""
        return _short(self.socket_path, f"/proc/{os.getpid()}/fd/{self._folder}")

    def record(self, kind: str, **facts: Any) -> None:
        """Append a line to ``events.jsonl``."""
        self.append({"time": time.time(), "kind": kind, **facts})

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``events.jsonl``, or leave it out if too many of its kind were written (event_thinning.py)."""
        self._write(self._thinning.add(line, time.monotonic()))

    def on_time(self) -> None:
        """Write the lines that have waited long enough. The process that supervises the run calls this often."""
        self._write(self._thinning.due(time.monotonic()))

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            try:
                self._events.append(json.dumps(line, default=str) + "\n")
            except OSError as error:  # a full disk must not end the run
                self.error = self.error or error

    def remove_socket(self) -> None:
        """Nobody answers at the socket any more."""
        _unlink(self.socket_path)

    def close(self) -> None:
        self._write(self._thinning.rest())
        for path in (self.socket_path, self.path / "agent.pid"):
            _unlink(path)  # if it cannot be removed, the lock still says that no run uses the folder any more
        self.leave()

    def leave(self) -> None:
        """Close the folder in this process. It stays in use if a fork of this process has it."""
        os.close(self._folder)
        self._events.close()


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # the disk has become read-only


def is_in_use(path: Path) -> bool:
    """Whether a run uses the folder ``path`` now. Raises OSError if there is no such folder, or if it cannot be read."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return _has_running_agent(path)
    finally:
        os.close(folder)
    return False


def last_written(path: Path) -> float:
    """When the run in ``path`` wrote last, in seconds since 1970; 0 if that is not known."""
    written = [0.0]
    for name in (*_FILES, "machines"):
        for entry in (path / name, *(path / name).rglob("*")):
            try:
                written.append(entry.lstat().st_mtime)
            except OSError:  # it has no such file, or it was removed meanwhile
                continue
    return max(written)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the control socket of the run in ``path``. Raises OSError if no agent listens there."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_short(path / "agent.sock", f"/proc/self/fd/{folder}"))
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _require_utf8(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UsageError(
            f"the name of the run folder, {shown}, is not UTF-8 text. Choose another one with --run-dir DIR."
        ) from None


def _require_own(folder: int, path: Path) -> None:
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid():  # root too: its owner could replace files while root's run uses them
        raise UsageError(f"the run folder {path} belongs to user {owner}, not to you. Choose another one with --run-dir DIR.")


def _require_not_elsewhere(path: Path, now: float) -> None:
    """On a file system that several machines share, the lock of a run may not be seen on the others."""
    if not (path / "events.jsonl").exists():
        return
    host = next((line.get("host") or "" for line in first_events(path, 1 << 14) if line["kind"] == "command"), "")
    has_ended = any(line["kind"] == "end" for line in last_events(path, 1 << 16, ("end",)))
    if has_ended or host == socket.gethostname():
        return
    silent_s = now - last_written(path)
    if silent_s < _ELSEWHERE_S:
        where = f"began on {printable(host)}" if host else "does not say on which machine it began"
        raise UsageError(
            f"the run in {path} {where}, has not ended, and wrote there {max(0.0, silent_s):.0f} s ago. Choose another "
            f"folder with --run-dir DIR. If that run was killed, remove the folder, or repeat this command in "
            f"{_ELSEWHERE_S / 60:.0f} min."
        )


def _lock(folder: int, path: Path) -> None:
    """Lock the folder until this process ends. A lock is not a file, so no cleaner can remove it, and none is left behind."""
    try:
        take_lock(folder)
    except BlockingIOError:
        try:
            owner = f"pid {(path / 'agent.pid').read_text().strip()}"
        except OSError:
            owner = "its folder is locked"
        raise UsageError(f"another run uses {path} ({owner}). Wait for it, or choose another --run-dir.") from None
    except OSError:  # a file system without locks: an agent that runs there answers
        if _has_running_agent(path):
            raise UsageError(
                f"another run uses {path} (its agent.sock answers). Wait for it, or choose another --run-dir."
            ) from None
    (path / "agent.pid").unlink(missing_ok=True)
    (path / "agent.pid").write_text(f"{os.getpid()}\n")


def take_lock(folder: int) -> None:
    """Lock the folder with this descriptor for this process alone.

    Raises BlockingIOError if another process keeps the lock for longer than an instant.
    """
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOCK_S / 50)


def _has_running_agent(path: Path) -> bool:
    try:
        connect(path, 1.0).close()
    except OSError:
        return False
    return True


def _short(path: Path, folder: str) -> str:
    return str(path) if len(os.fsencode(path)) <= _PATH_BYTES else f"{folder}/{path.name}"


def _move_aside(path: Path) -> None:
    (path / "agent.sock").unlink(missing_ok=True)
    left = [entry for name in _FILES if (entry := path / name).exists()]
    if not left:
        return
    number = 1
    while (aside := path / f"earlier-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    for entry in left:
        entry.rename(aside / entry.name)
