"""EngineJob: a run of tests/scripts/train.py that an engine has started on several hosts, and what it leaves in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

DEADLINE_S = 90.0


class EngineJob:
    """``folder``: the working directory, which all hosts see; the run folder is ``run`` in it. ``output()``: what it has printed.

    ``has_ended()``: whether the command of the engine has ended.
    """

    def __init__(self, folder: Path, output: Callable[[], str], has_ended: Callable[[], bool]) -> None:
        self.folder, self.output, self._has_ended = folder, output, has_ended

    def environment(self, settings: dict[str, Any]) -> dict[str, str]:
        """The variables for the script: ``hold_at=20`` is TRAIN_HOLD_AT=20."""
        return {"OMP_NUM_THREADS": "1", **{f"TRAIN_{name.upper()}": str(value) for name, value in settings.items()}}

    def step(self) -> int:
        """The last step that rank 0 has committed."""
        note = self.folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def generations(self) -> list[list[int]]:
        """The members of every generation that the current head has formed or continued."""
        path = self.folder / "run" / "events.jsonl"
        found: list[list[int]] = []
        for entry in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            if entry["kind"] == "continue":
                found.append(entry["workers"])
            elif entry["kind"] == "event":
                found += [action["Form"]["members"] for action in entry["actions"] if "Form" in action]
        return found

    def hurry(self) -> None:
        """The test has acted: the run need not be slow any more."""
        (self.folder / "hurry").touch()

    def results(self) -> set[str]:
        """What the workers have written at their end: one result, if they agree."""
        return {path.read_text().strip() for path in self.folder.glob("done-*")}

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Fails at the deadline, and if the run ends first, with what it has printed."""
        try:
            wait_until(lambda: condition() or self._has_ended(), what, DEADLINE_S, poll_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None
        assert condition(), f"the run ended before {what}.\n{self.output()}"

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} is committed")

    def wait_for_size(self, size: int) -> None:
        """Wait until the newest generation has ``size`` members, and has committed a step."""
        self.wait_until(lambda: len(([[]] + self.generations())[-1]) == size, f"{size} workers form a generation")
        step = self.step()
        self.wait_until(lambda: self.step() > step, f"{size} workers commit a step")

    def wait_for_text(self, text: str) -> None:
        self.wait_until(lambda: text in self.output(), f"it has printed {text!r}")
