"""Executes `lockstep COMMAND ...` as a person does, in a new interpreter, and says what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import ROOT

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """That of the tests, with the sources in the path of Python, and without the variables of another run."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [clean.get("PYTHONPATH")])])
    return clean


def lockstep(*words: str | Path, folder: Path, env: dict[str, str] | None = None) -> Done:
    """``folder``: the current directory. ``env``: variables to add."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, words)],
        cwd=folder,
        env=environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


@contextmanager
def started(*words: str | Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which runs. It is killed at the end if it still does."""
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()
