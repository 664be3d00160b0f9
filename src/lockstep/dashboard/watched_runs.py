"""WatchedRuns: the runs that somebody looks at. An asyncio task reads each of them while it is watched; later it is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lockstep.dashboard.run_list import RunList
from lockstep.dashboard.watched_run import WatchedRun
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write
from lockstep.recording.text import printable

POLL_S = 0.15
"""How often a run that goes on is read."""
_ENDED_POLL_S = 1.0
_RETRY_S = 5.0
KEEP_S = 60.0
_FIRST_READ_S = 3.0
_IN_USE_S = 10.0
MAX_WATCHED = 36
"""So many runs are kept, and more only if all of them were asked for just now."""


@dataclass
class _Watch:
    """``used``: when it was asked for last. ``until``: when it is forgotten."""

    run: WatchedRun
    used: float = 0.0
    until: float = 0.0
    task: asyncio.Task[None] | None = None


class WatchedRuns:
    """Belongs to one event loop. Files are read in threads."""

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._watches: dict[str, _Watch] = {}
        self._changed = asyncio.Event()
        self._said: dict[str, str] = {}
        self._readers = ThreadPoolExecutor(2, "recordings")
        """Threads of their own, so that requests do not wait until long recordings are read."""

    async def get(self, name: str, keep_s: float = KEEP_S) -> WatchedRun | None:
        """The run of that name; None if there is none. It is read for ``keep_s``: call this again while it is needed."""
        watch = self._watches.get(name)
        if watch is None:
            opened = await asyncio.to_thread(self._open, name)
            watch = self._watches.get(name)  # another request may have been faster
            if watch is None:
                if opened is None:
                    return None
                watch = self._watches[name] = _Watch(opened)
                watch.task = asyncio.create_task(self._keep_up_to_date(name, watch))
        watch.used = time.monotonic()
        watch.until = max(watch.until, watch.used + keep_s)
        self._forget_oldest()
        return watch.run

    async def read(self, runs: Collection[WatchedRun]) -> None:
        """Return when these runs have read all that was recorded until now, or after a few seconds."""
        end = time.monotonic() + _FIRST_READ_S
        while not all(run.is_current for run in runs) and time.monotonic() < end:
            await self.changed(0.1)

    async def changed(self, timeout_s: float) -> None:
        """Return when a run that is watched has changed, or after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            pass

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _open(self, name: str) -> WatchedRun | None:
        path = self._runs.path(name)
        try:
            return None if path is None else WatchedRun(name, path)
        except (UsageError, OSError):  # removed just now
            return None

    async def _keep_up_to_date(self, name: str, watch: _Watch) -> None:
        run = watch.run
        try:
            while time.monotonic() < watch.until:
                before = run.version
                has_more = await asyncio.get_running_loop().run_in_executor(self._readers, run.poll)
                if run.version != before:
                    event, self._changed = self._changed, asyncio.Event()
                    event.set()
                await asyncio.sleep(0 if has_more else POLL_S if run.state == "running" else _ENDED_POLL_S)
        except Exception as error:  # noqa: BLE001 - of any kind: a later request opens the run anew
            self._say(name, repr(error))
            await asyncio.sleep(_RETRY_S)
        finally:
            if self._watches.get(name) is watch:
                del self._watches[name]

    def _say(self, name: str, error: str) -> None:
        if self._said.get(name) != error:
            self._said[name] = error
            write(2, f"lockstep: the run {printable(name)} could not be read: {error}. It is read again in {_RETRY_S:.0f} s.\n")

    def _forget_oldest(self) -> None:
        idle = [name for name, watch in self._watches.items() if time.monotonic() - watch.used > _IN_USE_S]
        too_many = max(0, len(self._watches) - MAX_WATCHED)
        for name in sorted(idle, key=lambda each: self._watches[each].used)[:too_many]:
            task = self._watches.pop(name).task
            if task is not None:
                task.cancel()
