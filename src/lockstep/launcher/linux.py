"""What Linux offers and Python does not, about this process, its parent and its children. Knows nothing of workers."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when ``parent`` dies. Exits at once if ``parent`` is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on a descendant of this process becomes its child when the descendant's own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Returns the pids of the children of this process, including zombies."""
    try:
        pids = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
        return [int(pid) for pid in pids.split()]
    except OSError:  # a kernel without that file
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == os.getpid()]


def threads() -> int:
    """Returns how many threads this process has, including the threads that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def cpu_seconds(pid: int) -> float | None:
    """Returns how much CPU time a process and its descendants have used; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    except OSError:
        return None
    own = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")  # user, system, and those of reaped children
    return own + sum(cpu_seconds(int(child)) or 0.0 for child in children)


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
