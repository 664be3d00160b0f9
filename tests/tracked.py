"""Runs tests/scripts/tracked.py, and reads what its trackers have written, with the readers of the packages themselves."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "tracked.py"
_PACKAGES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
Curves = list[tuple[int, dict[str, float]]]
"""The points of each step, in the order in which the reader gives them."""


def environment(trackers: str, checkpoints: Path | None = None, **settings: Any) -> dict[str, str]:
    env = {"TRACKED": trackers, "OMP_NUM_THREADS": "1", **_PACKAGES}
    env |= {f"TRACKED_{name.upper()}": str(value) for name, value in settings.items()}
    return env | ({"TRACKED_CHECKPOINT": str(checkpoints)} if checkpoints is not None else {})


def undisturbed(folder: Path, steps: int) -> tuple[Curves, str]:
    """The curves of a lone process, and the fingerprint of its model: what every other run must lead to."""
    folder.mkdir(parents=True)
    (folder / "hurry").touch()
    result = LaunchedRun(SCRIPT, folder=folder, workers=0, env=environment("csv", steps=steps)).result()
    curves = read("csv", folder / "lockstep-tracking")
    assert [step for step, _ in curves] == list(range(1, steps + 1))
    assert set(curves[0][1]) == {"loss", "learning_rate"}
    assert set(curves[-1][1]) == {"loss", "learning_rate", "late"}
    return curves, result


def require_equal(found: Curves, expected: Curves, *, is_float32: bool = False) -> None:
    """Each step once, in order, with the same bits."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (step, mine), (_, theirs) in zip(found, expected, strict=True):
        want = {name: float(np.float32(value)) for name, value in theirs.items()} if is_float32 else theirs
        assert {name: value.hex() for name, value in mine.items()} == {n: v.hex() for n, v in want.items()}, f"step {step}"


def read(tracker: str, folder: Path) -> Curves:
    """Read the curves of the only run below ``folder``."""
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return {"csv": _csv, "tensorboard": tensorboard_curves, "wandb": _wandb, "mlflow": _mlflow}[tracker](run)


def _csv(folder: Path) -> Curves:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row.pop("step")), {name: float(cell) for name, cell in row.items() if cell}) for row in rows]


def tensorboard_curves(folder: Path) -> Curves:
    """With TensorBoard's EventAccumulator, in a process of its own: it logs and warns."""
    code = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps({tag: [[each.step, each.value] for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}))
"""
    return _by_step(_output_of([sys.executable, "-c", code, str(folder / "tensorboard")]))


def _mlflow(folder: Path) -> Curves:
    return mlflow_curves(f"sqlite:///{folder / 'mlflow.db'}")


def mlflow_curves(uri: str) -> Curves:
    code = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
history = lambda name: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, name)]
print(json.dumps({name: history(name) for name in run.data.metrics}))
"""
    return _by_step(_output_of([sys.executable, "-c", code, uri]))


def _wandb(folder: Path) -> Curves:
    """The union of the files of all workers that were rank 0, read by ``wandb leet inspect``."""
    curves: Curves = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
        for line in _run(command).splitlines():
            record = json.loads(line)
            if record.get("type") == "history":
                items: dict[str, Any] = record["history"]["item"]
                step = int(items["_step"])
                curves.append((step, {name: float(value) for name, value in items.items() if not name.startswith("_")}))
    return curves


def _by_step(tags: Mapping[str, list[list[float]]]) -> Curves:
    for name, points in tags.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{name}: each step once and in order, not {steps}"
    every = sorted({int(step) for points in tags.values() for step, _ in points})
    by_name = {name: {int(step): value for step, value in points} for name, points in tags.items()}
    return [(step, {name: points[step] for name, points in by_name.items() if step in points}) for step in every]


def _output_of(command: list[str]) -> Any:
    return json.loads(_run(command).splitlines()[-1])


def _run(command: list[str]) -> str:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **_PACKAGES}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, f"{command[:3]}: {done.stderr[-2000:]}"
    return done.stdout
