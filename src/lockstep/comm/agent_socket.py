"""AgentSocket: this process's end of the socket to its agent. Any part may send; one thread reads, and passes packets on.

Does not know what packets mean.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

_MAX_BYTES = 1 << 20
_DROPPED = ("progress", "steps")
"""Packets that are not sent if the agent does not read."""


class AgentSocket:
    """Use ``agent_socket``: there is one object for each socket, because packets have one reader."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._lock = threading.Lock()
        self.has_joined = False
        """Whether a ``Run`` of this process has joined the agent's run."""

    def send(self, **packet: object) -> bool:
        """Send a packet to the agent. Any thread may call it. If the agent is gone, this worker is about to end too.

        Blocks while the agent does not read, but not for progress and records: training must continue.

        Returns:
            Whether the packet was sent.
        """
        flags = socket.MSG_DONTWAIT if packet["type"] in _DROPPED else 0
        try:
            self._socket.send(json.dumps(packet).encode(), flags)
        except OSError:
            return False
        return True

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call ``listener`` with each packet that arrives from now on, in the thread that reads."""
        with self._lock:
            self._listeners.append(listener)
            if len(self._listeners) == 1:
                threading.Thread(target=self._read, name="lockstep-agent-socket", daemon=True).start()

    def close(self) -> None:
        """Close the descriptor. The thread ends."""
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_MAX_BYTES)
            except OSError:
                return
            if not data:
                return
            packet = json.loads(data)
            for listener in list(self._listeners):
                listener(packet)


_known: dict[int, tuple[int, AgentSocket]] = {}  # descriptor -> (its inode, the object)


def agent_socket(fd: int) -> AgentSocket:
    """The AgentSocket of a descriptor, made when it is first asked for."""
    inode = os.fstat(fd).st_ino
    known = _known.get(fd)
    if known is None or known[0] != inode:  # the descriptor was closed, and the number belongs to another socket now
        known = _known[fd] = (inode, AgentSocket(fd))
    return known[1]
