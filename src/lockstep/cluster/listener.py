"""Listener: accepts the connections of other machines and opens a Channel on each. Knows how many may be in their opening.

Anyone who reaches the port can connect. Until a client has proven the token it costs the listener one descriptor and less than a
kilobyte, for at most 5 s (and at most 5 s before, if it has to wait for others), and the number of such clients is limited.
"""

from __future__ import annotations

import resource
import selectors
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster.address import Address
from lockstep.cluster.channel import OPENING_TIMEOUT_S, Channel, ChannelCallbacks
from lockstep.cluster.messages import Table
from lockstep.cluster.tls import ServerTls
from lockstep.errors import UsageError

MAX_OPENINGS = 64
MAX_OPENINGS_OF_ONE_HOST = 16
MAX_WAITING = 1024
"""Accepted connections whose opening has not begun, because too many others have. Further connections are closed at once."""
_BACKLOG = 4096
"""Connections that the kernel holds until they are accepted; it may hold fewer (net.core.somaxconn)."""
_ACCEPTED_AT_ONCE = 64
_MAX_REPORTS = 20
_REPORTS_EVERY_S = 10.0
"""``on_refused`` is called at most 20 times in 10 s: otherwise anyone could fill a log file."""


@dataclass
class _Waiting:
    connection: socket.socket
    host: str
    since: float | None = None


class Listener:
    """Listens as soon as it is made. Open channels belong to the owner of the listener; ``close`` does not close them.

    Attributes:
        address: Where it listens, with the port that the kernel has chosen if port 0 was asked for.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        selector: selectors.BaseSelector,
        purposes: Mapping[str, Table],
        callbacks: ChannelCallbacks,
        *,
        tls: ServerTls | None = None,
        on_refused: Callable[[Address, str], None] | None = None,
        max_openings: int = MAX_OPENINGS,
        max_openings_of_one_host: int = MAX_OPENINGS_OF_ONE_HOST,
        max_waiting: int | None = None,
    ) -> None:
        """Listen on ``address``.

        Args:
            address: Name or IP address of this machine, and port. "0.0.0.0" is every IPv4 address, "::" also every IPv6 address.
            token: The token of the run (token.py).
            selector: Watches the port and all channels.
            purposes: What a client may connect for, each with the messages that it may send.
            callbacks: Those of each channel that is opened. They do not see a client that does not prove the token.
            tls: If given, clients must use TLS.
            on_refused: Called with the address of a client that did not prove the token, and the reason; at most 20 times in 10 s.
            max_openings: How many clients may be in their opening at the same time.
            max_openings_of_one_host: How many of these from the same IP address.
            max_waiting: How many further clients wait for their opening. More are disconnected at once. If None: 1024, but no more
                than a quarter of the descriptors that this process may have.

        Raises:
            UsageError: The address cannot be listened on.
        """
        self._token, self._selector, self._purposes, self._tls = token, selector, purposes, tls
        self._callbacks, self._on_refused = callbacks, on_refused
        if max_waiting is None:
            max_waiting = min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._max_openings, self._max_openings_of_one_host, self._max_waiting = max_openings, max_openings_of_one_host, max_waiting
        self._own_callbacks = ChannelCallbacks(self._opened, callbacks.on_message, self._closed)
        self._openings: dict[Channel, str] = {}
        """With the host of each."""
        self._openings_of: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiting]] = {}
        """By host, in the order of arrival."""
        self._is_accepting = True
        self._reports_left, self._reports_since = _MAX_REPORTS, 0.0
        self._socket = _listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def on_time(self, now: float) -> None:
        """Called several times a second, with a clock that never goes back. Drops clients whose opening takes longer than 5 s."""
        if self._socket.fileno() < 0:
            return
        if now - self._reports_since > _REPORTS_EVERY_S:
            self._reports_left, self._reports_since = _MAX_REPORTS, now
        for channel in list(self._openings):
            channel.on_time(now)
        self._drop_waiting(now)
        self._start_waiting()
        if not self._is_accepting:
            self._is_accepting = True
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening. Channels that are not open are closed, open channels are not. May be called twice."""
        if self._socket.fileno() >= 0:
            if self._is_accepting:
                self._selector.unregister(self._socket)
            self._socket.close()
        for queue in self._waiting.values():
            for client in queue:
                client.connection.close()
        self._waiting.clear()
        for channel in list(self._openings):
            channel.close()
        self._openings.clear()
        self._openings_of.clear()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, name = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or memory is free. The clients wait in the kernel's queue until the next on_time
                if self._socket.fileno() >= 0:
                    self._is_accepting = False
                    self._selector.unregister(self._socket)
                return
            self._admit(_Waiting(connection, Address.from_socket(name).host))
            if self._socket.fileno() < 0:
                return  # a callback has closed the listener

    def _admit(self, client: _Waiting) -> None:
        if self._has_place(client.host):
            self._start(client)
        elif sum(len(queue) for queue in self._waiting.values()) < self._max_waiting:
            self._waiting.setdefault(client.host, deque()).append(client)
        else:
            self._refuse(client.connection, "too many clients connect at the same time")

    def _has_place(self, host: str) -> bool:
        return len(self._openings) < self._max_openings and self._openings_of[host] < self._max_openings_of_one_host

    def _start(self, client: _Waiting) -> None:
        try:
            channel = Channel.server(client.connection, self._token, self._purposes, self._selector, self._own_callbacks, self._tls)
        except OSError:  # the client is gone
            client.connection.close()
            return
        self._openings[channel] = client.host
        self._openings_of[client.host] += 1

    def _start_waiting(self) -> None:
        """Begin the openings for which there is a place now."""
        for host, queue in list(self._waiting.items()):
            while queue and self._has_place(host):
                self._start(queue.popleft())
            if not queue:
                del self._waiting[host]
            if len(self._openings) >= self._max_openings:
                return

    def _drop_waiting(self, now: float) -> None:
        """Drop the clients that have waited for 5 s."""
        for queue in list(self._waiting.values()):
            for client in queue:
                client.since = now if client.since is None else client.since
            while queue and now - (queue[0].since or now) > OPENING_TIMEOUT_S:
                self._refuse(queue.popleft().connection, f"it has waited {OPENING_TIMEOUT_S:g} s because other clients are slow")

    def _end_opening(self, channel: Channel) -> bool:
        """Returns whether the channel was in its opening."""
        host = self._openings.pop(channel, None)
        if host is None:
            return False
        self._openings_of[host] -= 1
        if not self._openings_of[host]:
            del self._openings_of[host]
        return True

    def _opened(self, channel: Channel) -> None:
        self._end_opening(channel)
        self._callbacks.on_open(channel)
        self._start_waiting()

    def _closed(self, channel: Channel, why: str) -> None:
        if not self._end_opening(channel):
            self._callbacks.on_closed(channel, why)
            return
        self._report_refused(channel.peer_address, why)
        self._start_waiting()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        try:
            address = Address.from_socket(connection.getpeername())
        except OSError:
            address = None
        connection.close()
        if address is not None:
            self._report_refused(address, why)

    def _report_refused(self, address: Address, why: str) -> None:
        if self._on_refused is not None and self._reports_left > 0:
            self._reports_left -= 1
            self._on_refused(address, why)


def _listen(address: Address) -> socket.socket:
    try:
        family, _, _, _, name = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(name[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=address.host == "::")
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}. Name an address of this machine and a "
            "free port, for example 0.0.0.0:0 for any address and a port that the kernel chooses."
        ) from error
    listener.setblocking(False)
    return listener
