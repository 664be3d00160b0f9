"""The control socket answers well-formed requests, and no client can stop the agent that owns it."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launcher import packets
from lockstep.launcher.control_socket import ControlSocket


class Server:
    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "agent.sock")
        self.selector = selectors.DefaultSelector()
        self.socket = ControlSocket(self.address, self.selector, lambda request: {"ok": True, "value": request["size"]})

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(5)
        client.connect(self.address)
        self.handle()
        return client

    def handle(self) -> None:
        while found := self.selector.select(0):
            for key, _ in found:
                key.data()

    def is_answering(self) -> bool:
        with self.connect() as client:
            packets.send(client, {"size": 3})
            self.handle()
            return packets.receive(client) == {"ok": True, "value": 3}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.socket.close()
    server.selector.close()


def test_each_request_of_a_client_is_answered(server: Server) -> None:
    with server.connect() as client:
        for size in (1, 2):
            packets.send(client, {"size": size})
            server.handle()
            assert packets.receive(client) == {"ok": True, "value": size}


@pytest.mark.parametrize(
    "data",
    [b"nonsense", b"[]", b"3", bytes([255]), b"[" * 100_000, b'{"a":' * 30_000, b'{"size": ' + b"9" * 5000 + b"}"],
    ids=["no JSON", "a list", "a number", "no text", "nested lists", "nested objects", "a long number"],
)
def test_a_client_that_sends_anything_else_is_disconnected(server: Server, data: bytes) -> None:
    with server.connect() as client:
        client.send(data)
        server.handle()
        assert client.recv(100) == b""
    assert server.is_answering()


def test_a_packet_that_is_too_large_is_refused(server: Server) -> None:
    with server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        data = json.dumps({"size": 1, "more": "x" * (1 << 20)}).encode()
        try:
            client.send(data)
        except OSError:
            pytest.skip("the kernel itself refuses packets of this size")
        server.handle()
        assert client.recv(100) == b""
    assert server.is_answering()


def test_a_client_that_does_not_read_its_answers_is_disconnected(server: Server) -> None:
    with server.connect() as client:
        with pytest.raises(BrokenPipeError):
            for _ in range(100_000):
                packets.send(client, {"size": 1})
                server.handle()
    assert server.is_answering()


def test_descriptors_that_a_client_sends_are_not_kept(server: Server) -> None:
    with server.connect() as client:
        before = len(os.listdir("/proc/self/fd"))
        packets.send(client, {"size": 1}, [0, 0, 0])
        server.handle()
        assert packets.receive(client) == {"ok": True, "value": 1}
        assert len(os.listdir("/proc/self/fd")) == before
