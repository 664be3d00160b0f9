"""Where an exception came through the user's own code: not Lockstep, torch, the standard library or installed packages."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from dataclasses import dataclass
from functools import cache

import lockstep

_MAX_CHARS = 200


@dataclass(frozen=True)
class UserFrame:
    """The innermost line of the user's own files: ``where`` as "train.py:41", its text, and ``place``.

    ``place`` is "ValueError at /home/ada/train.py:12": the exception and the innermost line of the main script.
    """

    where: str = ""
    source: str = ""
    place: str = ""


def user_frame(error: BaseException) -> UserFrame:
    """Called in the process that raised ``error``.

    For a function of ``lockstep.launch``, the file that defines the function counts as the main script.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    main = {getattr(sys.modules["__main__"], "__file__", None), *(file for file, _ in frames[:1])}
    in_main = [(file, line) for file, line in frames if file in main]
    place = f"{type(error).__name__} at {in_main[-1][0]}:{in_main[-1][1]}" if in_main else ""
    own = [(file, line) for file, line in frames if file in main or _is_own(file)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # it has no frame of the file itself
        own.append((error.filename, error.lineno))
    if not own:
        return UserFrame(place=place)
    file, line = own[-1]
    return UserFrame(f"{_shown(file)}:{line}", linecache.getline(file, line).strip()[:_MAX_CHARS], place)


def _is_own(file: str) -> bool:
    if file.startswith("<") or not os.path.isabs(file):
        return False
    path = os.path.realpath(file)
    return not path.startswith(_installed()) and "site-packages" not in path and "dist-packages" not in path


@cache
def _installed() -> tuple[str, ...]:
    import sysconfig  # here, because the agent has no use for it

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_path(name) for name in names), os.path.dirname(lockstep.__file__)]
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})


def _shown(file: str) -> str:
    """As a path below the current directory, if it is there."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # the current directory is gone
        return file
    return file if relative.startswith(os.pardir) else relative
