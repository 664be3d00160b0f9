"""The address of a TCP store, tried before torch waits for it: an address that cannot work is named within 20 s.

torch retries an unknown name, an address without a route and a firewall alike until its timeout, which may be many minutes. Here:

    the name does not resolve, no route, no answer    an error after ``GIVE_UP_S``
    refused                                           tried until the timeout: rank 0 may be starting. A line after ``NOTICE_S``
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from lockstep.errors import PeerError, UsageError

GIVE_UP_S = 15.0
"""How long a name may not resolve, or an address may be unreachable: machines of one job do not start in the same second."""
NOTICE_S = 10.0
_ATTEMPT_S = 5.0
_PAUSE_S = 0.25


@dataclass(frozen=True)
class StoreAddress:
    """One address that a host name resolves to."""

    family: socket.AddressFamily
    sockaddr: Any

    def __str__(self) -> str:
        return f"[{self.number}]:{self.sockaddr[1]}" if self.family == socket.AF_INET6 else f"{self.number}:{self.sockaddr[1]}"

    @property
    def number(self) -> str:
        """As text that ``getaddrinfo`` takes, with the interface of a link-local address."""
        return socket.getnameinfo(self.sockaddr, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def reach_store(rank: int, host: str, port: int, timeout_s: float) -> str:
    """Wait until the store of another process accepts a connection. Returns its address as a number.

    Raises:
        UsageError: The name did not resolve for ``GIVE_UP_S``.
        PeerError: The address could not be reached for ``GIVE_UP_S``, or refused connections for ``timeout_s``.
    """
    started = time.monotonic()
    addresses = _resolve(rank, host, port, timeout_s)
    answered, noticed = time.monotonic(), False
    while True:
        reasons = {}
        for address in addresses:
            error = _connect(address, min(_ATTEMPT_S, timeout_s))
            if error is None:
                return address.number
            reasons[address] = error
        now = time.monotonic()
        if any(error.errno == errno.ECONNREFUSED for error in reasons.values()):
            answered = now
        failed = "; ".join(f"{address}: {_say(error)}" for address, error in reasons.items())
        if now - answered >= min(GIVE_UP_S, timeout_s) or now - started >= timeout_s:
            raise PeerError(
                f"no store answered rank {rank} at {host}:{port} for {now - started:.0f} s: "
                f"from {socket.gethostname()} to {failed}. Check that rank 0 is running, "
                "that MASTER_ADDR (or LOCKSTEP_STORE) names its machine, and that no firewall is between them.",
                ranks=(0,),
            )
        if now - started >= NOTICE_S and not noticed:
            noticed = True
            line = f"rank {rank} has tried for {NOTICE_S:g} s to reach the store of rank 0 at {host}:{port} ({failed})."
            print(f"lockstep: {line} It tries until {timeout_s:g} s have passed.", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)


def check_own_address(host: str, port: int, timeout_s: float) -> str:
    """Rank 0 calls this before it serves a store: the others must reach this process by that name. Returns the address as a number.

    Raises:
        UsageError: The name does not resolve, or leads to another machine.
    """
    addresses = _resolve(0, host, port, timeout_s)
    for address in addresses:
        if _is_own(address):
            return address.number
    return _check_forwarded(addresses, host, port, min(GIVE_UP_S, timeout_s))


def _check_forwarded(addresses: list[StoreAddress], host: str, port: int, timeout_s: float) -> str:
    """An address that is not of this machine may be forwarded here, as that of a Kubernetes service. Try it."""
    try:
        listener = socket.create_server(("", port))
    except OSError:
        return addresses[0].number  # the port is in use, maybe by a store of this process: torch will say
    deadline = time.monotonic() + timeout_s
    with closing(listener):
        listener.setblocking(False)
        while True:
            reasons = []
            for address in addresses:
                error = _connect(address, min(_ATTEMPT_S, timeout_s))
                if error is None and _accepts(listener):
                    return address.number
                reasons.append(f"{address}: {_say(error) if error else 'another machine answers'}")
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_S)
    raise UsageError(
        f"rank 0 cannot serve the store at {host}:{port}: it runs on {socket.gethostname()}, which has none of the addresses of "
        f"{host}, and cannot reach itself there ({'; '.join(reasons)}). Set MASTER_ADDR (or LOCKSTEP_STORE) to an address of the "
        "machine of rank 0, or start rank 0 on the machine that it names."
    )


def _accepts(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _is_own(address: StoreAddress) -> bool:
    with closing(socket.socket(address.family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address.sockaddr[0], 0, *address.sockaddr[2:]))
        except OSError:
            return False
    return True


def _connect(address: StoreAddress, timeout_s: float) -> OSError | None:
    """Returns None if the address accepts a connection, which is closed at once; else the reason."""
    with closing(socket.socket(address.family, socket.SOCK_STREAM)) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(address.sockaddr)
        except OSError as error:
            return error
    return None


def _say(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer (a firewall may drop packets to this port, or the machine is off)"
    return os.strerror(error.errno).lower() if error.errno else str(error)


def _resolve(rank: int, host: str, port: int, timeout_s: float) -> list[StoreAddress]:
    """Resolve a name, again and again for ``GIVE_UP_S``. ``getaddrinfo`` may block for longer, so a thread calls it."""
    deadline = time.monotonic() + min(GIVE_UP_S, timeout_s)
    reason = "no name server answers"
    while True:
        answer = _Lookup(host, port)
        answer.join(max(0.0, deadline - time.monotonic()))
        if answer.addresses:
            return answer.addresses
        reason = answer.reason or reason
        if time.monotonic() + _PAUSE_S >= deadline:
            raise UsageError(
                f"rank {rank} on {socket.gethostname()} cannot resolve the host {host} of the store at {host}:{port} ({reason}). "
                "Set MASTER_ADDR (or LOCKSTEP_STORE) to the IP address of rank 0's machine, or add the name to DNS or /etc/hosts."
            )
        time.sleep(_PAUSE_S)


class _Lookup(threading.Thread):
    """One call of ``getaddrinfo``. Read its attributes after ``join``; both are empty while the call blocks."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="lockstep-lookup", daemon=True)
        self._host, self._port = host, port
        self.addresses: list[StoreAddress] = []
        self.reason = ""
        self.start()

    def run(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.reason = getattr(error, "strerror", None) or str(error)
        else:
            self.addresses = list(dict.fromkeys(StoreAddress(family, sockaddr) for family, _, _, _, sockaddr in found))
