"""Launches scripts that import tests/loop_notes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.launch import LaunchedRun


class LoopRun(LaunchedRun):
    """One run of such a script, given as text; ``settings`` become its LOOP_* variables: see tests/loop_notes.py."""

    def __init__(self, script: str, folder: Path, workers: int, *options: str, **settings: Any) -> None:
        env = {"OMP_NUM_THREADS": "1", **{f"LOOP_{name.upper()}": str(value) for name, value in settings.items()}}
        super().__init__(script, "--hang-timeout", "5", *options, folder=folder, workers=workers, env=env)

    def wait_for_step(self, step: int) -> None:
        note = self.folder / "step"
        self.wait_until(lambda: note.exists() and int(note.read_text() or 0) >= step, f"step {step} is committed")

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def cut(self, step: int) -> None:
        """Kill all workers after ``step``, at which the run must be slow."""
        self.wait_for_step(step)
        for worker in self.workers():
            self.kill(worker)
        assert self.wait() != 0, self.dump()
