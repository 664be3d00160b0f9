"""How long the data of a worker is on its way, as the kernel sees it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import Any

import pytest

from lockstep.comm import connections
from lockstep.comm.connections import Connections
from tests.waiting import wait_until


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        return sender, receiver


def _connections(sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr(connections, "_leads_elsewhere", lambda peer: True)
    found = Connections()
    found._keep(sock.fileno())
    return found


def test_the_time_of_data_on_its_way_is_counted_and_the_count_outlives_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = _pair()
    with sender, receiver:
        found = _connections(sender, monkeypatch)
        before = found.link_us()
        reader = threading.Thread(target=_read, args=(receiver, 64 << 20))
        reader.start()
        sender.sendall(bytes(64 << 20))
        reader.join()
        wait_until(lambda: found.link_us() > before, "the kernel has counted", 5.0)
        counted = found.link_us()
        found.close()
        assert found.link_us() >= counted


def test_a_peer_that_does_not_read_is_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = _pair()
    with sender, receiver:
        found = _connections(sender, monkeypatch)
        sender.setblocking(False)
        began = time.monotonic()
        end = began + 1.5
        while time.monotonic() < end:
            try:
                sender.send(bytes(1 << 16))
            except BlockingIOError:
                time.sleep(0.01)
        assert found.link_us() < 0.5 * (time.monotonic() - began) * 1e6
        found.close()


def test_connections_within_a_machine_are_no_links() -> None:
    sender, receiver = _pair()
    with sender, receiver:
        found = Connections()
        found._keep(sender.fileno())
        sender.sendall(bytes(1 << 16))
        _read(receiver, 1 << 16)
        assert found.link_us() == 0
        found.close()


def test_a_connection_that_another_thread_has_opened_within_the_machine_is_left_alone() -> None:
    """It may be that of the worker to its agent. Neither of these sockets has a name."""
    one, other = socket.socketpair()
    with one, other:
        found = Connections()
        found._keep(one.fileno())
        found.cut()
        one.sendall(b"still connected")
        assert other.recv(99) == b"still connected"
        found.close()


def test_a_peer_that_dies_while_its_connection_is_looked_at_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = _pair()

    class Looked(socket.socket):
        def getpeername(self) -> Any:
            name = super().getpeername()
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            receiver.close()  # with a reset
            return name

    monkeypatch.setattr(connections, "_duplicate", lambda fd: Looked(fileno=os.dup(fd)))
    with sender:
        found = Connections()
        found._keep(sender.fileno())
        with pytest.raises(OSError, match="not connected"):
            sender.getpeername()
        found.cut()
        found.close()


def _read(sock: socket.socket, count: int) -> None:
    while count:
        count -= len(sock.recv(min(count, 1 << 20)))
