"""Writes mappings, lists, strings, numbers and booleans as YAML that people can read. Hand-written: Lockstep needs no YAML parser.

A string that any version of YAML could take for something else (``no``, ``1:20``, ``0400``) is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_OF_YAML = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_WIDTH = 110


@dataclass(frozen=True)
class Noted:
    """A value of a mapping with a comment, which is written above its key."""

    value: Any
    note: str


def documents(values: Iterable[Mapping[str, Any]], note: str = "") -> str:
    """Returns one YAML file with a document for each value, and ``note`` as a comment at its beginning."""
    head = "".join(f"{line}\n" for line in _comment(note, ""))
    return head + "---\n".join("".join(f"{line}\n" for line in _mapping(value, "")) for value in values)


def plain(value: Any) -> Any:
    """Returns the value without its notes."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _mapping(value: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, each in value.items():
        if isinstance(each, Noted):
            lines += _comment(each.note, indent)
            each = each.value
        name = f"{indent}{scalar(key)}:"
        if isinstance(each, Mapping) and each:
            lines += [name, *_mapping(each, indent + "  ")]
        elif isinstance(each, list | tuple) and each:
            lines += [name, *_list(each, indent)]
        else:
            lines.append(f"{name} {scalar(each)}")
    return lines


def _list(value: Sequence[Any], indent: str) -> list[str]:
    lines: list[str] = []
    for each in value:
        if isinstance(each, Mapping) and each:
            first, *rest = _mapping(each, indent + "  ")
            lines += [f"{indent}- {first.strip()}", *rest]
        elif isinstance(each, list | tuple) and each:
            first, *rest = _list(each, indent + "  ")
            lines += [f"{indent}- {first.strip()}", *rest]
        else:
            lines.append(f"{indent}- {scalar(each)}")
    return lines


def _comment(note: str, indent: str) -> list[str]:
    lines, line = [], ""
    for word in note.split():
        if line and len(indent) + len(line) + len(word) > _WIDTH:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else f"{indent}# {word}"
    return [*lines, line] if line else lines


def scalar(value: Any) -> str:
    """Returns one value as YAML, on one line. Raises UsageError for text that no file can hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML else _quoted(value)
    if isinstance(value, Mapping | list | tuple) and not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{value!r} is not written as YAML")


def _quoted(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the argument {text!r} is not UTF-8 text, which a YAML file must be. Use another name.") from None
    return '"' + "".join(_escaped(each) for each in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
