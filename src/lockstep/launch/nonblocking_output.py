"""Outlet: writes to the console without ever waiting for it. Knows bytes and two descriptors, not what they say.

A pipe that nobody reads, a terminal held by Ctrl-S or a closed one must not stop the agent. What cannot be
written now is kept, up to a limit; beyond it the middle is left out and said to be.
"""

from __future__ import annotations

import os
import select
import time

_MOST_KEPT = 1 << 20
_CHUNK = 512
"""A descriptor that polls writable takes this much without blocking: POSIX's smallest PIPE_BUF."""
_LEFT_OUT = b"\n[lockstep: the console does not keep up; output is left out here and is whole in the log files]\n"


class NonblockingOutput:
    def __init__(self) -> None:
        self._kept: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._full = False
        self._closed: set[int] = set()

    @property
    def has_unsent(self) -> bool:
        return bool(self._kept)

    def write(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._closed or not data:
            return
        if self._bytes > _MOST_KEPT:
            if not self._full:
                self._full = True
                self._kept.append((descriptor, _LEFT_OUT))
            return
        self._kept.append((descriptor, data))
        self._bytes += len(data)
        self.flush()

    def flush(self, timeout_s: float = 0.0) -> None:
        """Write what can be written. Output stays in order across both descriptors: they may be one terminal."""
        deadline = time.monotonic() + timeout_s
        while self._kept:
            descriptor, data = self._kept[0]
            if not _takes_more(descriptor, deadline):
                return
            written = len(data)
            try:
                written = os.write(descriptor, data[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:  # nobody will read it any more
                self._closed.add(descriptor)
            self._bytes -= written
            if written < len(data):
                self._kept[0] = (descriptor, data[written:])
            else:
                self._kept.pop(0)
        self._bytes, self._full = 0, False


def _takes_more(descriptor: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    found = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    return bool(found)
