"""The addresses of this machine: which of them others can probably reach. Opens no connection."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from lockstep.errors import UsageError

_SIOCGIFADDR = 0x8915


def reachable_host(local_host: str, interface: str | None) -> str:
    """The address of this machine that the workers of other machines connect to.

    Args:
        local_host: The address of this end of the connection to the head.
        interface: The network interface that the user has named, such as "eth0".

    Returns:
        The address of ``interface``, if it is given; else ``local_host``, unless only this machine can reach that: then the
        address of the first interface that has another one.

    Raises:
        UsageError: The interface has no address.
    """
    if interface is not None:
        address = interface_address(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex() if interface_address(name) is not None)
            raise UsageError(f"--interface {interface}: there is no such interface with an IPv4 address. This machine has {names}.")
        return address
    if not ipaddress.ip_address(local_host.partition("%")[0]).is_loopback:
        return local_host
    addresses = [interface_address(name) for _, name in socket.if_nameindex()]
    return next((each for each in addresses if each is not None and not ipaddress.ip_address(each).is_loopback), local_host)


def interface_of(address: str) -> str:
    """The name of the network interface that has an address; empty if none has."""
    return next((name for _, name in socket.if_nameindex() if interface_address(name) == address), "")


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
