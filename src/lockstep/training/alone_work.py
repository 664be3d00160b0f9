"""AloneWork: announces work of this worker alone, so that the workers that wait for it do not take it for hung."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError


class AloneWork:
    """Blocks may be nested: the innermost one counts, and when it ends, what is left of the limit of the outer one."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._open: list[tuple[str, float]] = []  # what, and when its limit passes

    @contextmanager
    def announce(self, what: str, limit_s: float) -> Iterator[None]:
        """Announce ``what`` until the block ends, for ``limit_s`` at most. Without an agent it does nothing."""
        if not isinstance(what, str) or not what:
            raise UsageError(f'run.alone({what!r}): say what this worker does, as in run.alone("saving the best model").')
        if not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise UsageError(f"run.alone({what!r}, limit_s={limit_s!r}): pass a positive number of seconds.")
        link = self._workers.link
        if link is None:
            yield
            return
        self._open.append((what, time.monotonic() + limit_s))
        link.begin_alone(what, limit_s)
        try:
            yield
        finally:
            self._open.pop()
            outer, until = self._open[-1] if self._open else ("", -math.inf)
            left_s = until - time.monotonic()
            if left_s > 0:
                link.begin_alone(outer, left_s)
            else:
                link.end_alone()
