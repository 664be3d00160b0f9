"""Runs a script of tests/scripts on two workers of torchrun, and returns what each worker has written with ``write_result``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fork_server import ROOT

WORKERS = 2
DEADLINE_S = 180.0


def torchrun(script: str, folder: Path, *args: str) -> list[dict[str, Any]]:
    """Run ``script`` in ``folder``. Returns the results by rank; fails with what was printed if the script fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    done = subprocess.run(
        [*launcher, str(ROOT / "tests" / "scripts" / script), *args],
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
    return results(folder)


def environment() -> dict[str, str]:
    """On the CPU, with this checkout's sources; the frameworks may not look for models on the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def write_result(**values: Any) -> None:
    """In a worker: leave the values for the test."""
    Path(f"result-{os.environ['RANK']}.json").write_text(json.dumps(values))


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(WORKERS)]
