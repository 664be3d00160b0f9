"""Runs a function on N ranks that are threads of this process and talk over loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback


def on_threads(size: int, body: Callable[[Comm], Any], timeout_s: float = 30.0) -> list[Any]:
    """Run ``body(comm)`` on each rank. Returns what each rank returned. Raises the first exception of a rank when all ended."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def enter(comm: Comm) -> None:
        try:
            results[comm.rank] = body(comm)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors.append(error)
            comm.abort(f"rank {comm.rank} raised {error!r}")

    threads = [threading.Thread(target=enter, args=(comm,), daemon=True) for comm in loopback(size, timeout_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 2)
    assert not any(thread.is_alive() for thread in threads), f"a rank still runs after {timeout_s * 2} s"
    if errors:
        raise errors[0]
    return results
