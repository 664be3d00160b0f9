"""Door: the unix socket of a run, through which people reach its agent. Knows frames, not decisions."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.launch import packets


@dataclass(eq=False)
class Visitor:
    line: socket.socket
    frames: packets.Frames = field(default_factory=packets.Frames)
    unsent: bytearray = field(default_factory=bytearray)


class ControlSocket:
    """``ask`` answers every request."""

    def __init__(self, address: str, selector: selectors.BaseSelector, ask: Callable[[packets.Packet], packets.Packet]) -> None:
        self._selector, self._ask = selector, ask
        self._visitors: set[Visitor] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(address)
        finally:
            os.umask(before)
        self._socket.listen(256)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._let_in)

    def close(self) -> None:
        for visitor in list(self._visitors):
            self._send_off(visitor)
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()

    def _let_in(self) -> None:
        try:
            line, _ = self._socket.accept()
        except OSError:
            return  # gone again, or no descriptor left: it stays in the queue
        line.setblocking(False)
        visitor = Visitor(line)
        self._visitors.add(visitor)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._serve(visitor))

    def _serve(self, visitor: Visitor) -> None:
        self._push(visitor)
        if visitor not in self._visitors:
            return
        try:
            data = visitor.line.recv(1 << 16)
            requests = visitor.frames.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, requests = b"", []
        if not data:
            self._send_off(visitor)
        for request in requests:
            visitor.unsent += packets.frame(self._ask(request))
            self._push(visitor)

    def _push(self, visitor: Visitor) -> None:
        """Send what the visitor takes now; the rest when it takes more."""
        if visitor not in self._visitors:
            return
        try:
            while visitor.unsent:
                del visitor.unsent[: visitor.line.send(visitor.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._send_off(visitor)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if visitor.unsent else 0)
        self._selector.modify(visitor.line, events, lambda: self._serve(visitor))

    def _send_off(self, visitor: Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
            self._selector.unregister(visitor.line)
            visitor.line.close()
