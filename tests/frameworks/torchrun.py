"""Runs a script of tests/scripts on two workers of torchrun, and returns what each worker has written with ``write_results``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lockstep
from tests.fork_server import ROOT

SCRIPTS = ROOT / "tests" / "scripts"
WORKERS = 2
DEADLINE_S = 180.0
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that are skipped if one of the packages is not installed. It imports none of them."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install -e '.[frameworks]')")


def torchrun(script: Path, folder: Path, *names: str) -> list[dict[str, Any]]:
    """Run the trainings ``names`` of ``script`` in ``folder``. Returns their results by rank; fails if the script fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    done = subprocess.run(
        [*launcher, str(script), *names],
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
    """In a worker: run the trainings that the script's arguments name, in that order, and leave their results for the test.

    torch's process group is ended before the interpreter is. Otherwise a thread of gloo that releases the last tensor of a gather
    while Python ends aborts the process ("terminate called without an active exception"), with torch's own class as well.
    """
    results = {name: trainings[name]() for name in sys.argv[1:]}
    Path(f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(WORKERS)]
