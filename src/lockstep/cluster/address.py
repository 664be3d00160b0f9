"""Address: host and port of one end of a TCP connection, as people write them. Opens no socket."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.errors import UsageError

_MAPPED = "::ffff:"
"""How a socket for both IPv4 and IPv6 shows an IPv4 address."""


class Address(NamedTuple):
    """``str(address)`` is "HOST:PORT", or "[HOST]:PORT" if the host is an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read "HOST:PORT" or "[IPv6]:PORT". Raises UsageError if the text is neither."""
        host, colon, port = text.strip().rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        if is_bracketed:
            host = host[1:-1]
        if (
            not colon
            or not host
            or (":" in host) != is_bracketed
            or not (port.isascii() and port.isdigit())
            or int(port[:6]) > 65535
        ):
            raise UsageError(f"{text!r} is not an address. Write HOST:PORT, for example 10.0.0.1:29400 or [fd00::1]:29400.")
        return cls(host, int(port))

    @classmethod
    def from_socket(cls, name: Any) -> Address:
        """Convert what ``getsockname``, ``getpeername`` or ``accept`` of a TCP socket return."""
        host: str = name[0]
        if host.lower().startswith(_MAPPED) and "." in host:
            host = host[len(_MAPPED) :]
        return cls(host, name[1])
