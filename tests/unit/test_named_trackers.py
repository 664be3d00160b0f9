"""What Run(track=...) accepts, where the curves are, and mistakes of users."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import UsageError
from lockstep.observe.named_trackers import make_trackers, tracking_folder
from lockstep.observe.tracker_csv import Csv
from lockstep.observe.tracker_mlflow import Mlflow
from lockstep.observe.tracker_tensorboard import TensorBoard
from lockstep.observe.tracker_wandb import Wandb
from tests.local_trackers import Notes, rows_of, train


def test_a_run_without_a_launcher_writes_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(track=["csv"])
    (path,) = tmp_path.glob("lockstep-tracking/*/metrics.csv")
    assert [int(row["step"]) for row in rows_of(path)] == [1, 2, 3, 4, 5, 6]


def test_where_curves_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking_folder("ckpt", "/runs/1") == tmp_path / "ckpt" / "tracking"
    assert tracking_folder("file:///ckpt", "/runs/1") == Path("/ckpt/tracking")
    assert tracking_folder(None, "/runs/1") == Path("/runs/1/tracking")
    assert tracking_folder("s3://bucket/run", "/runs/1") == tmp_path / "lockstep-tracking"
    assert tracking_folder(None, None) == tmp_path / "lockstep-tracking"


def test_a_branch_from_a_checkpoint_of_another_folder_has_curves_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    train(12, track=[Csv(path)], checkpoint=tmp_path / "base", every="4 steps", keep=9)
    (middle,) = (tmp_path / "base").glob("step-000000004-*")
    train(12, track=[Csv(path)], checkpoint=tmp_path / "branch", resume=middle)
    assert [int(row["step"]) for row in rows_of(tmp_path / "metrics.earlier-1.csv")] == list(range(1, 13))
    assert [int(row["step"]) for row in rows_of(path)] == list(range(5, 13))
    train(12, track=[Csv(path)], checkpoint=tmp_path / "base", resume=middle)
    assert len(list(tmp_path.glob("*.csv"))) == 3, "the base begins its curves anew: the branch has taken the path"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["tensorbord"],
            r"track=\['tensorbord'\]: no tracker has this name\. Choose from \"csv\", \"tensorboard\", ",
        ),
        ("csv", r"track='csv' is not a list\. Pass a list .* track=\[\"csv\"\]"),
        ([print], r"track= has <built-in function print>\. A tracker has a method log"),
        ([Csv], r"track= has the class Csv: pass an object, Csv\(\.\.\.\)"),
    ],
)
def test_mistakes_are_found_before_training(given: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        lockstep.Run(torch.nn.Linear(1, 1), lanes=1, track=given)


SAME = Notes()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["csv", "csv"], r'track\[0\] and track\[1\], both Csv, write .* another path: lockstep\.track\.Csv\("other\.csv"\)\.$'),
        (["csv", "tensorboard", Csv()], r"track\[0\] and track\[2\], both Csv,"),
        ([Csv("a.csv"), Csv("./a.csv")], "both Csv,"),
        (
            [TensorBoard("runs"), TensorBoard("runs/")],
            r'both TensorBoard, .* another folder: lockstep\.track\.TensorBoard\("other"\)',
        ),
        (["wandb", Wandb(project="b")], r'both Wandb, .* another id: lockstep\.track\.Wandb\(id="other"\)'),
        (["mlflow", Mlflow()], r'both Mlflow, .* another experiment: lockstep\.track\.Mlflow\(experiment="other"\)'),
        ([Mlflow(uri="http://a"), Mlflow(uri="http://a/")], "both Mlflow,"),
        ([SAME, SAME], r"both Notes, write .*\. Pass the object once\."),
    ],
)
def test_two_trackers_that_write_to_the_same_place_are_named_before_training(given: list[Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        lockstep.Run(torch.nn.Linear(1, 1), lanes=1, track=given)


def test_trackers_of_one_kind_may_write_to_different_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(track=["csv", Csv("a.csv"), Csv("b.csv"), Notes(), Notes()])
    assert rows_of(tmp_path / "a.csv") == rows_of(tmp_path / "b.csv")
    kinds = [Mlflow(), Mlflow("other"), Mlflow(uri="http://a"), Wandb(), Wandb(id="other"), TensorBoard(), TensorBoard("runs")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert make_trackers(kinds) == kinds


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(UsageError, match=r"the tracker wandb needs the package wandb, .* pip install 'lockstep-ddp\[wandb\]'"):
        make_trackers(["csv", "wandb"])


def test_naming_all_trackers_loads_none_of_their_packages() -> None:
    code = "import sys; from lockstep.track import *; Csv(), TensorBoard(), Wandb(), Mlflow()\n"
    code += "assert not {'torch', 'tensorboard', 'wandb', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
