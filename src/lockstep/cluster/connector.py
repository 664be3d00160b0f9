"""Connector: makes one TCP connection without ever blocking. Knows names and addresses, not what is sent.

``socket.getaddrinfo`` blocks and has no timeout. A name is therefore looked up by a thread that does nothing else, and that nobody
waits for: its end wakes the selector.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.cluster.address import Address

TIMEOUT_S = 5.0
"""For the lookup of the name; and again for all connection attempts together."""
_MAX_ATTEMPTS = 4
"""A name may have many addresses."""
_REASONS = {
    errno.ECONNREFUSED: "connection refused: no process listens on this port",
    errno.ETIMEDOUT: "no answer: the machine is off, or a firewall drops the packets",
    errno.EHOSTUNREACH: "no route to this host, or a firewall rejects the packets",
    errno.ENETUNREACH: "no route to this network",
}
_Found = tuple[int, Any]
"""Address family, and address as ``socket.connect`` takes it."""


class Connector:
    """Calls ``on_connected(socket)`` or ``on_failed(why)`` once, from the selector's loop or from ``on_time``."""

    def __init__(
        self,
        address: Address,
        selector: selectors.BaseSelector,
        on_connected: Callable[[socket.socket], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._address, self._selector = address, selector
        self._on_connected, self._on_failed = on_connected, on_failed
        self._socket: socket.socket | None = None
        """What the selector watches: the end of the lookup, then the connection attempt."""
        self._found: list[_Found] | None = None
        self._timeout_s = TIMEOUT_S
        self._began: float | None = None
        self._failures: list[str] = []
        self._not_begun: str | None = None
        """Why even the lookup could not begin. ``on_time`` says so, because no callback is called from within this constructor."""
        try:
            self._lookup = _Lookup(address)
        except OSError as error:  # no descriptor is free
            self._not_begun = error.strerror or str(error)
        else:
            self._socket = self._lookup.done
            selector.register(self._socket, selectors.EVENT_READ, self._looked_up)

    def on_time(self, now: float) -> None:
        """Called several times a second with a clock that never goes back. Ends what takes too long."""
        if self._not_begun is not None:
            why, self._not_begun = self._not_begun, None
            self._fail(why)
        if self._socket is None:
            return
        if self._began is None:
            self._began = now
        if now - self._began <= self._timeout_s:
            return
        if self._found is None:
            self._fail(
                f"the name {self._address.host} was not resolved within {TIMEOUT_S:g} s. Check the name server of this machine"
            )
        else:
            self._attempt_failed(f"no answer within {self._timeout_s:.2g} s: the machine is off, or a firewall drops the packets")

    def close(self) -> None:
        """May be called twice."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _looked_up(self) -> None:
        if self._found is not None or self._socket is None:
            return  # the selector had seen this before the connection was closed
        self.close()
        if self._lookup.error is not None:
            self._fail(
                f"the name {self._address.host} cannot be resolved ({self._lookup.error}). Check its spelling, or use an IP address"
            )
            return
        self._found = self._lookup.found[:_MAX_ATTEMPTS]
        self._timeout_s = TIMEOUT_S / len(self._found)
        self._attempt()

    def _attempt(self) -> None:
        while self._found:
            family, name = self._found[0]
            try:
                attempt = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                self._note(error.strerror or str(error))
                continue
            attempt.setblocking(False)
            number = attempt.connect_ex(name)
            if number in (0, errno.EINPROGRESS):
                self._socket, self._began = attempt, None
                self._selector.register(attempt, selectors.EVENT_WRITE, partial(self._on_ready, attempt))
                return
            attempt.close()
            self._note(_reason(number))
        self._fail("; ".join(self._failures))

    def _note(self, reason: str) -> None:
        assert self._found
        _, name = self._found.pop(0)
        self._failures.append(reason if name[0] == self._address.host else f"{name[0]}: {reason}")

    def _attempt_failed(self, reason: str) -> None:
        self.close()
        self._note(reason)
        self._attempt()

    def _on_ready(self, attempt: socket.socket) -> None:
        if attempt is not self._socket:
            return
        number = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._attempt_failed(_reason(number))
            return
        self._selector.unregister(attempt)
        self._socket = None
        self._on_connected(attempt)

    def _fail(self, why: str) -> None:
        self.close()
        self._on_failed(f"cannot connect to {self._address}: {why}")


def _reason(number: int) -> str:
    return _REASONS.get(number, os.strerror(number))


class _Lookup:
    """Finds the addresses of a name. ``done`` becomes readable when ``found`` or ``error`` is set."""

    def __init__(self, address: Address) -> None:
        self.found: list[_Found] = []
        self.error: str | None = None
        self.done, self._end = socket.socketpair()
        self.done.setblocking(False)
        try:
            self._look_up(address, socket.AI_NUMERICHOST)  # an IP address: this does not block
        except (OSError, UnicodeError):
            self._start_thread(address)
        else:
            self._end.close()

    def _look_up(self, address: Address, flags: int = 0) -> None:
        rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
        self.found = [(family, name) for family, _, _, _, name in rows]

    def _start_thread(self, address: Address) -> None:
        try:
            threading.Thread(target=self._run, args=(address,), name="lockstep-resolve", daemon=True).start()
        except RuntimeError as error:  # this process may have no more threads
            self.error = str(error)
            self._end.close()

    def _run(self, address: Address) -> None:
        try:
            self._look_up(address)
        except OSError as error:
            self.error = error.strerror or str(error)
        except UnicodeError:
            self.error = "not a host name"
        finally:
            self._end.close()
