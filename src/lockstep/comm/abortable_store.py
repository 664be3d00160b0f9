"""A store whose waits can be broken from another thread, and end within a millisecond of the key they wait for.

Wraps a store that answers ``check`` at once (a file). Used where a worker may die while the others are still meeting.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PAUSE_S = 0.0005


class NeverMet(RuntimeError):
    """A wait was broken off, or nobody came in time."""


class AbortableStore(dist.Store):
    """All waits raise ``NeverMet`` once ``broken`` is set, or when their time is over."""

    def __init__(self, inner: dist.Store, broken: threading.Event, timeout_s: float) -> None:
        super().__init__()
        self._inner, self._broken, self._timeout_s = inner, broken, timeout_s
        self._lock = threading.Lock()  # a file store serves one caller at a time

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._lock:
            return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        if self._broken.is_set():
            raise NeverMet("it was broken off")
        with self._lock:
            return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise NeverMet(f"nobody set {', '.join(keys)} within {self._timeout_s:g} s")
            time.sleep(_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._inner.delete_key(key)

    def num_keys(self) -> int:
        with self._lock:
            return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> AbortableStore:
        return self  # safe to share; and C++ keeps no Python object alive, so whoever opens a comm must keep this one


def meet_in_file(path: str, size: int, broken: threading.Event, timeout_s: float) -> AbortableStore:
    """A meeting place for ``size`` workers of one machine; it opens no port."""
    return AbortableStore(dist.FileStore(path, size), broken, timeout_s)
