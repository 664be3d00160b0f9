"""Arguments of the command line: wrong ones are refused in a sentence. Knows no commands."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` shows how it is called.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            for action in self._actions:
                if isinstance(action, argparse._SubParsersAction) and given.command:
                    options += [o for a in action.choices[given.command]._actions for o in a.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], options, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"there is no option {unknown[0]}. {hint}Options of lockstep come before the script, those of the script after it; "
                f"`{self.prog} {given.command or ''} --help` lists ours."
            )
        return given


def whole_number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return read


def seconds_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def open_standard_streams() -> None:
    """A descriptor 0, 1 or 2 that is closed would be the next file opened, and be written to."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def write(descriptor: int, text: str) -> None:
    try:
        os.write(descriptor, text.encode(errors="replace"))
    except OSError:
        pass  # nobody reads it
