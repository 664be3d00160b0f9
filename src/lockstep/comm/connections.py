"""Finds the sockets of gloo groups, and cuts their connections, which torch has no call for.

``pg.abort()`` and ``pg.shutdown()`` do not end a pending gloo wait; shutting down the group's sockets ends it within milliseconds.
We find the sockets by the descriptors that appear while the group is built. We keep duplicates of them, so that a descriptor number
that is closed and reused for something else is never touched.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_build_lock = threading.Lock()
_INFO_BYTES = 232
_ACKED, _ACKED_OFFSET = struct.Struct("@Q"), 120
_RATE, _RATE_OFFSET = struct.Struct("@QQQ"), 160
"""Where ``tcpi_bytes_acked`` is in Linux's ``struct tcp_info`` (linux/tcp.h), and ``tcpi_delivery_rate`` (bytes per second),
``tcpi_busy_time`` and ``tcpi_rwnd_limited`` (microseconds). The kernel adds fields at its end alone, and returns as many bytes as
it knows."""


class Connections:
    """Duplicates of the connected sockets of one or several groups."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._links: list[_Link] = []  # those of them that lead to other machines
        self._link_us = 0.0
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
        peer = _peer(sock)
        if peer is None:
            sock.close()
            return
        self._sockets.append(sock)
        if _leads_elsewhere(peer):
            self._links.append(_Link(sock))

    def cut(self) -> None:
        """End every connection now. Any thread may call it, and twice."""
        with self._lock:
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other side has closed it

    def link_us(self) -> int:
        """Return how long the data of this worker was on its way to other machines, added over the connections. It grows only.

        It is the time that the data needed at the rate at which the kernel saw it arrive. 0 if the kernel does not tell.
        """
        with self._lock:
            self._link_us += sum(link.new_us() for link in self._links)
            return int(self._link_us)

    def close(self) -> None:
        with self._lock:
            self._link_us += sum(link.new_us() for link in self._links)
            self._links = []
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


def _peer(sock: socket.socket) -> str | None:
    """Returns the address of the other side; None if the socket is no connection over IP, or is one no more.

    None for a socket that listens too: shutting it down would end the process with an uncaught C++ exception.
    """
    try:
        is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
        return str(sock.getpeername()[0]) if is_ip and not _listens(sock) else None
    except OSError:
        return None


def _leads_elsewhere(peer: str) -> bool:
    return hasattr(socket, "TCP_INFO") and not peer.startswith(("127.", "::1"))


class _Link:
    """A connection to another machine: how long its data is on its way.

    Not how long the socket is busy: the kernel counts that in ticks of 1 to 10 ms, and the last data of a step is busy until the
    receiver confirms it, which a receiver that has nothing to send delays by 40 ms.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._last = self._read()

    def new_us(self) -> float:
        """Return for how long data was on its way since the last call. Time in which the receiver had no room does not count."""
        before, now = self._last, self._read()
        if before is None or now is None or now.acked <= before.acked or now.rate <= 0:
            return 0.0
        self._last = now
        busy_us, full_us = now.busy_us - before.busy_us, now.full_us - before.full_us
        counted = max(0.0, 1 - full_us / busy_us) if busy_us > 0 else 1.0
        return (now.acked - before.acked) / now.rate * 1e6 * counted

    def _read(self) -> _LinkInfo | None:
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return None
        if len(info) < _RATE_OFFSET + _RATE.size:
            return None  # a kernel before 4.10
        return _LinkInfo(*_ACKED.unpack_from(info, _ACKED_OFFSET), *_RATE.unpack_from(info, _RATE_OFFSET))


class _LinkInfo(NamedTuple):
    """``acked``: bytes that have arrived; ``rate``: bytes per second; ``full_us``: how long the receiver had no room for more."""

    acked: int
    rate: int
    busy_us: int
    full_us: int


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
