"""Reachability: whether this machine can connect to other machines of the run. Before training, not after a timeout in it.

Each agent listens on a port of the address that its workers use, for other agents alone: connections begin with the token.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from functools import partial

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.listener import Listener
from lockstep.cluster.messages import Message


class Reachability:
    """``report(reached, unreachable)`` is called when all machines of a ``probe`` have answered or could not be reached."""

    def __init__(self, token: bytes, selector: selectors.BaseSelector, report: Callable[[list[str], dict[str, str]], None]) -> None:
        self._token, self._selector, self._report = token, selector, report
        self._listener: Listener | None = None
        self._channels: dict[str, Channel] = {}
        self._answers: dict[str, str] = {}  # machine -> why it cannot be reached; empty: it can
        self._accepted: list[Channel] = []

    @property
    def port(self) -> int:
        return 0 if self._listener is None else self._listener.address.port

    def listen(self, host: str) -> None:
        """Accept the connections of other agents. May be called again."""
        if self._listener is None:
            callbacks = ChannelCallbacks(self._accepted.append, lambda channel, message: None, self._on_probed)
            self._listener = Listener(Address(host, 0), self._token, self._selector, {"probe": {}}, callbacks)

    def probe(self, machines: dict[str, str]) -> None:
        """Connect to ``machines``: name -> HOST:PORT."""
        for name, address in machines.items():
            if name in self._channels:
                self._channels.pop(name).close()
            callbacks = ChannelCallbacks(partial(self._on_open, name), _ignore, partial(self._on_failed, name))
            self._channels[name] = Channel.client(
                Address.parse(address), self._token, "probe", self._selector, callbacks, {}, peer=f"machine {name}"
            )

    def on_time(self, now: float) -> None:
        if self._listener is not None:
            self._listener.on_time(now)
        for channel in list(self._channels.values()):
            channel.on_time(now)

    def close(self) -> None:
        for channel in (*self._channels.values(), *self._accepted):
            channel.close()
        if self._listener is not None:
            self._listener.close()

    def _on_open(self, name: str, channel: Channel) -> None:
        channel.close()
        self._answer(name, "")

    def _on_failed(self, name: str, channel: Channel, why: str) -> None:
        self._answer(name, why)

    def _on_probed(self, channel: Channel, why: str) -> None:
        self._accepted.remove(channel)

    def _answer(self, name: str, why: str) -> None:
        self._channels.pop(name, None)
        self._answers[name] = why
        if not self._channels:
            answers, self._answers = self._answers, {}
            self._report([name for name, why in answers.items() if not why], {name: why for name, why in answers.items() if why})


def _ignore(channel: Channel, message: Message) -> None:
    pass
