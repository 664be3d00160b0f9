"""EventLoop: waits for sockets, pipes, signals and the clock, in one thread. Knows nothing of workers."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable

from lockstep.launcher.own_clock import OwnClock

_TICK_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EventLoop:
    """Calls ``key.data()`` for each descriptor of ``selector`` that is ready. Use it in the main thread.

    ``on_signal(number)`` is called for SIGCHLD and for the signals by which people end programs, unless these are ignored.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self.clock = OwnClock()
        self._on_signal = on_signal
        self._wakeup, self._signals = socket.socketpair()

    def __enter__(self) -> EventLoop:
        self._wakeup.setblocking(False)
        self._signals.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the number arrives at the wakeup socket
        self.selector.register(self._wakeup, selectors.EVENT_READ, self._read_signals)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(-1)
        self.selector.unregister(self._wakeup)
        self._wakeup.close()
        self._signals.close()

    def run_once(self, next_at: float) -> None:
        """Wait until something happens, until ``next_at``, or for a tenth of a second, and call what is ready."""
        timeout_s = max(0.0, min(_TICK_S, next_at - time.monotonic()))
        ready = self.selector.select(timeout_s)
        self.clock.advance(timeout_s)
        for key, _ in ready:
            key.data()

    def _read_signals(self) -> None:
        for number in self._wakeup.recv(4096):
            self._on_signal(number)
