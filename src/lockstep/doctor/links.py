"""Links: from this machine to the others. Connects to all at once, then measures one after the other. Never blocks.

    connect     to every address of every other machine; the first that answers and is that machine is used
    latency     round trips; the clock of the other machine is in each answer
    bandwidth   from here to there, through the secured channel, so that it is at least what is shown

Each machine has an own ``Links``, so each pair is tried in both directions.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.listener import Listener
from lockstep.cluster.messages import Message, Table

PURPOSE = "doctor"
_FROM_CLIENT: Table = {"ping": {"sent": float}, "data": {"content": str, "is_last": bool}}
_FROM_SERVER: Table = {"hello": {"id": str}, "pong": {"sent": float, "clock": float}, "received": {}}
_PINGS = 10
_CHUNK = "x" * (1 << 18)
_FEW_CHUNKS, _MANY_CHUNKS = 1, 32
_FAST_S = 0.1
"""If the first chunk arrives within this time, many follow."""
_MEASURE_S = 2.0


@dataclass(frozen=True)
class Peer:
    """Another machine: where its ``Links`` may be reached, and which it is."""

    name: str
    id: str
    hosts: tuple[str, ...]
    port: int


@dataclass
class Link:
    """What was found of the way to one machine."""

    to: str
    reached_at: str = ""
    """Empty if it cannot be reached."""
    failures: list[str] = field(default_factory=list)
    latency_s: float = 0.0
    clock_offset_s: float = 0.0
    """How much later the clock of the other machine is."""
    bytes_per_s: float = 0.0
    """0 if it was not measured in time."""


class Links:
    """Listens as soon as it is made. ``report`` is called once with a Link for each peer, after ``connect``."""

    def __init__(self, token: bytes, id: str, selector: selectors.BaseSelector, report: Callable[[list[Link]], None]) -> None:
        self._token, self._id, self._selector, self._report = token, id, selector, report
        callbacks = ChannelCallbacks(self._on_client, _serve, lambda channel, why: None)
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        self._listener = Listener(Address(host, 0), token, selector, {PURPOSE: _FROM_CLIENT}, callbacks)
        self._links: dict[str, Link] = {}
        self._attempts: dict[str, list[Channel]] = {}
        self._channels: dict[str, Channel] = {}
        self._measuring: _Measurement | None = None
        self._is_reported = False

    @property
    def port(self) -> int:
        return self._listener.address.port

    def connect(self, peers: Sequence[Peer]) -> None:
        """Try to reach the peers. They are measured in this order."""
        for peer in peers:
            self._links[peer.name] = Link(peer.name)
            self._attempts[peer.name] = [self._attempt(peer, host) for host in peer.hosts]
        self._go_on()

    def on_time(self, now: float) -> None:
        """Called several times a second with a clock that never goes back."""
        self._listener.on_time(now)
        for channels in list(self._attempts.values()):
            for channel in list(channels):
                channel.on_time(now)
        if self._measuring is not None and self._measuring.is_late():
            self._end_measurement()

    def _attempt(self, peer: Peer, host: str) -> Channel:
        callbacks = ChannelCallbacks(lambda channel: None, partial(self._on_message, peer), partial(self._on_failed, peer))
        address = Address(host, peer.port)
        return Channel.client(address, self._token, PURPOSE, self._selector, callbacks, _FROM_SERVER, peer=peer.name)

    def _on_client(self, channel: Channel) -> None:
        channel.send({"type": "hello", "id": self._id})

    def _on_message(self, peer: Peer, channel: Channel, message: Message) -> None:
        if message["type"] == "hello":
            self._on_hello(peer, channel, message["id"])
        elif self._measuring is not None and self._measuring.channel is channel and self._measuring.on_message(message):
            self._end_measurement()

    def _on_hello(self, peer: Peer, channel: Channel, id: str) -> None:
        if id != peer.id:  # the address of a bridge for containers, for example, which every machine has
            channel.close()
            self._on_failed(peer, channel, f"{channel.peer_address} is another machine")
        elif peer.name in self._channels:
            channel.close()
        else:
            self._channels[peer.name] = channel
            self._links[peer.name].reached_at = str(channel.peer_address)
            for other in self._attempts.pop(peer.name, []):
                if other is not channel:
                    other.close()
            self._go_on()

    def _on_failed(self, peer: Peer, channel: Channel, why: str) -> None:
        self._links[peer.name].failures.append(why)
        if peer.name in self._attempts:
            self._attempts[peer.name].remove(channel)
            if not self._attempts[peer.name]:
                del self._attempts[peer.name]
        elif self._measuring is not None and self._measuring.channel is channel:
            self._end_measurement()
        self._go_on()

    def _end_measurement(self) -> None:
        assert self._measuring is not None
        self._measuring.channel.close()
        self._measuring = None
        self._go_on()

    def _go_on(self) -> None:
        """Measure the next link, when all peers have been reached or have failed."""
        if self._attempts or self._measuring is not None:
            return
        if self._channels:
            name = next(iter(link for link in self._links if link in self._channels))
            self._measuring = _Measurement(self._channels.pop(name), self._links[name])
        elif not self._is_reported:
            self._is_reported = True
            self._report(list(self._links.values()))


class _Measurement:
    """Of one link: round trips, a little data, then much. Begins when it is made."""

    def __init__(self, channel: Channel, link: Link) -> None:
        self.channel, self._link = channel, link
        self._began = self._data_began = time.monotonic()
        self._chunks = 0
        self._round_trips: list[tuple[float, float]] = []
        """Duration, and offset of the other clock."""
        self._ping()

    def is_late(self) -> bool:
        return time.monotonic() - self._began > _MEASURE_S

    def on_message(self, message: Message) -> bool:
        """Returns whether the measurement is over."""
        if message["type"] == "pong":
            duration = time.monotonic() - message["sent"]
            self._round_trips.append((duration, message["clock"] - (time.time() - duration / 2)))
            self._link.latency_s, self._link.clock_offset_s = min(self._round_trips)
            if len(self._round_trips) < _PINGS:
                self._ping()
            else:
                self._send_data(_FEW_CHUNKS)
            return False
        duration = max(time.monotonic() - self._data_began - self._link.latency_s / 2, 1e-6)
        self._link.bytes_per_s = self._chunks * len(_CHUNK) / duration
        if self._chunks == _FEW_CHUNKS and duration < _FAST_S:
            self._send_data(_MANY_CHUNKS)
            return False
        return True

    def _ping(self) -> None:
        self.channel.send({"type": "ping", "sent": time.monotonic()})

    def _send_data(self, chunks: int) -> None:
        self._chunks, self._data_began = chunks, time.monotonic()
        for number in range(chunks):
            self.channel.send({"type": "data", "content": _CHUNK, "is_last": number == chunks - 1})


def _serve(channel: Channel, message: Message) -> None:
    if message["type"] == "ping":
        channel.send({"type": "pong", "sent": message["sent"], "clock": time.time()})
    elif message["is_last"]:
        channel.send({"type": "received"})
