"""OwnClock: the monotonic clock without the times in which this process was stopped. Knows nothing else.

If the agent is stopped and continued (SIGSTOP, a paused container), its workers may have been stopped too. They must not be taken
for late because of time in which nobody could run.
"""

from __future__ import annotations

import time

_LONGEST_S = 1.0
"""The loop of the agent runs ten times a second. If one iteration takes this much longer than it should, it was stopped."""


class OwnClock:
    def __init__(self) -> None:
        self._last = time.monotonic()
        self._stopped_s = 0.0

    def advance(self, waited_s: float) -> None:
        """Called in every iteration of the loop, which meant to wait for ``waited_s`` at most."""
        now = time.monotonic()
        gap_s = now - self._last
        if gap_s > waited_s + _LONGEST_S:
            self._stopped_s += gap_s - waited_s
        self._last = now

    def now(self) -> float:
        return time.monotonic() - self._stopped_s
