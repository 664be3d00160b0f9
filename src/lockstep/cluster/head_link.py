"""HeadLink: an agent's connection to a head. Connects to the heads of a list in turn until one keeps it, and again if it is lost.

Knows heartbeats, not what other messages mean.
"""

from __future__ import annotations

import ipaddress
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.messages import Message
from lockstep.cluster.protocol import FROM_HEAD, HEARTBEATS
from lockstep.cluster.tls import ClientTls
from lockstep.errors import UsageError

_RETRY_S = 0.25
_SAY_AFTER_S = 5.0
"""An agent that has found no head for this long says so, and keeps trying."""
_SAY_AGAIN_S = 30.0


@dataclass(frozen=True)
class HeadList:
    """Where heads may be: at fixed addresses, or at the one that a file contains now."""

    fixed: Sequence[Address] = ()
    file: str | None = None

    @property
    def count(self) -> int:
        """How many heads there may be at the same time. A head whose address is in a file, or is a name, may move."""
        return len(self.fixed) if self.file is None and all(_is_fixed(head.host) for head in self.fixed) else 2

    def addresses(self) -> list[Address]:
        """The addresses to try. Empty if the file does not exist yet, or contains none."""
        if self.file is None:
            return list(self.fixed)
        try:
            with open(self.file) as file:
                return [Address.parse(file.read(1024))]
        except (OSError, ValueError, UsageError):
            return []


def _is_fixed(host: str) -> bool:
    """Whether the host is an IP address, at which only one process can listen, and no name that may stand for another one later."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return True


@dataclass(frozen=True)
class HeadCallbacks:
    on_open: Callable[[], None]
    on_message: Callable[[Message], None]
    on_lost: Callable[[str], None]
    """The connection to the head of the run is lost."""
    say: Callable[[str], None]


class HeadLink:
    """The addresses of ``heads`` are tried in their order, from the second one on, and from the first one again after the last.

    A head that answers may close the connection, because it does not decide for the run: then the next one is tried.
    ``clock()`` is the time without that in which this process was stopped (OwnClock).
    """

    def __init__(
        self,
        heads: HeadList,
        token: bytes,
        tls: ClientTls | None,
        selector: selectors.BaseSelector,
        callbacks: HeadCallbacks,
        clock: Callable[[], float],
    ) -> None:
        self._heads, self._token, self._tls, self._selector, self._callbacks = heads, token, tls, selector, callbacks
        self._clock = clock
        self._was_open = self._is_settled = False
        self._channel: Channel | None = None
        self._index = 0 if len(heads.fixed) > 1 else -1  # the first head may begin a run, so the others are asked before it
        self._reasons: dict[Address, str] = {}
        now = time.monotonic()
        self._retry_at, self._lost_at, self._say_at = now, now, now + _SAY_AFTER_S
        self._heard_at, self._sent_at = clock(), now
        self.heartbeat_timeout_s = 2.0

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.is_open

    @property
    def backlog(self) -> int:
        """Bytes for the head that the kernel has not taken yet."""
        return 0 if self._channel is None else self._channel.backlog

    @property
    def head_index(self) -> int:
        """The place of the current head in the list."""
        return self._index

    @property
    def head_address(self) -> Address:
        """Of the current head."""
        assert self._channel is not None
        return self._channel.peer_address

    @property
    def local_host(self) -> str:
        """The address of this machine by which the head sees it."""
        assert self._channel is not None
        assert self._channel.local_address is not None
        return self._channel.local_address.host

    @property
    def away_s(self) -> float:
        """How long there has been no head; 0 if there is one."""
        return 0.0 if self.is_open else time.monotonic() - self._lost_at

    @property
    def reasons(self) -> str:
        """Why the heads could not be reached, for people."""
        if self._heads.file is not None and not self._heads.addresses():
            return f"{self._heads.file} does not contain the address of a head"
        return "; ".join(self._reasons.get(head, f"{head} was not tried yet") for head in self._heads.addresses())

    def send(self, message: Message) -> None:
        """Does nothing without a head."""
        if self._channel is not None and self._channel.is_open:
            self._channel.send(message)
            self._sent_at = time.monotonic()

    def settle(self) -> None:
        """The current head decides for the run: if it is lost, it is the first to be tried again."""
        self._is_settled = True

    def on_time(self, now: float) -> None:
        channel = self._channel
        if channel is None:
            if now >= self._retry_at:
                self._connect()
            if now >= self._say_at:
                self._say_at = now + _SAY_AGAIN_S
                self._callbacks.say(f"no head answers: {self.reasons}. This agent keeps trying.")
            return
        channel.on_time(now)
        if channel.is_open:
            if now - self._sent_at > self.heartbeat_timeout_s / HEARTBEATS:
                self.send({"type": "heartbeat"})
            if self._clock() - self._heard_at > self.heartbeat_timeout_s:
                channel.close()
                self._on_closed(channel, f"the head at {channel.peer_address} has not answered for {self.heartbeat_timeout_s:g} s")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.flush(1.0)
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        heads = self._heads.addresses()
        if not heads:
            self._retry_at = time.monotonic() + _RETRY_S
            return
        self._index = (self._index + 1) % len(heads)
        callbacks = ChannelCallbacks(self._on_open, self._on_message, self._on_closed)
        self._channel = Channel.client(
            heads[self._index], self._token, "agent", self._selector, callbacks, FROM_HEAD, tls=self._tls
        )

    def _on_open(self, channel: Channel) -> None:
        self._heard_at, self._sent_at, self._was_open = self._clock(), time.monotonic(), True
        self._reasons = {}
        self._callbacks.on_open()

    def _on_message(self, channel: Channel, message: Message) -> None:
        self._heard_at = self._clock()
        if message["type"] != "heartbeat":
            self._callbacks.on_message(message)

    def _on_closed(self, channel: Channel, why: str) -> None:
        self._reasons[channel.peer_address] = why
        self._channel = None
        now = time.monotonic()
        self._retry_at = now + _RETRY_S
        if self._was_open:
            self._was_open = False
            self._lost_at, self._say_at = now, now + _SAY_AFTER_S
        if self._is_settled:
            self._is_settled = False
            self._index -= 1  # the same head may be back at once, at the same address
            self._callbacks.on_lost(why)
