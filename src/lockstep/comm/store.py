"""The key-value stores through which the workers of a world find each other: opening one, and waits that can be aborted.

Knows URLs, not launchers.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from lockstep.comm.blame import name_ranks
from lockstep.errors import PeerError, UsageError
from lockstep.world import World

_POLL_S = 0.0005


def open_store(world: World, timeout_s: float) -> dist.Store:
    """Connect to the store at ``world.rendezvous``, blocking up to ``timeout_s``. If no other process serves it, rank 0 does.

    Raises:
        UsageError: The URL is not a store's, rank 0 cannot serve the address, or another user owns the folder.
        PeerError: No process answers at the address.
    """
    url = urlparse(world.rendezvous)
    if url.scheme == "file":
        _make_private(os.path.dirname(url.path))
        store: dist.Store = dist.FileStore(url.path, world.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise UsageError(f"{world.rendezvous!r} is not the address of a store. Use tcp://HOST:PORT or file:///PATH.")
    try:
        # multi_tenant: a user's own init_process_group may serve the same address from this process
        return dist.TCPStore(
            url.hostname,
            url.port,
            world.size,
            world.hosts_store,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if world.hosts_store:
            raise UsageError(
                f"rank 0 cannot serve the store at {world.rendezvous} ({reason}). "
                "If another run uses the port, choose another one with MASTER_PORT or LOCKSTEP_STORE."
            ) from error
        raise PeerError(
            f"no store answered rank {world.rank} at {world.rendezvous} within {timeout_s:g} s ({reason}). "
            "Check that rank 0 is running and that this address can be reached from here.",
            ranks=(0,),
        ) from error


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    """Block until all ranks have called this with the same store; write this worker's process id under ``pid/RANK``.

    Raises:
        PeerError: Names the ranks that did not call it within ``timeout_s``.
    """
    store.set(f"pid/{rank}", str(os.getpid()))
    deadline = time.monotonic() + timeout_s
    missing = [r for r in range(size) if r != rank]
    pause_s = 0.001
    while missing:
        missing = [r for r in missing if not store.check([f"pid/{r}"])]
        if missing and time.monotonic() > deadline:
            raise PeerError(
                f"{name_ranks(missing)} of {size} never arrived (rank {rank} waited {timeout_s:g} s). "
                "Look at the end of their logs, and check that all workers of the world were started.",
                ranks=missing,
            )
        if missing:
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.1)


def _make_private(folder: str) -> None:
    """Create the folder for this user alone. Raises ``UsageError`` if another user created it."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.getuid() and not status.st_mode & stat.S_ISVTX:
        raise UsageError(f"the folder {folder} of the store belongs to user {status.st_uid}, not to you. Choose another folder.")


class StoreWaitError(RuntimeError):
    """A wait for a key was aborted or timed out."""


class AbortableStore(dist.Store):
    """A store in a file whose waits end with ``StoreWaitError`` when any thread sets ``aborted``. It opens no port.

    A worker may die while the others still form a generation; the agent then tells them to abort. A wait ends within a millisecond
    of its key being set. C++ does not keep this object alive: the caller must.
    """

    def __init__(self, path: str, size: int, aborted: threading.Event, timeout_s: float) -> None:
        super().__init__()
        self._inner, self._aborted, self._timeout_s = dist.FileStore(path, size), aborted, timeout_s
        self._lock = threading.Lock()  # a FileStore serves one caller at a time

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
        if self._aborted.is_set():
            raise StoreWaitError("the agent aborted this generation")
        with self._lock:
            return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise StoreWaitError(f"no worker set {', '.join(keys)} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._inner.delete_key(key)

    def num_keys(self) -> int:
        with self._lock:
            return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> AbortableStore:
        return self  # every method locks, so threads may share it
