"""Packets: JSON objects over local SOCK_SEQPACKET sockets, with file descriptors if needed. Does not know what a packet means.

The agent exchanges packets with the zygote, with the workers, and with the clients of its control socket.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

Packet = dict[str, Any]
MAX_DESCRIPTORS = 96
"""In one packet; the kernel passes up to 253."""
_MAX_BYTES = 1 << 20


def send(connection: socket.socket, packet: Packet, descriptors: Sequence[int] = ()) -> None:
    """Send one packet, whole or not at all.

    Raises BlockingIOError if the receiver does not read, and another OSError if it is gone or the packet is too large.
    """
    data = json.dumps(packet).encode()
    if descriptors:
        socket.send_fds(connection, [data], list(descriptors))
    else:
        connection.send(data)


def receive(connection: socket.socket) -> Packet | None:
    """Receive one packet. Returns None if the sender has closed its end. Descriptors that were sent with the packet are refused.

    Raises BlockingIOError if there is no packet yet, another OSError if the connection is broken, and ValueError if the data is
    not a JSON object or is larger than 1 MiB.
    """
    return receive_with_descriptors(connection, 0)[0]


def receive_with_descriptors(connection: socket.socket, max_descriptors: int = MAX_DESCRIPTORS) -> tuple[Packet | None, list[int]]:
    """As ``receive``, with the descriptors that were sent with the packet."""
    data, descriptors, flags, _ = socket.recv_fds(connection, _MAX_BYTES, max_descriptors)
    if flags & socket.MSG_TRUNC:
        raise ValueError(f"a packet has more than {_MAX_BYTES} bytes")
    try:
        packet = json.loads(data) if data else None
    except RecursionError as error:
        raise ValueError("a packet is nested too deeply") from error
    if packet is not None and not isinstance(packet, dict):
        raise ValueError("a packet is not a JSON object")
    return packet, descriptors
