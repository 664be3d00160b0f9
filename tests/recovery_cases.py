"""Faults at known places of a run over NCCL, each of which must end with the bits of an undisturbed run. No pytest here.

tests/gpu/test_recovery.py plays them on a GPU, tests/process/test_recovery_cases.py over gloo.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.chaos_gpu import SCRIPT, environment, undisturbed
from tests.launch import LaunchedRun

CASES = ("forward", "fold", "barrier", "connecting", "assert")
"""Values of CHAOS_FAULT in tests/scripts/chaos_gpu.py that a run survives."""
HANG_TIMEOUT_S, LIMIT_S = 20.0, 45.0


def launch(folder: Path, fault: str, workers: int, *, cpu: bool) -> LaunchedRun:
    folder.mkdir(parents=True)
    (folder / "hurry").touch()
    env = {"CHAOS_FAULT": fault, "CHAOS_AWAIT_NCCL": "1"}
    return LaunchedRun(
        SCRIPT,
        *("--hang-timeout", str(HANG_TIMEOUT_S)),
        folder=folder,
        workers=workers,
        env=env | environment(folder, cpu=cpu, comm="gloo" if cpu else "nccl"),
    )


def require_survival(folder: Path, fault: str, workers: int, want: str, *, cpu: bool) -> None:
    """Play a case. Raises AssertionError unless the others survive, without a timeout, to the result ``want``."""
    run, began = launch(folder, fault, workers, cpu=cpu), time.monotonic()
    try:
        found = run.result(LIMIT_S)
        took_s = time.monotonic() - began
        assert found == want, f"{found} instead of {want}\n{run.dump()}"
        assert any(1 not in members for members in run.generations()), f"worker 1 was not lost\n{run.dump()}"
        hung = [entry["why"] for entry in run.events() if "hung" in entry.get("why", "")]
        assert not hung, f"the others waited for a timeout: {took_s:.1f} s, {hung}\n{run.dump()}"
    finally:
        run.stop()


def require_end(folder: Path, *, cpu: bool) -> None:
    """A kernel of the script that does something illegal on every worker ends the run with that error."""
    run = launch(folder, "assert everywhere", 2, cpu=cpu)
    try:
        code, text = run.wait(LIMIT_S), run.output()
        error = "out of" if cpu else "device-side assert"
        assert code == 1, f"exit code {code}\n{run.dump()}"
        assert error in text, run.dump()
        assert "the script raised" in text, run.dump()
    finally:
        run.stop()


def result_of_one(folder: Path, *, cpu: bool) -> str:
    return undisturbed(folder, cpu=cpu).result
