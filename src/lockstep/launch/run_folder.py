"""RunFolder: the folder of one run and the paths in it, readable by its user alone. Knows nothing of processes."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError

_PATH_BYTES = 100
"""The path of a unix socket may have 107 bytes."""


class RunFolder:
    """Made by ``create``. ``record`` appends to ``events.jsonl`` without buffering: a killed agent loses no entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket_path = path / "agent.sock"
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._events = os.open(path / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @staticmethod
    def create(requested: str | None, now: float) -> RunFolder:
        """Make the folder ``requested``, or one named by time and pid under ./lockstep-runs. Moves files of an earlier run aside.

        Raises UsageError if the folder cannot be made, or if another run uses it now.
        """
        name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{os.getpid()}"
        path = Path(requested) if requested is not None else Path("lockstep-runs") / name
        path = Path(os.path.abspath(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
            if _has_running_agent(path):
                raise UsageError(f"another run uses {path} (its agent.sock answers). Wait for it, or choose another --run-dir.")
            _move_aside(path)
            (path / "workers").mkdir(mode=0o700)
            return RunFolder(path)
        except OSError as error:
            raise UsageError(
                f"the run folder {path} cannot be made ({error.strerror}: {error.filename}). Choose another one with --run-dir DIR."
            ) from error

    def worker(self, id: int) -> Path:
        return self.path / "workers" / str(id)

    def log(self, id: int) -> Path:
        return self.worker(id) / "log.txt"

    def stack(self, id: int) -> Path:
        return self.worker(id) / "stack.txt"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def address(self) -> str:
        """A path of ``agent.sock`` that fits into a socket address."""
        return _short(self.socket_path, f"/proc/{os.getpid()}/fd/{self._folder}")

    def record(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "kind": kind, **facts}, default=str)
        try:
            os.write(self._events, line.encode() + b"\n")
        except OSError:
            pass  # a full disk must not end the run; the logs are on the same disk and say so on the console

    def close(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        for store in self.path.glob("store*"):  # the files in which workers found each other
            store.unlink(missing_ok=True)
        os.close(self._folder)
        os.close(self._events)


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
    for store in path.glob("store*"):  # with an old store, workers would find those of the earlier run
        store.unlink()
    left = [entry for name in ("events.jsonl", "workers", "ledger", "zygote.txt") if (entry := path / name).exists()]
    if not left:
        return
    number = 1
    while (aside := path / f"earlier-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    for entry in left:
        entry.rename(aside / entry.name)
