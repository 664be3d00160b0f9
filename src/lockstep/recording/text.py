"""Numbers and times as people read them. Pure."""

from __future__ import annotations


def number(value: float) -> str:
    """At most four significant digits: 0.5321, 12.35, 8100 -> 8.1k."""
    return _scaled(value, ".4g")


def steady_number(value: float) -> str:
    """Always four significant digits, so that the text has the same width when the value changes a little: 0.5300, 8.100k."""
    return _scaled(value, "#.4g").rstrip(".")


def _scaled(value: float, form: str) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit * 0.99995 <= abs(value) < 1e12:
            return f"{value / limit:{form}}{unit}"
    return f"{value:{form}}"


def clock(seconds: float) -> str:
    """ "0:07", "12:40", "3:05:00", "2 d 03:05"."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """ "0.06 s", "12.4 s", "12 min 40 s", "3 h 5 min", "2 d 3 h"."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    raise AssertionError(seconds)


def printable(text: str) -> str:
    """Without control characters, which could do anything to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def rank_text(rank: int, worker: int) -> str:
    """ "rank 2", and "rank 2 (worker 5)" if the worker does not have the number of its rank, as after a replacement."""
    return f"rank {rank}" if rank == worker else f"rank {rank} (worker {worker})"


def plural(number: int, noun: str) -> str:
    """ "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
