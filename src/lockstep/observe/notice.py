"""One line to the user, from a worker."""

from __future__ import annotations

import sys


def print_notice(line: str) -> None:
    print(f"lockstep: {line}", file=sys.stderr, flush=True)
