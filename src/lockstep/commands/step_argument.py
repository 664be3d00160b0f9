"""`--steps A:B`, as the commands that show steps understand it."""

from __future__ import annotations

import argparse
import math
import re


def step_range(text: str) -> tuple[float, float]:
    """Return the first and the last step: "100:110" -> (100, 109); "100:" -> (100, infinity); ":110" -> (0, 109); "100"."""
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if found is None or not (found[1] or found[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps. Type 100:110, 100:, :110 or 100")
    first = float(found[1] or 0)
    last = float(found[3]) - 1 if found[3] else math.inf if found[2] else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} contains no step. Type 100:110 for the ten steps from 100 on")
    return first, last
