"""The lines of events.jsonl: what a line of each kind must have. A damaged line counts as a line that is not there. Pure.

Every reader of events.jsonl leaves out the lines for which ``is_event`` is False, and trusts the others. Kinds and fields that are
not named here may be anything: later versions may add some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 53
"""Larger numbers do not fit into a float."""
_LAST_TIME = 253_402_214_400.0
"""The end of the year 9999, in seconds since 1970."""


class _Time:
    """As a shape: seconds since 1970."""


class _Ranks:
    """As a shape: worker -> rank. JSON has only texts as names."""


class _OneOf:
    """As a shape: an object for each name. Those of names that are known must have their shape."""

    def __init__(self, **known: Any) -> None:
        self.known = known


# A shape is a type, [shape] for a list, (shape, shape) for a list of that length, or {name: shape} for an object. What a name with
# "?" stands for may be missing or null.
_EVENT = _OneOf(
    MachineJoined={"name": str, "workers": int},
    MachineLost={"workers?": [int], "how?": str},
    ScaleRequested={"size": int},
    ScriptRaised={"worker": int, "error?": str, "place?": str},
)
_ACTION = _OneOf(
    Form={"number": int, "members": [int]},
    Kill={"worker": int, "why?": str},
    Spawn={"workers": [int]},
)
_KINDS: dict[str, dict[str, Any]] = {
    "command": {"role?": str, "words?": [str], "host?": str, "pid?": int},
    "begin": {"settings?": {"size?": int}, "pid?": int, "command?": str},
    "continue": {"workers": [int]},
    "started": {"ranks": _Ranks},
    "not started": {"why?": str},
    "event": {"event": _EVENT, "actions?": [_ACTION], "why?": str},
    "exited": {"worker": int, "pid?": int, "how?": str},
    "stopped": {"worker": int, "at?": _Time, "seconds": float},
    "saved": {"step": int, "where": str},
    "verdict": {"sentence?": str, "rank?": int, "worker?": int, "cause?": str, "speedup?": float},
    "signal": {"signal": int},
    "zygote hung": {"why?": str},
    "end": {"code": int, "why?": str, "step?": int, "stopped_after?": int, "signal?": int, "checkpoint?": (int, str)},
    "summary": {"lines": [str]},
}


def is_event(line: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of events.jsonl whose time, and whose known fields, can be what the writer has meant."""
    kind = line.get("kind")
    return isinstance(kind, str) and is_time(line.get("time")) and _fits(line, _KINDS.get(kind, {}))


def is_time(value: Any) -> bool:
    """Whether ``value`` can be a time: seconds since 1970, not after the year 9999."""
    return _fits(value, float) and 0 <= value <= _LAST_TIME


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, Mapping) and all(_has(value, name, each) for name, each in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape))
    if isinstance(shape, _OneOf):
        return isinstance(value, dict) and all(_fits(each, shape.known.get(name, {})) for name, each in value.items())
    if shape is _Ranks:
        return isinstance(value, dict) and all(_is_number(id) and _fits(rank, int) for id, rank in value.items())
    if shape is _Time:
        return is_time(value)
    if shape is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST and math.isfinite(value)
    return type(value) is int and abs(value) <= _LARGEST if shape is int else isinstance(value, shape)


def _has(value: Mapping[str, Any], name: str, shape: Any) -> bool:
    found = value.get(name.removesuffix("?"))
    return (found is None and name.endswith("?")) or _fits(found, shape)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15
