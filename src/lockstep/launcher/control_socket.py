"""ControlSocket: the unix socket of a run, on which the agent takes requests (`lockstep scale`). Does not know the requests."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from lockstep.launcher import packets


class ControlSocket:
    """Listens on ``address``. ``answer`` is called with each request and returns the answer to send.

    A client that sends anything but a JSON object, or does not read its answers, is disconnected.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector, answer: Callable[[packets.Packet], packets.Packet]) -> None:
        self._selector, self._answer = selector, answer
        self._clients: set[socket.socket] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        umask = os.umask(0o177)
        try:
            self._socket.bind(address)
        finally:
            os.umask(umask)
        self._socket.listen(256)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """May be called twice."""
        for client in list(self._clients):
            self._disconnect(client)
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            return  # the client is gone again, or no descriptor is free: then the client stays in the queue
        client.setblocking(False)
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._serve(client))

    def _serve(self, client: socket.socket) -> None:
        try:
            request = packets.receive(client)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            request = None
        try:
            if request is not None:
                packets.send(client, self._answer(request))
                return
        except OSError:
            pass  # the client is gone, or does not read
        self._disconnect(client)

    def _disconnect(self, client: socket.socket) -> None:
        self._clients.remove(client)
        self._selector.unregister(client)
        client.close()
