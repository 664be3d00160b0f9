"""Shutdown: how the workers of a run are stopped, first by a message, then by SIGTERM, at last by SIGKILL. Decides no exit code.

the run has ended    a message now     SIGTERM after 0.5 s    SIGKILL after --grace
a signal came        the signal now                           SIGKILL after --grace, or at a second Ctrl-C
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection

from lockstep.launcher.console import Console
from lockstep.launcher.local_machine import Machines
from lockstep.plan.membership_events import End

_EXIT_S = 0.5
"""When the run has ended because a worker failed, the other workers have this long to report how they end."""


class Shutdown:
    """``name`` returns the name of a worker for people."""

    def __init__(self, machines: Machines, console: Console, grace_s: float, name: Callable[[int], str]) -> None:
        self._machines, self._console, self._grace_s, self._name = machines, console, grace_s, name
        self.end: End | None = None
        self.signal: int | None = None
        self._term_at = self._kill_at = math.inf

    @property
    def has_begun(self) -> bool:
        return self.end is not None or self.signal is not None

    @property
    def next_at(self) -> float:
        """When ``on_time`` has something to do."""
        return min(self._term_at, self._kill_at)

    def on_end(self, end: End, now: float) -> None:
        """The run has ended: tell the workers that are left to exit."""
        self.end = end
        for id in self._machines.ids:
            self._machines.send((id,), {"type": "dismiss", "why": end.why})
        if self.signal is None:
            self._term_at = now + _EXIT_S

    def on_signal(self, number: int, members: Collection[int], now: float) -> None:
        """The agent got SIGINT, SIGTERM or SIGHUP: pass it on. Unless it is SIGINT, ``members`` finish the step and save."""
        if self.signal is not None:
            if number == signal.SIGINT:
                self._kill_at = math.inf
                self._console.say("killing all workers.")
                self._machines.kill_all()
            return
        self.signal = number
        self._term_at, self._kill_at = math.inf, now + self._grace_s
        self._machines.cancel_unstarted()
        again = " Press Ctrl-C again to kill them at once." if number == signal.SIGINT else ""
        self._console.say(f"got {signal.Signals(number).name}. The workers have {self._grace_s:g} s to stop.{again}")
        for id in self._machines.ids:
            if number != signal.SIGINT:
                is_member = id in members
                self._machines.send((id,), {"type": "stop"} if is_member else {"type": "dismiss", "why": "the run was told to end"})
            self._machines.signal(id, signal.SIGTERM if number == signal.SIGHUP else number)

    def on_time(self, now: float) -> None:
        """Send SIGTERM or SIGKILL if it is time."""
        if now >= self._term_at:
            self._term_at, self._kill_at = math.inf, now + self._grace_s
            self._machines.cancel_unstarted()
            for id in self._machines.ids:
                self._machines.signal(id, signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            names = ", ".join(self._name(id) for id in sorted(self._machines.ids))
            self._console.say(f"killing {names}, which did not stop within {self._grace_s:g} s.")
            self._machines.kill_all()
