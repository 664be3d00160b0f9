"""Waits for something by looking at it again and again, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.005


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0, poll_s: float = POLL_S) -> None:
    """Return when ``condition()`` is true. Fail at the deadline; ``what`` is the sentence that should have become true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(poll_s)
