"""Breaks a gloo group's connections from outside, which nothing in torch does.

``pg.abort()`` and ``pg.shutdown()`` leave a pending gloo wait pending. Shutting down the group's
sockets ends it within milliseconds. We find them by looking at which descriptors appeared while
the group was built, and keep duplicates, so that a number that was closed and reused by somebody
else is never touched.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_build_lock = threading.Lock()


class Connections:
    """Duplicates of the connected sockets that one group opened."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Remember the sockets that appear inside this block (one block at a time in a process)."""
        with _build_lock:
            before = _open_sockets()
            yield
            for inode, fd in _open_sockets().items():
                if inode not in before:
                    self._adopt(fd)

    def _adopt(self, fd: int) -> None:
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            return  # closed between listing and duplicating: not one we could break
        try:
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            connected = not listening and sock.getpeername() is not None
        except OSError:
            connected = False
        if connected:  # touching the listener would end the process with an uncaught C++ exception
            self._sockets.append(sock)
        else:
            sock.close()

    def __len__(self) -> int:
        return len(self._sockets)

    def cut(self) -> None:
        """End every connection now. Any thread; may be called twice."""
        with self._lock:
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other side was faster

    def close(self) -> None:
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets = []


def _open_sockets() -> dict[int, int]:
    """inode -> descriptor of every socket this process holds."""
    found: dict[int, int] = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found
