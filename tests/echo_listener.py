"""A process that listens with a Listener, sends each "ping" back, and counts all messages: `python -m tests.echo_listener`.

Takes the token as the first line of standard input, and writes its address to standard output. Ends with standard input.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections import Counter
from pathlib import Path

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.listener import Listener
from lockstep.cluster.messages import Message, Table
from lockstep.cluster.token import read_token

ACCEPTED: Table = {"ping": {"number": int}, "attack": {}, "report": {}}
ANSWERS: Table = {
    "ping": {"number": int},
    "report": {"messages": dict[str, int], "opened": int, "refused": int, "descriptors": int, "memory_kib": int},
}


class EchoListener:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.messages: Counter[str] = Counter()
        self.opened = self.refused = 0
        callbacks = ChannelCallbacks(self.on_open, self.on_message, lambda channel, why: None)
        self.listener = Listener(
            Address("127.0.0.1", 0), read_token("-", {}), self.selector, {"agent": ACCEPTED}, callbacks, on_refused=self.on_refused
        )

    def run(self) -> None:
        ended: list[bool] = []
        self.selector.register(0, selectors.EVENT_READ, lambda: ended.append(True))
        while not ended:
            for key, _ in self.selector.select(0.1):
                key.data()
            self.listener.on_time(time.monotonic())

    def on_open(self, channel: Channel) -> None:
        self.opened += 1

    def on_refused(self, address: Address, why: str) -> None:
        self.refused += 1

    def on_message(self, channel: Channel, message: Message) -> None:
        self.messages[message["type"]] += 1
        channel.send(self.report() if message["type"] == "report" else message)

    def report(self) -> Message:
        return {
            "type": "report",
            "messages": dict(self.messages),
            "opened": self.opened,
            "refused": self.refused,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "memory_kib": int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]),
        }


if __name__ == "__main__":
    echo = EchoListener()
    assert "torch" not in sys.modules
    print(echo.listener.address, flush=True)
    echo.run()
