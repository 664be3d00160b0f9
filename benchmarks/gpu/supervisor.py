"""Starts the ranks of one configuration, ends them in time, and starts them again without a variant that has failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import shared_gpu

from benchmarks.gpu.worker import Spec, write_spec

ROOT = Path(__file__).parents[2]
ATTEMPTS = 4
LEAST_S = 20.0  # an attempt that has less time is not worth its start
STALL_S = 75.0  # without any progress; a collective times out before
GRACE_S = 20.0  # after the time at which the last case should be complete


@dataclass(frozen=True)
class Configuration:
    """What runs side by side: so many ranks, on what, over what."""

    size: int
    device_type: str
    backend: str
    cases: list[str]
    variants: list[str]
    worker: str = "benchmarks.gpu.worker"
    """The module that is one rank."""

    def why_not(self, gpus: int) -> str | None:
        """Why it cannot run here, or None."""
        return shared_gpu.why_no_nccl(self.size, gpus) if self.backend == "nccl" else None


@dataclass(frozen=True)
class Failure:
    """What a rank did when it failed. ``case`` and ``variant`` may be empty."""

    case: str
    variant: str
    error: str


@dataclass
class Findings:
    """The rows of a configuration, by case; and what was not measured, with the reason."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def measure(config: Configuration, gpus: int, until: float) -> Findings:
    """Measure all cases of a configuration until then, in as many attempts as it takes."""
    found = Findings()
    failed: dict[str, dict[str, str]] = {}
    for _ in range(ATTEMPTS):
        todo = [key for key in config.cases if key not in found.missing and not found.rows.get(key, {}).get("complete")]
        if not todo:
            break
        if until - time.time() < LEAST_S:
            found.missing |= {key: "no time was left" for key in todo if key not in found.rows}
            break
        failure = _attempt(replace(config, cases=todo), gpus, until, failed, found)
        if failure is None:
            continue
        print(f"failed: {failure.case or 'the start'}, {failure.variant or 'no variant'}: {failure.error}", flush=True)
        if not failure.case:
            found.missing |= {key: failure.error for key in todo if key not in found.rows}
            break
        if failure.variant and failure.variant not in failed.get(failure.case, {}):
            failed.setdefault(failure.case, {})[failure.variant] = failure.error
        else:
            found.missing[failure.case] = failure.error
    for case, reasons in failed.items():  # a row whose case was not measured again
        for variant, error in reasons.items():
            if case in found.rows and "ms" not in found.rows[case]["variants"].get(variant, {}):
                found.rows[case]["variants"][variant] = {"error": error}
    return found


def _attempt(config: Configuration, gpus: int, until: float, failed: dict[str, dict[str, str]], found: Findings) -> Failure | None:
    """Run the ranks once, and read what they wrote. Returns how they failed, or None."""
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder, ExitStack() as stack:
        spec = Spec(folder, config.size, config.device_type, config.backend, config.cases, until, config.variants, failed)
        path = write_spec(spec)
        command, env = [sys.executable, "-m", config.worker, path], _environment(config, gpus)
        ranks = [stack.enter_context(_started([*command, str(rank)], rank, folder, env)) for rank in range(config.size)]
        late = _wait(ranks, Path(folder), until)
        for number, key in enumerate(config.cases):
            path_of_row = Path(folder, f"row-{number}.json")
            row = json.loads(path_of_row.read_text()) if path_of_row.exists() else None
            if row is not None and (row["complete"] or _figures(row) >= _figures(found.rows.get(key))):
                found.rows[key] = row
        if not late and all(rank.returncode == 0 for rank in ranks):
            if any("error" in each for row in found.rows.values() for each in row["variants"].values()):
                _print_logs(Path(folder), config.size)
            return None
        _print_logs(Path(folder), config.size)
        return _failure(Path(folder), ranks, late)


def _figures(row: dict[str, Any] | None) -> int:
    """How many variants have been measured."""
    return 0 if row is None else sum("ms" in found for found in row["variants"].values())


def _environment(config: Configuration, gpus: int) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name == shared_gpu.VARIABLE or not name.startswith("LOCKSTEP_")}
    ours = {name: value for name, value in ours.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if config.backend == "nccl" and config.size > gpus:
        ours |= shared_gpu.environment()
    return ours


@contextmanager
def _started(command: list[str], rank: int, folder: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """One rank. Rank 0 prints to the terminal; what else is printed is in output-RANK.txt."""
    with Path(folder, f"output-{rank}.txt").open("wb") as log:
        shown = None if rank == 0 else log
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=shown, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, until: float) -> str:
    """Wait until all have ended, one has failed, or they are late. Returns why they are late, or an empty string."""
    progress, moved_at = "", time.time()
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes):
            return ""
        if any(code not in (None, 0) for code in codes):
            time.sleep(1.0)  # the others may be about to say why
            return ""
        now = time.time()
        seen = "".join(path.read_text() for path in sorted(folder.glob("progress-*.json")))
        if seen != progress:
            progress, moved_at = seen, now
        if now - moved_at > STALL_S:
            return f"nothing happened for {STALL_S:.0f} s"
        if now > until + GRACE_S:
            return "the time was over"
        time.sleep(0.2)


def _print_logs(folder: Path, size: int) -> None:
    for rank in range(size):
        tail = (folder / f"output-{rank}.txt").read_text(errors="replace")[-3000:]
        if tail.strip():
            print(f"-- the end of what rank {rank} wrote to its log:\n{tail}", flush=True)


def _failure(folder: Path, ranks: list[subprocess.Popen[bytes]], late: str) -> Failure:
    """What is to blame: a rank that was killed, or else the rank that raised first, or else what all were doing."""
    codes = [rank.returncode or 0 for rank in ranks]
    # NCCL aborts a process if another rank has failed, so that is no cause.
    killed = [number for number, code in enumerate(codes) if code < 0 and code != -signal.SIGABRT]
    errors = sorted((json.loads(path.read_text()) for path in folder.glob("error-*.json")), key=lambda error: error["at"])
    if errors and not killed:
        return Failure(errors[0].get("case", ""), errors[0].get("variant", ""), errors[0]["error"])
    dead = next(iter(killed), next((number for number, code in enumerate(codes) if code), 0))
    progress = folder / f"progress-{dead}.json"
    where = json.loads(progress.read_text()) if progress.exists() else {"case": "", "variant": "", "doing": "starting"}
    how = late or f"rank {dead} ended with exit code {codes[dead]}"
    return Failure(where["case"], where["variant"], f"{how}, {where['doing']}")
