"""NonblockingOutput: writes to the console without ever waiting for it. Knows bytes and two descriptors, not their meaning.

A pipe or a terminal that nobody reads, a terminal that is paused by Ctrl-S or closed must not stop the agent. What cannot be
written now is queued, up to a limit. What exceeds the limit is discarded, and a line says so.

A terminal is opened anew, in nonblocking mode: it polls writable if it takes one byte, and a blocking write of two would wait. The
descriptor that this process got stays in blocking mode, because the shell and other programs use the same.
"""

from __future__ import annotations

import os
import select
import time

_MAX_QUEUED_BYTES = 1 << 20
_CHUNK_BYTES = 512
"""A pipe that polls writable takes this much without blocking: POSIX's smallest PIPE_BUF."""
_PAUSE_S = 0.01
_DISCARDED = b"\n[lockstep: the console is too slow; output is left out here. The log files have all of it]\n"


class NonblockingOutput:
    def __init__(self) -> None:
        self._queue: list[tuple[int, bytes]] = []
        self._queued_bytes = 0
        self._is_discarding = False
        self._closed: set[int] = set()
        self._writers: dict[int, int] = {}
        """What is written to in place of each descriptor."""

    @property
    def has_unsent(self) -> bool:
        return bool(self._queue)

    def write(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._closed or not data:
            return
        if self._queued_bytes > _MAX_QUEUED_BYTES:
            if not self._is_discarding:
                self._is_discarding = True
                self._queue.append((descriptor, _DISCARDED))
            return
        self._queue.append((descriptor, data))
        self._queued_bytes += len(data)
        self.flush()

    def flush(self, timeout_s: float = 0.0) -> None:
        """Write what can be written. The order is kept across both descriptors, because both may be one terminal."""
        deadline = time.monotonic() + timeout_s
        while self._queue:
            descriptor, data = self._queue[0]
            if descriptor not in self._writers:
                self._writers[descriptor] = _open_writer(descriptor)
            writer = self._writers[descriptor]
            if not _is_writable(writer, deadline):
                return
            written = len(data)
            try:
                written = os.write(writer, data[:_CHUNK_BYTES])
            except BlockingIOError:  # a terminal polls writable, but takes a line end only if it has room for two bytes
                if time.monotonic() >= deadline:
                    return
                time.sleep(_PAUSE_S)
                continue
            except OSError:  # the reader is gone
                self._closed.add(descriptor)
            self._queued_bytes -= written
            if written < len(data):
                self._queue[0] = (descriptor, data[written:])
            else:
                self._queue.pop(0)
        self._queued_bytes, self._is_discarding = 0, False


def _open_writer(descriptor: int) -> int:
    """Returns a nonblocking descriptor of the same terminal, or ``descriptor`` if it is no terminal or cannot be opened anew."""
    if not os.isatty(descriptor):
        return descriptor
    try:  # not by its name: a container may have a terminal that has no name in it
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # after `su`, it belongs to another user
        return descriptor


def _is_writable(descriptor: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
