"""Prints one line from a worker to the user."""

from __future__ import annotations

import sys


def print_notice(line: str) -> None:
    """Print ``line`` to stderr at once, with the prefix "lockstep: "."""
    print(f"lockstep: {line}", file=sys.stderr, flush=True)
