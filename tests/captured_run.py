"""CapturedRun: one run of tests/scripts/captured.py, on CPUs or on a GPU. No pytest here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "captured.py"
GAPS = ("replay", "bucket", "control", "averaged", "stepped")
"""Places at which worker 1 may die (``die_in``)."""


class CapturedRun(LaunchedRun):
    """``settings`` are the variables CAPTURED_... of the script; ``env`` is added to the environment."""

    def __init__(self, folder: Path, workers: int, *, captured: bool, env: dict[str, str] | None = None, **settings: Any) -> None:
        named = {f"CAPTURED_{name.upper()}": str(value) for name, value in settings.items()}
        named |= {"OMP_NUM_THREADS": "1", "CAPTURED": "1" if captured else ""}
        hang_timeout_s = "20" if settings.get("device") == "cuda" else "5"
        super().__init__(SCRIPT, "--hang-timeout", hang_timeout_s, folder=folder, workers=workers, env=named | (env or {}))


def require_survival(run: CapturedRun, want: str) -> None:
    """Require that worker 1 dies and is replaced, and that the others have replayed and end with the result ``want``."""
    run.wait_for_generation(2)
    assert (run.folder / "died").exists(), run.dump()
    (run.folder / "hurry").touch()
    found = run.result()
    assert found == want, f"{found} instead of {want}\n{run.dump()}"
    for worker in ("0", "2"):
        backwards, updates = map(int, run.notes("replays")[worker].split())
        assert backwards > 100, (worker, backwards)
        assert updates > 20, (worker, updates)
