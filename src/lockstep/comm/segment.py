"""Shared memory that leaves nothing behind: anonymous files, passed between processes of one user by descriptor.

A segment has no name in any file system (``memfd_create``), so a crash at any moment leaves no
file; it is gone when the last process that maps it is. Others open it through
``/proc/PID/fd/N``, which the kernel allows to the same user alone. All its pages are reserved when
it is made: too little memory is an error then, never a SIGBUS later.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path


class SegmentError(OSError):
    """There is no room for a segment, or it cannot be shared. ``reason`` is for the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Segment:
    """``nbytes`` of zeroed shared memory, mapped here. ``create`` on one process, ``open`` on the others."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self.memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        free = free_bytes()
        if nbytes > free:
            raise SegmentError(f"{_mb(nbytes)} needed, {_mb(free)} of memory free")
        fd = os.memfd_create("lockstep", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            limit = " (the limit on file sizes, ulimit -f, counts here)" if error.errno == errno.EFBIG else ""
            raise SegmentError(f"{_mb(nbytes)} needed, but {os.strerror(error.errno or 0)}{limit}") from error

    @classmethod
    def open(cls, address: str, nbytes: int) -> Segment:
        """Map another process's segment by the ``address`` it gave."""
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(
                f"cannot open another worker's memory ({error.strerror}): not one user, or not one machine"
            ) from error
        if os.fstat(fd).st_size != nbytes:
            os.close(fd)
            raise SegmentError("another worker's memory has another size")
        return cls(fd, nbytes)

    @property
    def address(self) -> str:
        """Where other processes of this user can open it, until ``seal``."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def seal(self) -> None:
        """Everybody has it: close the descriptor that was given out. The mapping stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.seal()


def free_bytes() -> int:
    """What this process may still allocate: the machine's memory and its control group's limit, whichever is less."""
    limits = [_meminfo()]
    for used, limit in (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes")):
        try:
            limits.append(int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or no limit in it
    return max(0, min(limits))


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _mb(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MB" if nbytes < 100 << 20 else f"{nbytes / (1 << 20):.0f} MB"
