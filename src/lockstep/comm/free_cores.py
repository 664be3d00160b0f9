"""Whether the machine has a free core for a second thread of each worker.

A worker computes with its intra-op threads. If all threads of all workers of this machine, and one more of each worker, have a core
of their own, a helper thread (comm/helper_thread.py) costs the others nothing. Cores are counted that the workers may use: by their
affinity (taskset, Slurm) and by the CPU quota of their control group (containers). Other processes are not counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def cores_are_free(pids: Sequence[int], threads: int) -> bool:
    """Whether this worker may use a core more than its ``threads`` cores. ``pids``: all workers of this machine, with this one."""
    mine = os.sched_getaffinity(0)
    return one_more_fits(mine, [_affinity(pid, mine) for pid in pids], threads, cpu_quota())


def one_more_fits(mine: Collection[int], workers: Sequence[Collection[int]], threads: int, quota: float) -> bool:
    """Whether ``threads`` + 1 threads per worker fit on the cores ``mine`` of one of them, and into the quota of all.

    ``workers`` are the cores of each worker. The threads of a worker are taken to be spread evenly over its cores.
    """
    here = sum((threads + 1) * len(set(mine).intersection(theirs)) / len(theirs) for theirs in workers)
    return here <= len(mine) + 1e-6 and (threads + 1) * len(workers) <= quota


def cpu_quota(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """How many cores the control groups of this process may use at a time; infinity if nothing limits it."""
    return min((_quota_of(folder) for folder in _folders(groups, own)), default=math.inf)


def _folders(groups: Path, own: Path) -> Iterator[Path]:
    """The control groups that may limit this process: its own and those around it, of version 2 and of version 1."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = groups if controllers == "" else groups / "cpu"
        if controllers == "" or "cpu" in controllers.split(","):
            folder = root / path.strip("/")
            while folder != root:
                yield folder
                folder = folder.parent
            yield root


def _quota_of(folder: Path) -> float:
    names = ("cpu.max",) if (folder / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        allowed, period = " ".join((folder / name).read_text() for name in names).split()
        return int(allowed) / int(period) if int(allowed) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf  # there is no such group here, or its limit is "max"


def _affinity(pid: int, otherwise: Collection[int]) -> Collection[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return otherwise  # the process has ended: another part of the comm reports it
