"""RunDir: the folder of one run, for its user alone, and what lies where in it. Knows nothing of processes."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError

_PATH_BYTES = 100
"""A unix socket's path may have 107; leave room for what a test or a shell adds."""


class RunFolder:
    """Make with ``create``. ``events.jsonl`` grows by ``record``; it is written without buffering, so a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket_path = path / "agent.sock"
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._events = os.open(path / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @staticmethod
    def create(wanted: str | None, now: float) -> RunFolder:
        """Make ``wanted``, or a folder named by time and process under ./lockstep-runs. What an earlier run left is moved aside."""
        name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{os.getpid()}"
        path = Path(wanted) if wanted is not None else Path("lockstep-runs") / name
        path = Path(os.path.abspath(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
            if is_answering(path):
                raise UsageError(f"a run is going on in {path} (its agent.sock answers). Wait for it, or choose another --run-dir.")
            _move_aside(path)
            (path / "workers").mkdir(mode=0o700)
            return RunFolder(path)
        except OSError as error:
            raise UsageError(
                f"the run directory {path} cannot be made ({error.strerror}: {error.filename}). Choose another with --run-dir DIR."
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
        """A path to ``agent.sock`` that fits into a socket address, for this process and the workers."""
        return _short(self.socket_path, f"/proc/{os.getpid()}/fd/{self._folder}")

    def record(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "kind": kind, **facts}, default=str)
        try:
            os.write(self._events, line.encode() + b"\n")
        except OSError:
            pass  # a disk that is full must not end the run; the logs, which share it, say so on the console

    def close(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        for store in self.path.glob("store*"):  # where workers met
            store.unlink(missing_ok=True)
        os.close(self._folder)
        os.close(self._events)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the agent of the run in ``path``; OSError where there is none."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(timeout_s)
        line.connect(_short(path / "agent.sock", f"/proc/self/fd/{folder}"))
    except OSError:
        line.close()
        raise
    finally:
        os.close(folder)
    return line


def is_answering(path: Path) -> bool:
    try:
        connect(path, 1.0).close()
    except OSError:
        return False
    return True


def _short(path: Path, folder: str) -> str:
    return str(path) if len(os.fsencode(path)) <= _PATH_BYTES else f"{folder}/{path.name}"


def _move_aside(path: Path) -> None:
    (path / "agent.sock").unlink(missing_ok=True)
    for store in path.glob("store*"):  # one that is left would let workers meet those of a run before
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
