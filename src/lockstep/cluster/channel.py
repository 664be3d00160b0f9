"""Channel: one secured connection that carries messages both ways. Never blocks. Does not know what the messages mean.

A channel is connected, encrypted if there is a certificate (tls.py), opened (handshake.py), and then carries frames (frames.py) of
JSON (messages.py). Whatever goes wrong closes it, with a reason.
"""

from __future__ import annotations

import enum
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster import messages
from lockstep.cluster.address import Address
from lockstep.cluster.connector import Connector
from lockstep.cluster.frames import FrameError, FrameReader, FrameWriter
from lockstep.cluster.handshake import NO_CERTIFICATE, ClientHandshake, HandshakeError, ServerHandshake
from lockstep.cluster.messages import Message, Table
from lockstep.cluster.tls import ClientTls, ServerTls, certificate_of_server
from lockstep.errors import InvariantError

OPENING_TIMEOUT_S = 5.0
MAX_BACKLOG_BYTES = 64 << 20
_CHUNK_BYTES = 256 << 10
_SEND_BYTES = 64 << 10
_MAX_LAST_READS = 64
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class ChannelCallbacks:
    """Called from the selector's loop or from ``on_time``, never from within ``send`` or ``close``."""

    on_open: Callable[[Channel], None]
    """Both sides have proven the token. From now on ``send`` may be called."""
    on_message: Callable[[Channel, Message], None]
    """The message is one of those that the table allows."""
    on_closed: Callable[[Channel, str], None]
    """The channel is closed, with the reason as a sentence. Called once, and not if this process has called ``close``."""


class _State(enum.Enum):
    CONNECTING = enum.auto()
    ENCRYPTING = enum.auto()
    """The handshake of TLS is going on."""
    OPENING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class _ChannelError(Exception):
    """Closes the channel, with this reason."""


class Channel:
    """Made by ``Channel.client`` or by a ``Listener``. It registers itself with the selector, whose loop calls ``key.data()``.

    Attributes:
        purpose: What the client has connected for. Empty on the server until the channel is open.
        peer_address: The other end. On a client: the address that was given.
        local_address: This end, None until the channel is connected. Its host is the address under which
            the peer reaches this machine, unless the network translates addresses.
    """

    def __init__(self, selector: selectors.BaseSelector, callbacks: ChannelCallbacks, peer_address: Address, peer: str) -> None:
        """Use ``Channel.client`` or a ``Listener``."""
        self._selector, self._callbacks, self._peer = selector, callbacks, peer
        self._state = _State.CONNECTING
        self._connector: Connector | None = None
        self._socket: socket.socket | None = None
        self._events = 0
        self._tls: ClientTls | ServerTls | None = None
        self._make_handshake: Callable[[bytes], ClientHandshake | ServerHandshake]
        self._tables: Mapping[str, Table] = {}
        self._handshake: ClientHandshake | ServerHandshake
        self._received = bytearray()
        self._reader: FrameReader
        self._writer: FrameWriter
        self._unsent = bytearray()
        self._failure: str | None = None
        self._opening_began: float | None = None
        self.max_backlog = MAX_BACKLOG_BYTES
        self.peer_address = peer_address
        self.local_address: Address | None = None
        self.purpose = ""

    @classmethod
    def client(
        cls,
        target: Address | socket.socket,
        token: bytes,
        purpose: str,
        selector: selectors.BaseSelector,
        callbacks: ChannelCallbacks,
        accepts: Table,
        *,
        tls: ClientTls | None = None,
        peer: str = "the head",
    ) -> Channel:
        """Connect to a ``Listener``. Returns at once; a callback says how it went.

        Args:
            target: The address of the listener, or a socket that is connected to it.
            token: The token of the run (token.py).
            purpose: One of the purposes that the listener serves, such as "agent".
            selector: Watches the connection.
            callbacks: What to call.
            accepts: The messages that the server may send.
            tls: If given, the connection is encrypted. The server must use TLS exactly if the client does.
            peer: What messages call the other side.
        """
        address = Address.from_socket(target.getpeername()) if isinstance(target, socket.socket) else target
        channel = cls(selector, callbacks, address, peer)
        channel.purpose, channel._tls, channel._tables = purpose, tls, {purpose: accepts}
        channel._make_handshake = lambda certificate: ClientHandshake(token, purpose, certificate)
        if isinstance(target, socket.socket):
            channel._start(target)
        else:
            channel._connector = Connector(target, selector, channel._connected, channel._fail)
        return channel

    @classmethod
    def server(
        cls,
        connection: socket.socket,
        token: bytes,
        purposes: Mapping[str, Table],
        selector: selectors.BaseSelector,
        callbacks: ChannelCallbacks,
        tls: ServerTls | None,
    ) -> Channel:
        """Used by ``Listener``. ``purposes``: what a client may connect for, each with the messages that it may send."""
        peer_address = Address.from_socket(connection.getpeername())
        channel = cls(selector, callbacks, peer_address, "the process")
        channel._tls, channel._tables = tls, purposes
        channel._make_handshake = lambda certificate: ServerHandshake(token, purposes, certificate)
        channel._start(connection)
        return channel

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN and self._failure is None

    @property
    def is_closed(self) -> bool:
        return self._state is _State.CLOSED

    @property
    def backlog(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, or queue what cannot be sent now. Does nothing if the channel is closed.

        If the peer does not read and more than ``max_backlog`` bytes are queued, the channel fails: ``on_closed`` is called later,
        from the selector's loop.

        Raises:
            ValueError: The message is larger than 16 MiB, or cannot be written as JSON.
            InvariantError: The channel has not been opened yet.
        """
        if self._state is _State.CLOSED or self._failure is not None:
            return
        if self._state is not _State.OPEN:
            raise InvariantError(f"a message was sent to {self._where} before the channel was open. Wait for on_open.")
        self._queue(self._writer.frame(messages.encode(message)))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the kernel has all that was sent: for the last messages of a process. Returns whether it has."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and self.is_open and self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            self._write_or_fail_later()
        return not self._unsent and self.is_open

    def close(self) -> None:
        """Close the channel. The peer is told that this was on purpose. What is still queued is lost: see ``flush``.

        ``on_closed`` is not called. May be called twice.
        """
        if self.is_open:
            self._queue(self._writer.frame(b""))
        self._release()

    def on_time(self, now: float) -> None:
        """Called several times a second, with a clock that never goes back. Closes a channel that is not open after 5 s."""
        if self._connector is not None:
            self._connector.on_time(now)
        elif self._state in (_State.ENCRYPTING, _State.OPENING):
            if self._opening_began is None:
                self._opening_began = now
            elif now - self._opening_began > OPENING_TIMEOUT_S:
                self._fail(f"{self._where} has not proven the token within {OPENING_TIMEOUT_S:g} s. Is it a process of Lockstep?")

    @property
    def _where(self) -> str:
        return f"{self._peer} at {self.peer_address}"

    def _connected(self, connection: socket.socket) -> None:
        self._connector = None
        try:
            self._start(connection)
        except OSError as error:
            connection.close()
            self._fail(f"the connection to {self._where} was lost ({error.strerror or error})")

    def _start(self, connection: socket.socket) -> None:
        """Begin the opening. Raises OSError if the connection is lost already."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local_address = Address.from_socket(connection.getsockname())
        if self._tls is None:
            self._begin_opening(NO_CERTIFICATE)
        else:
            is_server = isinstance(self._tls, ServerTls)
            connection = self._tls.context.wrap_socket(connection, server_side=is_server, do_handshake_on_connect=False)
            self._state = _State.ENCRYPTING
        self._socket = connection
        is_first = bool(self._unsent) or isinstance(self._tls, ClientTls)
        self._events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_first else 0)
        self._selector.register(connection, self._events, self._on_ready)

    def _on_ready(self) -> None:
        try:
            if self._state is _State.ENCRYPTING:
                self._continue_tls()
            if self._state is _State.OPENING:
                self._continue_opening()
            if self._state is _State.OPEN:
                self._write_or_fail_later()
                if self._failure is not None:
                    self._read_rest()
                    raise _ChannelError(self._failure)
                self._read()
        except _ChannelError as error:
            self._fail(str(error))
        else:
            if self._state is not _State.ENCRYPTING:
                self._watch()

    def _continue_tls(self) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(selectors.EVENT_WRITE)
        except ssl.SSLCertVerificationError as error:
            raise _ChannelError(
                f"the certificate of {self._where} is not accepted ({error.verify_message}). "
                "Pass the certificate that has signed it with --ca"
            ) from error
        except OSError as error:
            raise _ChannelError(
                f"{self._where} does not speak TLS as this process does ({_reason(error)}). "
                "Start the head with --cert and --key, and agents with --ca, or none of them"
            ) from error
        else:
            self._begin_opening(self._tls.certificate if isinstance(self._tls, ServerTls) else certificate_of_server(self._socket))

    def _begin_opening(self, certificate: bytes) -> None:
        self._state = _State.OPENING
        self._handshake = self._make_handshake(certificate)
        self._unsent += self._handshake.opening

    def _continue_opening(self) -> None:
        self._write()
        while self._state is _State.OPENING:
            data = self._receive(self._handshake.needs - len(self._received))  # not a byte more than the opening has
            if data is None:
                return
            if not data:
                raise _ChannelError(self._closed_before_proof())
            self._received += data
            if len(self._received) < self._handshake.needs:
                continue
            message = bytes(self._received)
            self._received.clear()
            try:
                self._unsent += self._handshake.receive(message)
            except HandshakeError as error:
                self._unsent += error.last_reply
                self._write()
                raise _ChannelError(f"{self._where} {error}") from error
            self._write()
            if self._handshake.keys is not None:
                self._become_open()

    def _become_open(self) -> None:
        assert self._handshake.keys is not None
        self._reader, self._writer = FrameReader(self._handshake.keys.receiving), FrameWriter(self._handshake.keys.sending)
        self.purpose = self._handshake.purpose
        self._state = _State.OPEN
        self._callbacks.on_open(self)

    def _read(self) -> None:
        while self._state is _State.OPEN:
            data = self._receive(_CHUNK_BYTES)
            if data is None:
                return
            if not data:
                inside = " in the middle of a message" if self._reader.is_inside_frame else ""
                raise _ChannelError(f"the connection to {self._where} has ended{inside}")
            self._deliver(data)
            if not isinstance(self._socket, ssl.SSLSocket) or not self._socket.pending():
                return  # the selector says if there is more; it does not know what TLS has decrypted already

    def _read_rest(self) -> None:
        """What the peer has sent before the connection broke."""
        for _ in range(_MAX_LAST_READS):
            data = self._receive(_CHUNK_BYTES) if self._state is _State.OPEN else None
            if not data:
                return
            self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        try:
            for payload in self._reader.receive(data):
                if not payload:
                    raise _ChannelError(f"{self._where} has closed the connection")
                message = messages.decode(payload)
                wrong = messages.check(message, self._tables[self.purpose])
                if wrong is not None:
                    raise _ChannelError(f"{self._where} has sent a wrong message: {wrong}")
                self._callbacks.on_message(self, message)
                if self._state is not _State.OPEN:
                    return
        except FrameError as error:
            raise _ChannelError(f"the connection to {self._where} is not safe and was closed: {error}") from error
        except ValueError as error:
            raise _ChannelError(f"{self._where} has sent a wrong message: {error}") from error

    def _receive(self, most: int) -> bytes | None:
        """None: nothing yet. Empty: the peer sends no more."""
        assert self._socket is not None
        try:
            return self._socket.recv(most)
        except _WOULD_BLOCK:
            return None
        except OSError as error:
            if self._state is _State.OPENING:
                raise _ChannelError(self._closed_before_proof()) from error
            raise _ChannelError(f"the connection to {self._where} was lost ({_reason(error)})") from error

    def _queue(self, data: bytes) -> None:
        was_empty = not self._unsent
        self._unsent += data
        if was_empty:  # otherwise the selector says when there is room for more
            self._write_or_fail_later()
        if len(self._unsent) > self.max_backlog:
            self._fail_later(f"{self._where} does not read: {len(self._unsent)} bytes wait to be sent to it")
        if self._failure is None:
            self._watch()

    def _write_or_fail_later(self) -> None:
        try:
            self._write()
        except _ChannelError as error:
            self._fail_later(str(error))

    def _write(self) -> None:
        assert self._socket is not None
        while self._unsent:
            try:
                with memoryview(self._unsent) as unsent, unsent[:_SEND_BYTES] as chunk:
                    sent = self._socket.send(chunk)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                if self._state is _State.OPENING:
                    raise _ChannelError(self._closed_before_proof()) from error
                raise _ChannelError(f"the connection to {self._where} was lost ({_reason(error)})") from error
            del self._unsent[:sent]

    def _fail_later(self, why: str) -> None:
        """Within ``send``: the selector's loop is made to call ``_on_ready``, which then fails."""
        if self._failure is not None or self._socket is None:
            return
        self._failure = why
        self._unsent.clear()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # makes the socket readable
        except OSError:
            pass  # the peer has ended the connection, which makes it readable too
        self._watch(selectors.EVENT_READ)

    def _fail(self, why: str) -> None:
        if self._state is not _State.CLOSED:
            self._release()
            self._callbacks.on_closed(self, why)

    def _closed_before_proof(self) -> str:
        if isinstance(self._handshake, ServerHandshake):
            return f"{self._where} closed the connection before it had proven the token. It may have another token"
        return (
            f"{self._where} closed the connection before it had proven the token. It may use TLS (then pass --ca), "
            "have another version of Lockstep, or too many clients at the moment"
        )

    def _watch(self, events: int | None = None) -> None:
        if self._socket is None:
            return
        if events is None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._on_ready)

    def _release(self) -> None:
        self._state = _State.CLOSED
        self._unsent.clear()
        self._received.clear()
        if self._connector is not None:
            self._connector.close()
            self._connector = None
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)
