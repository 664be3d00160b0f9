"""The token of a run: a secret of at least 256 bits that every process of the run knows, and no other process.

The token is never sent over a connection and never appears in a message.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import UsageError

FILE_VARIABLE = "LOCKSTEP_TOKEN_FILE"
VARIABLE = "LOCKSTEP_TOKEN"
_TOKEN = re.compile(r"(?:[0-9a-fA-F]{2}){32,512}")
_MAX_BYTES = 4096
_HOW_TO_MAKE = 'To make a token, type: (umask 077; python -c "import secrets; print(secrets.token_hex(32))" > FILE)'


def new_token() -> str:
    """Returns 64 random hexadecimal digits."""
    return secrets.token_hex(32)


def write_token(path: str | Path) -> str:
    """Write a new token to a file that only this user can read, and return the token.

    Raises UsageError if the file exists or cannot be written.
    """
    token = new_token()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already. Remove it to make a new token, or pass it with --token-file {path}.") from error
    except OSError as error:
        raise UsageError(f"the token cannot be written to {path}: {error.strerror}. Name a file in a folder of yours.") from error
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask is
        file.write(token + "\n")
    return token


def read_token(file: str | None, variables: Mapping[str, str]) -> bytes:
    """Read the token that was given to this process.

    Args:
        file: The value of ``--token-file``: a path, or "-" for one line of standard input. None if the option was not given: then
            ``LOCKSTEP_TOKEN_FILE`` names the file, or else ``LOCKSTEP_TOKEN`` is the token.
        variables: The variables that this process was started with.

    Raises:
        UsageError: There is no token, it is too short or not hexadecimal, or its file can be read by other users.
    """
    file = file or variables.get(FILE_VARIABLE) or None
    if file == "-":
        return _parse(_read_line(), "standard input")
    if file is not None:
        return _parse(_read_file(file), file)
    if variables.get(VARIABLE):
        return _parse(variables[VARIABLE], f"the variable {VARIABLE}")
    raise UsageError(
        "a token is missing: head and agents accept only processes that know the token of the run. Pass --token-file FILE, or set "
        f"{FILE_VARIABLE}. {_HOW_TO_MAKE}"
    )


def _parse(text: str, source: str) -> bytes:
    text = text.strip()
    if not _TOKEN.fullmatch(text):  # the text itself is not shown: it may be most of a secret
        raise UsageError(
            f"the token in {source} has {len(text)} characters and is not a token: a token has 64 hexadecimal digits or more, and "
            f"nothing else. {_HOW_TO_MAKE}"
        )
    return bytes.fromhex(text)


def _read_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            _check_owner_and_mode(path, found)
            return file.read(_MAX_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise UsageError(f"the token file {path} cannot be read: {error.strerror}.") from error


def _check_owner_and_mode(path: str, found: os.stat_result) -> None:
    """Secrets that Kubernetes mounts belong to root and are readable by the group of the process; that is accepted."""
    own = os.geteuid()
    if found.st_uid not in (own, 0):
        raise UsageError(
            f"the token file {path} belongs to another user (uid {found.st_uid}), who can read it. Use a file of your own."
        )
    readable = found.st_mode & (0o077 if found.st_uid == own else 0o007)
    if readable:
        mode = stat.S_IMODE(found.st_mode)
        raise UsageError(f"other users can read or write the token file {path} (mode {mode:04o}). Type: chmod 600 {path}")


def _read_line() -> str:
    """Byte by byte, so that what follows the line in standard input is left to others."""
    line = b""
    while len(line) < _MAX_BYTES:
        byte = os.read(sys.stdin.fileno(), 1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode("ascii", "replace")
