"""The last lines of a run in the terminal: what it came to. Pure, but for the current directory."""

from __future__ import annotations

import shlex
from pathlib import Path

from lockstep.recording.summary import RunSummary


def last_lines(summary: RunSummary, costs: str, run_folder: Path, has_said_where: bool) -> list[str]:
    """What a run has come to, for the terminal. Empty if it made no steps.

    Args:
        summary: What is known of the run.
        costs: Where the time of its steps went (recording/costs_text.py); empty if that is not known.
        run_folder: Where its files are.
        has_said_where: Whether the terminal shows already where the files are.
    """
    if not summary.steps:
        return []
    found = [each for each in (summary.steps_text(), summary.faults_text()) if each]
    if costs:
        found.append(costs[0].upper() + costs[1:])
    if not has_said_where and (checkpoint := summary.checkpoint_text()):
        found.append(checkpoint)
    folder = _shortest(run_folder)
    found.append(f"`lockstep report {folder}` shows the run" + ("" if has_said_where else "; its logs are there too"))
    return [f"{line}." for line in found]


def _shortest(path: Path) -> str:
    """Below the current directory as a relative path; quoted for a shell."""
    try:
        path = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        pass
    return shlex.quote(str(path))
