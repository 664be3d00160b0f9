"""The ``type=`` of arguments that are a length of time or a moment."""

from __future__ import annotations

import argparse
import math
import re
import time
from datetime import datetime

_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}


def length_of_time(text: str) -> float:
    """ "14 days" -> 1209600.0 seconds."""
    found = _length(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time. Type '14 days', '12h' or '30min'")
    return found


def moment(text: str) -> float:
    """ "10min" (ago), "14:30:05" (today), "2026-11-18 14:30" or seconds since 1970 -> seconds since 1970."""
    ago = _length(text)
    if ago is not None:
        return time.time() - ago
    try:
        seconds = float(text)
        if math.isfinite(seconds):
            return seconds
    except ValueError:
        pass
    now = datetime.now()
    for format in ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f"):
        try:
            found = datetime.strptime(text, format)
            return datetime.combine(now.date(), found.time()).timestamp()
        except ValueError:
            continue
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time. Type '10min' (ago), '14:30' (today), '2026-11-18 14:30' or seconds since 1970"
        ) from None


def _length(text: str) -> float | None:
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", text)
    return float(found[1]) * _UNITS[found[2]] if found is not None and found[2] in _UNITS else None
