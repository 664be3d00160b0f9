"""The files of the trackers csv and tensorboard: torn and damaged ends, strange names, and other runs."""

from __future__ import annotations

import csv
import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lockstep
from lockstep.observe.tracker_csv import Csv
from lockstep.observe.tracker_tensorboard import TensorBoard
from tests.local_trackers import opened, rows_of, write
from tests.tracked import tensorboard_curves

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
SOURCE = Path(lockstep.__file__).parents[1]


def test_a_name_that_comes_later_becomes_a_column_of_all_lines(tmp_path: Path) -> None:
    tracker = opened(Csv(), tmp_path)
    write(tracker, (1, {"loss": 0.1}), (2, {"a, b": math.nan, "step": 3.0}), (4, {"loss": 1e300}))
    tracker.close()
    assert rows_of(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "0.1", "a, b": "", "logged step": ""},
        {"step": "2", "loss": "", "a, b": "nan", "logged step": "3.0"},
        {"step": "4", "loss": "1e+300", "a, b": "", "logged step": ""},
    ]
    assert opened(Csv(), tmp_path).last_step() == 4


@pytest.mark.parametrize("left", range(1, 9))
def test_a_line_of_csv_that_was_written_in_part_is_cut_off(left: int, tmp_path: Path) -> None:
    write(opened(Csv(), tmp_path), (1, {"loss": 0.5}), (12, {"loss": 0.25}))
    path = tmp_path / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-left])
    tracker = opened(Csv(), tmp_path)
    assert tracker.last_step() == (1 if left <= len("12,0.25\n") else 0)
    write(tracker, (12, {"loss": 0.25}))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("at", ["a line", "the header", "nothing"])
def test_a_csv_file_is_cut_off_where_it_is_zero(at: str, tmp_path: Path) -> None:
    """A machine has lost power: what was not on the disk is zero after that."""
    write(opened(Csv(), tmp_path), (1, {"loss": 0.5, "nul\0": 0.5}), (2, {"loss": 0.25}), (3, {"loss": 0.125}))
    path = tmp_path / "metrics.csv"
    whole = path.read_bytes()
    begin = {"a line": whole.index(b"\n2,") + 3, "the header": 3, "nothing": 0}[at]
    path.write_bytes(b"" if at == "nothing" else whole[:begin] + bytes(20) + b"\n" + whole[-8:])
    tracker = opened(Csv(), tmp_path)
    assert tracker.last_step() == (1 if at == "a line" else 0)
    write(tracker, (4, {"loss": 0.0}))
    assert [row["step"] for row in rows_of(path)] == (["1", "4"] if at == "a line" else ["4"])


def test_a_file_of_another_run_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("mine\n")
    for run_id in ("first", "second", "second"):
        tracker = opened(Csv(path), tmp_path, run_id)
        if not tracker.last_step():
            write(tracker, (1, {run_id: 1.0}))
    assert rows_of(path) == [{"step": "1", "second": "1.0"}]
    assert (tmp_path / "metrics.earlier-1.csv").read_text() == "mine\n"
    assert rows_of(tmp_path / "metrics.earlier-2.csv") == [{"step": "1", "first": "1.0"}]


def test_strange_names_of_columns_survive_that_the_file_is_opened_again(tmp_path: Path) -> None:
    names = ["a\rb", "a\nb", 'a"b', "ü", "\udc80"]
    for step in (1, 2, 3):
        tracker = opened(Csv(), tmp_path)
        write(tracker, (step, dict.fromkeys(names, 1.0)), (step + 10, {f"late{step}": 1.0}))
        tracker.close()
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "a\rb", "a\nb", 'a"b', "ü", "\\udc80", "late1", "late2", "late3"]
    assert [row[:2] for row in rows] == [["1", "1.0"], ["11", ""], ["2", "1.0"], ["12", ""], ["3", "1.0"], ["13", ""]]


def test_a_csv_file_is_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from lockstep.track import Csv\n"
    code += "tracker = Csv(); tracker.open('r', Path(sys.argv[1]))\n"
    code += "tracker.log(int(sys.argv[2]), {'\\u00fc': 1.0}); tracker.flush()"
    for step in ("1", "2"):
        env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(SOURCE)}
        subprocess.run([sys.executable, "-c", code, str(tmp_path), step], check=True, timeout=60, env=env)
    assert (tmp_path / "metrics.csv").read_bytes().decode() == "step,ü\n1,1.0\n2,1.0\n"


@contextmanager
def another_process_that_writes(path: Path) -> Iterator[None]:
    """It has one step of the run "a"."""
    code = "import sys; from pathlib import Path; from lockstep.track import Csv\n"
    code += "tracker = Csv(sys.argv[1]); tracker.open('a', Path())\n"
    code += "tracker.log(1, {'loss': 1.0}); tracker.flush(); print('open', flush=True); sys.stdin.read()"
    env = {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        yield
        other.communicate()


def test_a_path_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with (
        another_process_that_writes(path),
        pytest.raises(OSError, match=r"^another run writes metrics\.csv; give each run a path of its own$"),
    ):
        Csv(path).open("b", tmp_path)
    assert rows_of(path) == [{"step": "1", "loss": "1.0"}]
    opened(Csv(path), tmp_path, "b").close()


def test_a_path_that_an_earlier_worker_of_the_run_has_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.tracker_files._LEAVING_S", 0.1)
    path = tmp_path / "metrics.csv"
    with (
        another_process_that_writes(path),
        pytest.raises(OSError, match=r"^an earlier worker of this run still has metrics\.csv open"),
    ):
        Csv(path).open("a", tmp_path)
    assert opened(Csv(path), tmp_path, "a").last_step() == 1


def test_a_folder_is_not_taken_for_a_csv_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        Csv(tmp_path).open("curves", tmp_path)


@needs_tensorboard
def test_a_folder_that_tensorboard_gets_keeps_all_files_that_are_not_ours(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("train.py", "events.out.tfevents.1.theirs"):
        (project / name).write_text("mine")
    for run_id in ("first", "second", "second"):
        tracker = opened(TensorBoard(project), tmp_path, run_id)
        write(tracker, (tracker.last_step() + 1, {"loss": 1.0}))
        tracker.close()
    assert list(tmp_path.iterdir()) == [project]
    assert {path.name for path in project.iterdir() if path.suffix != ".lockstep"} == {
        "train.py",
        "events.out.tfevents.1.theirs",
        ".lockstep.run",
        "earlier-1",
    }
    assert len(list(project.glob("*.lockstep"))) == 1
    assert len(list((project / "earlier-1").iterdir())) == 1
    assert opened(TensorBoard(project), tmp_path, "second").last_step() == 2


@needs_tensorboard
def test_a_record_of_tensorboard_that_was_written_in_part_is_cut_off(tmp_path: Path) -> None:
    write(opened(TensorBoard(), tmp_path), (1, {"loss": 0.5}), (2, {"loss": 0.25}))
    (path,) = (tmp_path / "tensorboard").glob("events*")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        tracker = opened(TensorBoard(), tmp_path)
        last = tracker.last_step()
        write(tracker, *((step, {"loss": 0.5 / step}) for step in (1, 2) if step > last))
        tracker.close()
        assert opened(TensorBoard(), tmp_path).last_step() == 2
        assert len(path.read_bytes()) == len(whole)


@needs_tensorboard
@pytest.mark.parametrize("damage", ["zeros", "zeros in a record", "a changed byte"])
def test_a_file_of_tensorboard_is_cut_off_at_the_first_damaged_record(damage: str, tmp_path: Path) -> None:
    """A machine has lost power: what was not on the disk is zero after that, or old."""
    tracker = opened(TensorBoard(), tmp_path)
    write(tracker, (1, {"loss": 0.5}), (2, {"loss": 0.25}))
    (path,) = (tmp_path / "tensorboard").glob("events*")
    two = path.read_bytes()
    write(tracker, *((step, {"loss": 1 / step}) for step in range(3, 100)))
    tracker.close()
    whole = path.read_bytes()
    at = {"zeros": len(two), "zeros in a record": len(two) + 20, "a changed byte": len(two) + 30}[damage]
    if damage == "a changed byte":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[:at] + bytes(len(whole) - at))
    again = opened(TensorBoard(), tmp_path)
    assert again.last_step() == 2
    assert path.read_bytes() == two
    write(again, (3, {"loss": 0.125}))
    again.close()
    assert [step for step, _ in tensorboard_curves(tmp_path)] == [1, 2, 3], "TensorBoard's own reader"


@needs_tensorboard
def test_a_damaged_length_in_a_large_file_of_tensorboard_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.tracker_tensorboard._CHECKED_BYTES", 100)
    write(opened(TensorBoard(), tmp_path), *((step, {"loss": 1 / step}) for step in range(1, 100)))
    (path,) = (tmp_path / "tensorboard").glob("events*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 100] = bytes(100)
    path.write_bytes(content)
    assert 40 < opened(TensorBoard(), tmp_path).last_step() < 55


@needs_tensorboard
def test_a_number_that_is_too_large_for_tensorboard_becomes_infinite(tmp_path: Path) -> None:
    tracker = opened(TensorBoard(), tmp_path)
    write(tracker, (1, {"large": 1e300, "nan": math.nan, "inf": -math.inf}))
    assert opened(TensorBoard(), tmp_path).last_step() == 1
