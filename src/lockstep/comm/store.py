"""Opens the key-value store at which the workers of a world meet. Knows URLs, not launchers."""

from __future__ import annotations

import os
import stat
import time
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from lockstep.errors import PeerError, UsageError
from lockstep.world import World


def open_store(world: World, timeout_s: float) -> dist.Store:
    """Connect to ``world.rendezvous``; rank 0 serves it where nobody else does. Blocks up to ``timeout_s``."""
    url = urlparse(world.rendezvous)
    if url.scheme == "file":
        _make_private(os.path.dirname(url.path))
        store: dist.Store = dist.FileStore(url.path, world.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise UsageError(f"cannot meet at {world.rendezvous!r}: it must be tcp://HOST:PORT or file:///PATH.")
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
                f"rank 0 cannot serve the meeting place {world.rendezvous} ({reason}). "
                "Is the port taken by another run? Choose another one (MASTER_PORT or LOCKSTEP_STORE)."
            ) from error
        raise PeerError(
            f"rank {world.rank} found nobody at {world.rendezvous} within {timeout_s:g} s ({reason}). "
            "Is rank 0 running, and is that address reachable from here?",
            ranks=(0,),
        ) from error


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    """Return when all ranks have come; a ``PeerError`` names those that never did."""
    store.set(f"here/{rank}", str(os.getpid()))
    deadline = time.monotonic() + timeout_s
    missing = [r for r in range(size) if r != rank]
    pause_s = 0.001
    while missing:
        missing = [r for r in missing if not store.check([f"here/{r}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise PeerError(
                f"rank{'s' if len(missing) > 1 else ''} {names} of {size} never arrived (rank {rank} waited {timeout_s:g} s). "
                "Look at the end of their logs, and check that as many workers were started as the world says.",
                ranks=missing,
            )
        if missing:
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.1)


def _make_private(folder: str) -> None:
    """Create the folder for this user alone; refuse one that somebody else prepared."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.getuid() and not status.st_mode & stat.S_ISVTX:
        raise UsageError(f"the meeting place {folder} belongs to user {status.st_uid}, not to you. Choose another one.")
