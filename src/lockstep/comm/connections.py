"""Finds the sockets of gloo groups, and cuts their connections, which torch has no call for.

``pg.abort()`` and ``pg.shutdown()`` do not end a pending gloo wait; shutting down the group's sockets ends it within milliseconds.
We find the sockets by the descriptors that appear while the group is built. We keep duplicates of them, so that a descriptor number
that is closed and reused for something else is never touched.
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
    """Duplicates of the connected sockets of one or several groups."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around the construction of a group: keep the sockets that appear in the meantime. One thread at a time."""
        with _build_lock:
            before = _open_sockets()
            yield
            for inode, fd in _open_sockets().items():
                if inode not in before:
                    self._keep(fd)

    def _keep(self, fd: int) -> None:
        sock = _duplicate(fd)
        if sock is None:
            return
        try:
            connected = not _listens(sock) and sock.getpeername() is not None
        except OSError:
            connected = False
        if connected:  # shutting down the listening socket would end the process with an uncaught C++ exception
            self._sockets.append(sock)
        else:
            sock.close()

    def cut(self) -> None:
        """End every connection now. Any thread may call it, and twice."""
        with self._lock:
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other side has closed it

    def close(self) -> None:
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets = []


@contextmanager
def new_listeners() -> Iterator[list[socket.socket]]:
    """Around calls that open listening sockets: afterwards the list contains duplicates of them, which the caller closes."""
    found: list[socket.socket] = []
    before = _open_sockets()
    yield found
    for inode, fd in _open_sockets().items():
        sock = _duplicate(fd) if inode not in before else None
        if sock is not None and _listens(sock):
            found.append(sock)
        elif sock is not None:
            sock.close()


def _duplicate(fd: int) -> socket.socket | None:
    """None if the descriptor was closed between listing and duplicating, or is no socket any more."""
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError:
        return None


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _open_sockets() -> dict[int, int]:
    """inode -> descriptor of every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found
