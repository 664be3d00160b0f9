"""What the commands print: bytes and text for descriptor 1. Knows no command."""

from __future__ import annotations

import argparse
import functools
import os
import select
from collections.abc import Callable

from lockstep.errors import UsageError
from lockstep.recording.text import printable


class ReaderGoneError(Exception):
    """Nobody reads what is printed any more: `lockstep logs | head` has read enough."""


def print_bytes(data: bytes) -> None:
    """Print all of it. Raises ReaderGoneError if nobody reads it, and UsageError if it cannot be written: the disk is full."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # another process has made the terminal nonblocking
            select.select([], [1], [], 1.0)
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            raise UsageError(f"standard output cannot be written ({error.strerror}).") from error


def print_text(text: str) -> None:
    """As ``print_bytes``. What is not text, in a path for example, is shown as "?"."""
    print_bytes(text.encode(errors="replace"))


def ends_quietly(execute: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that ends without a traceback if its reader ends it, or if files of the run cannot be read."""

    @functools.wraps(execute)
    def wrapped(given: argparse.Namespace) -> int:
        try:
            return execute(given)
        except ReaderGoneError:
            return 0
        except OSError as error:
            what = printable(str(error.filename or "a file of the run"))
            if isinstance(error, FileNotFoundError):
                raise UsageError(f"{what} is gone: its folder was removed meanwhile.") from error
            raise UsageError(f"{what} cannot be read ({error.strerror or error}).") from error

    return wrapped
