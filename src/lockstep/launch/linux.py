"""The few calls of Linux that python does not offer: parents, and what becomes of their children. Knows nothing of workers."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when ``parent`` dies; ends it here and now if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The processes whose parent this one is, zombies too."""
    try:
        pids = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
        return [int(pid) for pid in pids.split()]
    except OSError:  # a kernel without that file
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == os.getpid()]


def threads() -> int:
    """How many threads this process has, those that python knows nothing of too."""
    return len(os.listdir("/proc/self/task"))


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
