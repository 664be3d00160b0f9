"""Messages between head, agents and doctor: JSON objects with a "type". Checks their form; does not know the types.

Which messages a process accepts is a table:

    AGENT_MESSAGES: Table = {
        "register": {"workers": int, "addresses": list[str], "generation": int | None},
        "exited": {"worker": int, "code": int, "why?": str},
    }

A field whose name ends with "?" may be left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

Message = dict[str, Any]
Table = Mapping[str, Mapping[str, Any]]
"""For each type of message, its fields and their types: int, float, str, bool, dict, list[X], dict[str, X], X | None, Any."""

MAX_DEPTH = 32
_MAX_INT_DIGITS = 20


def encode(message: Message) -> bytes:
    """Raises ValueError or TypeError if the message cannot be written as JSON."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Raises ValueError if the payload is not a JSON object, is nested too deeply, or has a number that is too large."""
    try:
        message = json.loads(payload, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH:  # otherwise it cannot be nested too deeply
        _check_depth(message)
    return message


def check(message: Message, table: Table) -> str | None:
    """Returns what is wrong with the message, or None if it has a type of the table and the fields of this type."""
    type_ = message.get("type")
    if not isinstance(type_, str) or type_ not in table:
        known = ", ".join(sorted(table)) or "none"
        return f"a message of type {str(type_)[:40]!r} is not accepted here; accepted are: {known}"
    fields = {name.rstrip("?"): expected for name, expected in table[type_].items()}
    for name, expected in fields.items():
        if name not in message:
            if f"{name}?" not in table[type_]:
                return f"a message of type {type_!r} lacks {name!r}"
        elif not _is_a(message[name], expected):
            shown = getattr(expected, "__name__", str(expected)) if get_origin(expected) is None else str(expected)
            return f"{name!r} of a message of type {type_!r} is {str(message[name])[:40]!r}, which is not {shown}"
    unknown = message.keys() - fields.keys() - {"type"}
    if unknown:
        return f"a message of type {type_!r} has the unknown field {min(unknown)[:40]!r}"
    return None


def _is_a(value: object, expected: Any) -> bool:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return any(_is_a(value, each) for each in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is_a(each, arguments[0]) for each in value)
    if origin is dict:  # JSON has no keys but strings
        return isinstance(value, dict) and all(_is_a(each, arguments[1]) for each in value.values())
    if expected is Any:
        return True
    if expected is float:
        return type(value) in (int, float)
    return value is None if expected in (None, type(None)) else type(value) is expected  # True is not an int here


def _check_depth(message: Message) -> None:
    level: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        inner = [each for value in level for each in (value.values() if isinstance(value, dict) else value)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("it has a number that is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has the number {name}")
