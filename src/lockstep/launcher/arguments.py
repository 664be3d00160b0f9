"""Arguments of the command line: a parser that refuses wrong ones with one sentence. Does not know the commands."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from lockstep.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises a UsageError with one sentence where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` shows how it is called.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse calls this for each subcommand
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            hint = did_you_mean(unknown[0].split("=")[0], options) + (f"{self.epilog} " if self.epilog else "")
            what = (
                f"there is no option {unknown[0]}" if unknown[0].startswith("-") else f"the argument {unknown[0]} is one too many"
            )
            raise UsageError(f"{what}. {hint}`{self.prog} --help` shows how it is called.")
        return given, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = did_you_mean(value, action.choices)
            raise UsageError(f"there is no command {value}. {hint}`{self.prog} --help` lists the commands.")
        super()._check_value(action, value)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns "Did you mean X? ", or "" if nothing known resembles ``word``."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {near[0]}? " if near else ""


def whole_number(least: int) -> Callable[[str], int]:
    """Returns the ``type=`` of an argument that is a whole number of at least ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return read


def seconds(text: str) -> float:
    """The ``type=`` of an argument that is a duration."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if they are closed. Otherwise the next file that is opened would get one of these numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def write(descriptor: int, text: str) -> None:
    """Write to a standard stream. If its reader is gone, the text is discarded."""
    try:
        os.write(descriptor, text.encode(errors="replace"))
    except OSError:
        pass
