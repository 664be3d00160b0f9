"""Launches tests/scripts/train.py, which trains a small CNN for 60 steps, and says what its result must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.observe.ledger import audit, read
from tests.fork_server import ROOT
from tests.lane_jobs import SAMPLES
from tests.launch import DEADLINE_S, LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "train.py"
STEPS, EPOCHS = 60, 12  # of the script
HANG_TIMEOUT_S = 1.0


class TrainingRun(LaunchedRun):
    """One run of the script.

    Args:
        workers: the number of workers. 0: the script alone.
        options: options of `lockstep run`. ``--hang-timeout`` is HANG_TIMEOUT_S unless the options set it.
        own_imports: whether the run is a new interpreter that imports torch itself.
        env: variables added to the environment.
        settings: what the script reads from its environment, see there: ``hold_at=30`` is TRAIN_HOLD_AT=30.
    """

    def __init__(self, folder: Path, workers: int, *options: str, own_imports: bool = False, **settings: Any) -> None:
        env = settings.pop("env", {})
        env |= {"OMP_NUM_THREADS": "1", **{f"TRAIN_{name.upper()}": str(value) for name, value in settings.items()}}
        given = ("--hang-timeout", str(HANG_TIMEOUT_S), *options)
        super().__init__(SCRIPT, *given, folder=folder, workers=workers, env=env, own_imports=own_imports)

    def step(self) -> int:
        """The last step that rank 0 has committed."""
        note = self.folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} is committed")

    def hurry(self) -> None:
        """The test has acted: the run need not be slow any more."""
        (self.folder / "hurry").touch()

    def require_undisturbed(self, expected: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for the end. The result must be ``expected``, and the ledger (`--ledger`) must hold every sample exactly once."""
        assert self.result(deadline_s) == expected, self.dump()
        lines = read(self.run_dir / "ledger")
        assert {line["step"] for line in lines if line["kind"] == "commit"} == set(range(STEPS)), self.dump()
        assert audit(lines, SAMPLES, EPOCHS) == [], self.dump()


def undisturbed_result(folder: Path) -> str:
    """The digest of the state after a run of one process to which nothing happens."""
    return TrainingRun(folder, 0).result()
