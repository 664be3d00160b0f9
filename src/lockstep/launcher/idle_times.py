"""IdleTimes: how long processes have used no CPU time. Knows pids and the clock, not what the processes do.

A process that waits still runs threads that poll now and then: up to 0.2 % of a core, and 0.05 s, count as nothing. The CPU time of
its descendants counts as its own, because it may wait for a program that it has started.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.launcher.linux import cpu_seconds

_NOTHING_S = 0.05
_NOTHING_SHARE = 0.002


class IdleTimes:
    def __init__(self) -> None:
        self._since: dict[int, tuple[float, float]] = {}  # pid -> (when, CPU seconds then)

    def measure(self, pids: Mapping[int, int], now: float) -> dict[int, float]:
        """Returns for each key of ``pids`` how long its process has been idle. Processes that are not named are forgotten."""
        since: dict[int, tuple[float, float]] = {}
        idle: dict[int, float] = {}
        for key, pid in pids.items():
            used = cpu_seconds(pid)
            if used is None:
                continue
            when, before = self._since.get(pid, (now, used))
            if not 0 <= used - before <= max(_NOTHING_S, _NOTHING_SHARE * (now - when)):
                when, before = now, used
            since[pid] = (when, before)
            idle[key] = now - when
        self._since = since
        return idle
