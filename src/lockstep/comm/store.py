"""The key-value stores through which the workers of a world find each other: opening one, and waiting for all workers.

Knows URLs, not launchers.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from lockstep.comm.blame import name_ranks
from lockstep.comm.store_address import check_own_address, reach_store
from lockstep.errors import PeerError, UsageError
from lockstep.world import World


def open_store(world: World, timeout_s: float) -> dist.Store:
    """Connect to the store at ``world.rendezvous``, blocking up to ``timeout_s``. If no other process serves it, rank 0 does.

    Raises:
        UsageError: The URL is not a store's, its host name does not resolve, rank 0 cannot serve the address, or another user owns
            the folder.
        PeerError: No process answers at the address.
    """
    url = urlparse(world.rendezvous)
    if url.scheme == "file":
        _make_private(os.path.dirname(url.path))
        if not _is_utf8(url.path):
            raise UsageError(f"the path of the store, {url.path!r}, is not UTF-8 text. Choose a folder with another name.")
        store: dist.Store = dist.FileStore(url.path, world.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise UsageError(f"{world.rendezvous!r} is not the address of a store. Use tcp://HOST:PORT or file:///PATH.")
    started = time.monotonic()
    if world.hosts_store:
        address = check_own_address(url.hostname, url.port, timeout_s)
    else:
        address = reach_store(world.rank, url.hostname, url.port, timeout_s)
    left_s = max(1.0, timeout_s - (time.monotonic() - started))
    try:
        # multi_tenant: a user's own init_process_group may serve the same address from this process
        connected = dist.TCPStore(
            address,
            url.port,
            world.size,
            world.hosts_store,
            timedelta(seconds=left_s),
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
    connected.set_timeout(timedelta(seconds=timeout_s))
    return connected


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    """Block until all ranks have called this with the same store; write this worker's process id under ``pid/RANK``.

    Raises:
        PeerError: Names the ranks that did not call it within ``timeout_s``.
    """
    store.set(f"pid/{rank}", str(os.getpid()))
    missing = [r for r in range(size) if r != rank]
    if not missing:
        return
    missing = (_wait_for if abortable_store(store) is not None else _poll_for)(store, missing, timeout_s)
    if missing:
        raise PeerError(
            f"{name_ranks(missing)} of {size} never arrived (rank {rank} waited {timeout_s:g} s). "
            "Look at the end of their logs, and check that all workers of the world were started.",
            ranks=missing,
        )


def _wait_for(store: dist.Store, ranks: list[int], timeout_s: float) -> list[int]:
    """Wait until ``ranks`` have arrived, with one request. Returns those that have not arrived within ``timeout_s``."""
    try:
        store.wait([f"pid/{r}" for r in ranks], timedelta(seconds=timeout_s))
    except StoreTimeoutError:
        return [r for r in ranks if not store.check([f"pid/{r}"])]
    return []


def _poll_for(store: dist.Store, ranks: list[int], timeout_s: float) -> list[int]:
    """As ``_wait_for``, for stores whose ``wait`` cannot be interrupted by Ctrl-C."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        ranks = [r for r in ranks if not store.check([f"pid/{r}"])]
        if not ranks or time.monotonic() > deadline:
            return ranks
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.1)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def abortable_store(store: dist.Store) -> AbortableStore | None:
    """The store below all prefixes, if it can be aborted."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, AbortableStore) else None


def _make_private(folder: str) -> None:
    """Create the folder for this user alone. Raises ``UsageError`` if it is another user's, or if others may write to it."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
        if stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid():
            status = os.stat(folder)
    except OSError as error:
        raise UsageError(f"the folder {folder} of the store cannot be made ({error.strerror}). Choose another folder.") from error
    advice = "Choose a folder of your own that only you can write to, or set LOCKSTEP_STORE or TMPDIR."
    if status.st_uid != os.geteuid():
        raise UsageError(f"the folder {folder} of the store belongs to user {status.st_uid}, not to you. {advice}")
    if status.st_mode & 0o022:
        raise UsageError(f"other users may write to the folder {folder} of the store (mode {status.st_mode & 0o7777:o}). {advice}")


class StoreWaitError(RuntimeError):
    """A wait for a key was aborted, or its generation is over."""


class StoreTimeoutError(StoreWaitError):
    """Nobody set a key in time. The message names the key."""


class AbortableStore(dist.Store):
    """A store whose ``wait`` ends within a millisecond of its keys being set, and with ``StoreWaitError`` if it is aborted.

    The base class of comm/agent_store.py. torch's own stores poll, log every timeout, or cannot be interrupted.
    """

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the store is aborted, in any thread; at once if it has been."""
        raise NotImplementedError
