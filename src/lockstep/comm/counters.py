"""Counters in shared memory by which workers publish what they have written.

Note: memory order
------------------
A worker writes data into shared memory and then raises its counter; another sees the counter and
reads the data. That is right only if the data cannot be seen after the counter:

    writer   (1) store data        ...... (2) store counter
    reader   (3) load counter      ...... (4) load data

x86-64  stores become visible in program order (1 before 2), loads happen in program order (3 before
        4), and an aligned 8-byte store or load is one access (Intel SDM vol. 3, 9.2.2 and 9.1.1).
        torch's CPU kernels that fill (1) use ordinary stores: where one uses streaming stores it
        fences before it returns. The compiler cannot reorder either: each access is a call into
        the interpreter or into torch. So a plain store publishes: ``PlainCounters``.

ARM64   neither pair is ordered by the hardware, and Python has no fence. A mutex has: unlocking
        releases, locking the same mutex acquires. So each counter is written and read under a
        process-shared POSIX mutex in the same memory: ``LockedCounters``, some 0.5 us slower. The
        mutex is robust: a worker killed while holding one does not stop the others.

Other machines take the mutex too; it is right wherever POSIX threads are. Both pass the same tests
(on x86-64: we have no ARM64 machine to run them on).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import threading

LINE_BYTES = 64  # one counter per cache line: workers do not steal each other's
_MUTEX_BYTES = 64  # a pthread_mutex_t is 40 bytes on x86-64, 48 on ARM64


class PlainCounters:
    """One 8-byte counter per rank at ``offset`` of a shared mapping; each rank writes its own alone."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int, first: bool = False) -> None:
        cells = memoryview(memory).cast("q")
        start, step = offset // 8, LINE_BYTES // 8
        self._cells = cells[start : start + size * step : step]

    @staticmethod
    def nbytes(size: int) -> int:
        return size * LINE_BYTES

    def publish(self, rank: int, value: int) -> None:
        """Everything this thread wrote before can be seen by whoever sees ``value``."""
        self._cells[rank] = value

    def read(self) -> list[int]:
        return self._cells.tolist()

    def reached(self, value: int) -> bool:
        """Whether every rank's counter is at least ``value``; if so, all they published can be read."""
        return min(self._cells.tolist()) >= value


class LockedCounters(PlainCounters):
    """The same, every access under a process-shared, robust mutex. ``first`` initialises them, on one rank, before others look."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int, first: bool = False) -> None:
        super().__init__(memory, offset, size)
        self._libc = ctypes.CDLL(None, use_errno=True)
        raw = (ctypes.c_char * _MUTEX_BYTES).from_buffer(memory, offset + super().nbytes(size))
        self._mutex = ctypes.byref(raw)
        self._raw = raw
        self._local = threading.Lock()
        if first:
            attributes = ctypes.byref(ctypes.create_string_buffer(64))
            failed = self._libc.pthread_mutexattr_init(attributes)
            failed = failed or self._libc.pthread_mutexattr_setpshared(attributes, 1)
            failed = failed or self._libc.pthread_mutexattr_setrobust(attributes, 1)
            failed = failed or self._libc.pthread_mutex_init(self._mutex, attributes)
            if failed:
                raise OSError("this system has no process-shared robust mutex")

    @staticmethod
    def nbytes(size: int) -> int:
        return size * LINE_BYTES + _MUTEX_BYTES

    def publish(self, rank: int, value: int) -> None:
        with self._local:
            self._lock()
            super().publish(rank, value)
            self._libc.pthread_mutex_unlock(self._mutex)

    def read(self) -> list[int]:
        with self._local:
            self._lock()
            values = super().read()
            self._libc.pthread_mutex_unlock(self._mutex)
            return values

    def reached(self, value: int) -> bool:
        return min(self.read()) >= value

    def _lock(self) -> None:
        # The holder does a handful of instructions, so the wait is bounded by its time slice; if it died, we inherit.
        if self._libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD:
            self._libc.pthread_mutex_consistent(self._mutex)


def counters_for(machine: str = "") -> type[PlainCounters]:
    """The fastest counters that are right on this processor."""
    return PlainCounters if (machine or platform.machine()) in ("x86_64", "AMD64") else LockedCounters
