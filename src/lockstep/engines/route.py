"""The address of this machine at which another machine reaches it: the source address of the route there. Sends nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

_ANY_PORT = 9


def source_address(host: str) -> str | None:
    """Returns this machine's address on the way to ``host`` (a name or an address), or None if there is no way or no such name."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # UDP: the kernel chooses a route, and no packet leaves
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def without_loopback(addresses: Iterable[str]) -> list[str]:
    """Returns the addresses, each once, without those that only this machine can use; all of them if there are no others."""
    each_once = list(dict.fromkeys(addresses))
    outside = [address for address in each_once if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    return outside or each_once


def listen_host(addresses: list[str]) -> str:
    """Returns where to listen to be reached at all ``addresses``: the one there is, or every interface."""
    if len(addresses) == 1:
        return addresses[0]
    return "::" if any(":" in address for address in addresses) else "0.0.0.0"
