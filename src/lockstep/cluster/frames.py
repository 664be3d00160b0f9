"""Frames: how messages follow each other on a connection after its opening. Bytes in, bytes out; no socket.

A frame is the length of the payload (4 bytes), the payload, and a MAC of 16 bytes: HMAC-SHA256(key of this direction, number of
the frame, payload), truncated. The number is not sent: both sides count. A frame that was changed, inserted, repeated, left out or
moved has the wrong MAC. An empty payload says that the sender closes the connection: without it, the end of a connection is a loss.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator

MAX_PAYLOAD_BYTES = 16 << 20
_LENGTH_BYTES = 4
_MAC_BYTES = 16


class FrameError(Exception):
    """The received bytes are not what the sender with the key has sent."""


class FrameWriter:
    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def frame(self, payload: bytes) -> bytes:
        """Returns the bytes to send. Raises ValueError if the payload is larger than ``MAX_PAYLOAD_BYTES``."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is larger than the limit of {MAX_PAYLOAD_BYTES} bytes")
        mac = _mac(self._key, self._number, payload)
        self._number += 1
        return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload + mac


class FrameReader:
    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0
        self._received = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame has begun to arrive and is not complete."""
        return bool(self._received)

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Yield the payload of each frame that is now complete. Raises FrameError at the first frame that is wrong."""
        self._received += data
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > MAX_PAYLOAD_BYTES:
                raise FrameError(f"a frame claims to have {length} bytes; the limit is {MAX_PAYLOAD_BYTES}")
            end = _LENGTH_BYTES + length + _MAC_BYTES
            if len(self._received) < end:
                return
            payload, mac = bytes(self._received[_LENGTH_BYTES : end - _MAC_BYTES]), bytes(self._received[end - _MAC_BYTES : end])
            if not hmac.compare_digest(mac, _mac(self._key, self._number, payload)):
                raise FrameError(f"frame {self._number} was changed on its way, or comes from another process")
            self._number += 1
            del self._received[:end]
            yield payload


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")[:_MAC_BYTES]
