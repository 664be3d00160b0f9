"""Runs a script of tests/scripts on two workers of torchrun, and returns what each worker has written with ``write_results``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lockstep
from tests.fork_server import ROOT

SCRIPTS = ROOT / "tests" / "scripts"
WORKERS = 2
DEADLINE_S = 180.0
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def torchrun(script: Path, folder: Path) -> list[dict[str, Any]]:
    """Run ``script`` in ``folder``. Returns the results by rank; fails with what was printed if the script fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    done = subprocess.run(
        [*launcher, str(script)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return read_results(folder)


def environment() -> dict[str, str]:
    """With this checkout's sources. SETTINGS: on the CPU, and transformers may not look for models on the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | SETTINGS


def patched(training: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the training with our class under torch's name."""

    def train() -> Any:
        with lockstep.patch():
            return training()

    return train


def write_results(**trainings: Callable[[], Any]) -> None:
    """In a worker: run all trainings, or those that the script's arguments name, and leave their results for the test."""
    results = {name: training() for name, training in trainings.items() if name in (sys.argv[1:] or trainings)}
    Path(f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(WORKERS)]
