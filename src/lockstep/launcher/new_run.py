"""Begins a run on disk: makes its folder, notes what runs there, registers it, and removes old folders beside it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Sequence

import lockstep
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.run_registry import forget_run, register
from lockstep.launcher.run_removal import KEPT_RUNS, remove_oldest

MAX_COMMAND_CHARS = 1 << 16
"""Of the words of a command in events.jsonl. Every reader reads that line."""
_MAX_WORD_CHARS = 4096


def create_run_folder(requested: str | None, role: str, words: Sequence[str], *, keep_runs: int = KEPT_RUNS) -> RunFolder:
    """Make the folder of a run. Call it when all arguments are known to work: a typo leaves no folder behind.

    Args:
        requested: The path; None for a new folder in ./lockstep-runs.
        role: What supervises the run: "run", "launch", "head" or "agent".
        words: The script and its arguments.
        keep_runs: Of ./lockstep-runs all but the newest folders are removed, if the new one is there.

    Raises:
        UsageError: The folder cannot be made, belongs to another user, or is used by another run.
    """
    run_folder = RunFolder.create(requested, time.time())
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "folder": os.getcwd(), "version": lockstep.__version__}
    run_folder.record("command", role=role, words=bounded_words(words), **facts)
    register(run_folder.path)
    if requested is None:
        remove_oldest(run_folder.path.parent, keep_runs)
    return run_folder


def bounded_words(words: Sequence[str]) -> list[str]:
    """Returns the first words, at most MAX_COMMAND_CHARS as JSON, and how many are left out: "... and 950 more"."""
    found: list[str] = []
    length = 0
    for word in words:
        word = word if len(word) <= _MAX_WORD_CHARS else f"{word[:_MAX_WORD_CHARS]}..."
        length += len(json.dumps(word)) + 2
        if length > MAX_COMMAND_CHARS:
            return [*found, f"... and {len(words) - len(found)} more"]
        found.append(word)
    return found


def discard_run_folder(run_folder: RunFolder, requested: str | None) -> None:
    """The run could not begin. Remove the folder that ``create_run_folder`` has made."""
    run_folder.close()
    if requested is None:
        shutil.rmtree(run_folder.path, ignore_errors=True)
        forget_run(run_folder.path)
        try:
            run_folder.path.parent.rmdir()
        except OSError:
            pass  # there are other runs in it
