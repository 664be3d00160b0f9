"""What trackers that write local files have in common: whose curves a place has, and that one run at a time writes there."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

_LEAVING_S = 20.0
_POLL_S = 0.02


def claim(owner: Path, run_id: str, put_aside: Callable[[], None], what: str) -> int:
    """Reserve a place for the run's curves: write ``run_id`` to the file ``owner``, and lock it.

    If the place has had another owner, or none, ``put_aside()`` is called first: so a resumed run continues its curves, and a run
    that begins anew does not.

    Returns:
        The file, whose lock ends when it is closed, or when this process ends. Processes that were forked from it do not have it.

    Raises:
        OSError: Another run has the lock, or an earlier worker of this run, which is waited for. ``what`` is named in the message.
    """
    owner.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(file, run_id, what)
        if os.pread(file, 1000, 0).decode() != run_id:
            put_aside()
            os.ftruncate(file, 0)
            os.pwrite(file, run_id.encode(), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def free_name(path: Path) -> Path:
    """Return ``path`` with ``.earlier-1`` in its name, or the first number that is free."""
    names = (path.with_name(f"{path.stem}.earlier-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _lock(file: int, run_id: str, what: str) -> None:
    until = time.monotonic() + _LEAVING_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # this file system has no locks
            if os.pread(file, 1000, 0).decode() != run_id:
                raise OSError(f"another run writes {what}; give each run a path of its own") from None
            if time.monotonic() > until:
                raise OSError(
                    f"an earlier worker of this run still has {what} open, perhaps on a machine that is cut off; "
                    "it can be written when that process has ended"
                ) from None
        time.sleep(_POLL_S)
