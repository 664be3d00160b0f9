"""Counters in shared memory, by which a worker publishes that data it has written may be read.

Note: memory order
------------------
A worker writes data into shared memory and then increases its counter; another worker sees the counter
and reads the data. This is correct only if the data becomes visible before the counter:

    writer   (1) store data        ...... (2) store counter
    reader   (3) load counter      ...... (4) load data

x86-64  stores become visible in program order (1 before 2), loads happen in program order (3 before
        4), and an aligned 8-byte store or load is one access (Intel SDM vol. 3, 9.2.2 and 9.1.1).
        torch's CPU kernels that write (1) use ordinary stores; a kernel that uses streaming stores
        fences before it returns. The compiler cannot reorder them either: each access is a call into
        the interpreter or into torch. So a plain store suffices: ``PlainCounters``.

ARM64   the hardware orders neither pair, and Python has no fence. A mutex has one: unlocking
        releases, locking the same mutex acquires. So each counter is written and read under a
        process-shared POSIX mutex in the same memory: ``LockedCounters``, about 0.5 us slower. The
        mutex is robust: a worker that is killed while it holds the mutex does not stop the others.

A worker may write (1) with two threads, one after the other (comm/helper_thread.py). The second thread
has taken a lock that the first one has released, which orders their stores, and then stores (2).

Other processors use the mutex too; it is correct on every system with POSIX threads. Both classes pass
the same tests (on x86-64: we have no ARM64 machine to run them on).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import threading

LINE_BYTES = 64  # one counter per cache line, so that workers do not contend for a line
_MUTEX_BYTES = 64  # a pthread_mutex_t is 40 bytes on x86-64, 48 on ARM64


class PlainCounters:
    """One 8-byte counter per rank at ``offset`` of a shared mapping; each rank writes only its own counter."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int, is_first: bool = False) -> None:
        cells = memoryview(memory).cast("q")
        start, step = offset // 8, LINE_BYTES // 8
        self._cells = cells[start : start + size * step : step]

    @staticmethod
    def nbytes(size: int) -> int:
        return size * LINE_BYTES

    def publish(self, rank: int, value: int) -> None:
        """Set this rank's counter. A process that sees ``value`` also sees everything this thread wrote before."""
        self._cells[rank] = value

    def read(self) -> list[int]:
        return self._cells.tolist()

    def reached(self, value: int) -> bool:
        """Whether every rank's counter is at least ``value``; if so, everything they wrote before can be read."""
        return min(self._cells.tolist()) >= value


class LockedCounters(PlainCounters):
    """The same, with every access under a process-shared, robust mutex.

    One rank passes ``is_first=True`` and initialises the mutex before the other ranks use it.
    """

    def __init__(self, memory: mmap.mmap, offset: int, size: int, is_first: bool = False) -> None:
        super().__init__(memory, offset, size)
        self._libc = ctypes.CDLL(None, use_errno=True)
        raw = (ctypes.c_char * _MUTEX_BYTES).from_buffer(memory, offset + super().nbytes(size))
        self._mutex = ctypes.byref(raw)
        self._raw = raw
        self._local = threading.Lock()
        if is_first:
            attributes = ctypes.byref(ctypes.create_string_buffer(64))
            failed = self._libc.pthread_mutexattr_init(attributes)
            failed = failed or self._libc.pthread_mutexattr_setpshared(attributes, 1)
            failed = failed or self._libc.pthread_mutexattr_setrobust(attributes, 1)
            failed = failed or self._libc.pthread_mutex_init(self._mutex, attributes)
            if failed:
                raise OSError("this system has no process-shared robust mutex, which shared memory needs. Set LOCKSTEP_COMM=gloo.")

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
        # A process holds the mutex for a few instructions, so this wait is short; from a process that died we inherit it.
        if self._libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD:
            self._libc.pthread_mutex_consistent(self._mutex)


def counters_for(machine: str = "") -> type[PlainCounters]:
    """The fastest counters that are correct on this processor."""
    return PlainCounters if (machine or platform.machine()) in ("x86_64", "AMD64") else LockedCounters
