"""Prints one line for the user to a worker's standard error."""

from __future__ import annotations

import sys


def print_notice(line: str) -> None:
    print(f"lockstep: {line}", file=sys.stderr, flush=True)
