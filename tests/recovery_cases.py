"""Faults at known places of a run over NCCL, each of which must end with the bits of an undisturbed run. No pytest here.

tests/gpu/test_recovery.py plays them on a GPU, tests/process/test_recovery_cases.py over gloo.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.chaos import read_lines
from tests.chaos_gpu import SCRIPT, environment, undisturbed
from tests.fork_server import ROOT
from tests.launch import LaunchedRun

CASES = ("forward", "fold", "barrier", "connecting", "assert")
"""Values of CHAOS_FAULT in tests/scripts/chaos_gpu.py that a run survives."""
HANG_TIMEOUT_S, LIMIT_S = 20.0, 45.0
MEMORY_SCRIPT = ROOT / "tests" / "scripts" / "gpu_memory.py"
SETTLED_STEPS, SAMPLES = 20, 10


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


def memory_after_recoveries(folder: Path, workers: int, kills: int, *, cpu: bool) -> list[int]:
    """Kill the newest worker again and again. Returns how many bytes of the GPU are used after each recovery.

    Several workers share the GPU, so all of them are counted: each time when as many run as in the beginning, and the replacement
    has done ``SETTLED_STEPS`` steps. The least of some samples is taken, for which no worker is in the middle of a step.
    """
    folder.mkdir(parents=True)
    env = environment(folder, cpu=cpu, comm="gloo" if cpu else "nccl")
    run = LaunchedRun(MEMORY_SCRIPT, *("--hang-timeout", str(HANG_TIMEOUT_S)), folder=folder, workers=workers, env=env)
    samples: dict[int, list[int]] = {}  # by generation, of those that have all workers

    def is_settled(after: int) -> bool:
        samples.clear()
        for generation, size, used in read_lines(folder / "memory-0.jsonl"):
            if size == workers and generation > after:
                samples.setdefault(generation, []).append(used)
        return any(len(found) >= SETTLED_STEPS + SAMPLES for found in samples.values())

    generation, found = -1, []
    try:
        for number in range(kills + 1):
            run.wait_until(lambda after=generation: is_settled(after), f"{workers} workers train after {number} kills", LIMIT_S)  # type: ignore[misc]
            generation = max(samples)
            found.append(min(samples[generation][-SAMPLES:]))
            if number < kills:
                run.kill(max(run.workers()))
    finally:
        run.stop()
    return found[1:]  # the first worker set has started in another way


def result_of_one(folder: Path, *, cpu: bool) -> str:
    return undisturbed(folder, cpu=cpu).result
