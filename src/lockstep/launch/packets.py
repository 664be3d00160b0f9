"""JSON over local sockets: packets with descriptors for agent, zygote and workers; frames for the door. Knows no meanings."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

Packet = dict[str, Any]
MOST_BYTES = 16 << 20
MOST_DESCRIPTORS = 96
"""In one packet; the kernel passes up to 253."""
_PACKET_BYTES = 1 << 20


def send(line: socket.socket, packet: Packet, descriptors: Sequence[int] = ()) -> None:
    """One packet, whole or not at all: OSError where the other side is gone, BlockingIOError where it does not read."""
    data = json.dumps(packet).encode()
    if descriptors:
        socket.send_fds(line, [data], list(descriptors))
    else:
        line.send(data)


def receive(line: socket.socket) -> tuple[Packet | None, list[int]]:
    """The next packet and what came with it; None at the end. BlockingIOError: nothing yet. ValueError: no packet of ours."""
    data, descriptors, _, _ = socket.recv_fds(line, _PACKET_BYTES, MOST_DESCRIPTORS)
    packet = json.loads(data) if data else None
    if packet is not None and not isinstance(packet, dict):
        raise ValueError("a packet that is no JSON object")
    return packet, descriptors


def frame(message: Packet) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data


class Frames:
    """Takes bytes as they come from a stream, gives whole messages. ValueError: what came is no such stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Packet]:
        self._bytes += data
        messages: list[Packet] = []
        while len(self._bytes) >= 4:
            (size,) = struct.unpack_from("!I", self._bytes)
            if size > MOST_BYTES:
                raise ValueError(f"a message of {size} bytes; at most {MOST_BYTES} are taken")
            if len(self._bytes) < 4 + size:
                break
            message = json.loads(self._bytes[4 : 4 + size])
            del self._bytes[: 4 + size]
            if not isinstance(message, dict):
                raise ValueError("a message that is no JSON object")
            messages.append(message)
        return messages
