"""Segments of shared memory that leave no file behind: anonymous files, opened by other processes of the same user.

A segment has no name in any file system (``memfd_create``), so a crash at any moment leaves no file; the kernel frees it when the
last process that maps it ends. Other processes open it through ``/proc/PID/fd/N``, which the kernel allows to the same user alone.
All its pages are reserved when it is created: too little memory is an error then, never a SIGBUS later. Hand-written because
``multiprocessing.shared_memory`` has names that a killed process leaves behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path


class SegmentError(OSError):
    """There is too little memory for a segment, or it cannot be shared. ``reason`` is shown to the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Segment:
    """``nbytes`` of zeroed shared memory, mapped into this process. One process calls ``create``, the others ``open``."""

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
            limit = " (the limit on file sizes, ulimit -f, applies)" if error.errno == errno.EFBIG else ""
            raise SegmentError(f"{_mb(nbytes)} needed, but {os.strerror(error.errno or 0)}{limit}") from error

    @classmethod
    def open(cls, address: str, nbytes: int) -> Segment:
        """Map the segment of another process by its ``address``."""
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(
                f"cannot open another worker's memory ({error.strerror}): the workers belong to different users or machines"
            ) from error
        if os.fstat(fd).st_size != nbytes:
            os.close(fd)
            raise SegmentError("another worker's memory has a different size")
        return cls(fd, nbytes)

    @property
    def address(self) -> str:
        """The path by which other processes of this user can open the segment, until ``close_descriptor``."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close_descriptor(self) -> None:
        """Called when all processes have opened the segment. The mapping stays. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close_descriptor()


def free_bytes() -> int:
    """How much this process may still allocate: the machine's free memory, or what its control group's limit leaves if less."""
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
