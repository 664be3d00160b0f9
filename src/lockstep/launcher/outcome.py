"""Outcome: how a run has ended, as a file in its folder, for the process that has started the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.launcher.failure_text import Failure

_FILE = "outcome.json"


def write_outcome(run_dir: Path, code: int, finished: dict[int, int], cause: Failure | None) -> None:
    """``finished``: rank -> the worker that had this rank when its script reached the end. ``cause``: the failure that ended it."""
    facts = {"name": cause.name, "error": cause.error, "traceback": cause.traceback} if cause is not None else None
    (run_dir / _FILE).write_text(json.dumps({"code": code, "finished": finished, "cause": facts}))


def read_outcome(run_dir: Path) -> dict[str, Any] | None:
    """Returns what was written; None if the process that supervised the run has not reached its end."""
    path = run_dir / _FILE
    return json.loads(path.read_text()) if path.exists() else None


def failure_text(outcome: dict[str, Any], where: str) -> str:
    """Returns why the run failed, with the traceback of the worker that failed first. ``where``: a sentence about its files."""
    cause = outcome["cause"]
    if cause is None:
        return f"the run ended with code {outcome['code']}. {where}"
    trace = f"\n\n{cause['traceback'].rstrip()}" if cause["traceback"] else ""
    return f"{cause['name']} failed: {cause['error']}. {where}{trace}"


def workers_by_rank(outcome: dict[str, Any]) -> list[int]:
    """Returns the workers whose scripts have reached the end, in the order of their ranks."""
    return [worker for _, worker in sorted((int(rank), worker) for rank, worker in outcome["finished"].items())]
