"""What one process can show of trackers: their files, torn ends, mistakes of users, and trackers that fail."""

from __future__ import annotations

import csv
import errno
import importlib.util
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import UsageError
from lockstep.observe.named_trackers import make_trackers, tracking_folder
from lockstep.observe.tracker_backlog import TrackerBacklog
from lockstep.observe.tracker_csv import Csv
from lockstep.observe.tracker_mlflow import Mlflow
from lockstep.observe.tracker_tensorboard import TensorBoard
from lockstep.observe.tracker_wandb import Wandb
from lockstep.observe.trackers import Trackers
from lockstep.observe.wandb_file import _records
from tests.tracked import tensorboard_curves

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")


SOURCE = Path(lockstep.__file__).parents[1]


class Notes:
    """A tracker that remembers what it got, and fails when it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.closed = fails_at, 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise RuntimeError("the disk is full")
        self.got.append((step, values))

    def close(self) -> None:
        self.closed += 1


class Background(Notes):
    """A tracker that holds less than it got."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def last_step(self) -> int:
        return self.written

    def held(self) -> int:
        return self.written


def made(
    *trackers: Any, backlog: TrackerBacklog | None = None, folder: Path = Path("nowhere"), made_steps: int = 3
) -> tuple[Trackers, list[str]]:
    notices: list[str] = []
    if backlog is None:
        backlog = filled(3)
    return Trackers(trackers, backlog, folder, notices.append, lambda what, limit_s: nullcontext(), lambda: made_steps), notices


def filled(steps: int) -> TrackerBacklog:
    backlog = TrackerBacklog(is_kept=True)
    backlog.run_id = "curves"
    for step in range(1, steps + 1):
        backlog.add(step, {"loss": 1 / step})
    return backlog


# -- the backlog ---------------------------------------------------------------------------------------


def test_the_backlog_keeps_what_a_tracker_in_the_background_does_not_hold_yet() -> None:
    tracker, backlog = Background(), filled(3)
    trackers, _ = made(tracker, Notes(), backlog=backlog)
    trackers.hand_over()
    assert [step for step, _ in tracker.got] == [1, 2, 3]
    tracker.written = 2
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == [3]
    successor = Background()
    successor.written = 2
    made(successor, backlog=backlog)[0].hand_over()
    assert [step for step, _ in successor.got] == [3]


def test_a_worker_that_is_not_rank_0_confirms_nothing() -> None:
    trackers, _ = made(Notes())
    trackers.enter_generation(is_main=False)
    assert trackers.report() is None


def test_the_backlog_travels_with_the_state_bit_for_bit() -> None:
    backlog = filled(0)
    backlog.add(7, {"loss": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf})
    received = TrackerBacklog(is_kept=True)
    received.restore(backlog.capture())
    assert received.run_id == "curves"
    assert repr(received.steps) == repr(backlog.steps)


def test_a_state_of_a_run_without_trackers_can_be_adopted() -> None:
    backlog = TrackerBacklog(is_kept=True)
    backlog.restore(None)
    assert backlog.steps == []


def test_a_tracker_that_holds_more_than_the_run_has_made_is_named() -> None:
    tracker = Background()
    tracker.written = 7
    trackers, notices = made(tracker)
    trackers.hand_over()
    assert notices == [
        "the tracker Background holds the steps up to 7 already, and the run goes on after step 3: the steps in between keep their "
        "earlier values there."
    ]


# -- trackers that fail --------------------------------------------------------------------------------


def test_a_tracker_that_raises_is_named_once_and_the_others_go_on() -> None:
    failing, good = Notes(fails_at=2), Notes()
    trackers, notices = made(failing, good)
    trackers.hand_over()
    trackers.hand_over()
    assert [step for step, _ in failing.got] == [1]
    assert [step for step, _ in good.got] == [1, 2, 3]
    trackers.settle()
    trackers.close()
    assert notices == [
        "the tracker Notes has failed after step 1 (RuntimeError: the disk is full). Training continues. The tracker is tried "
        "again after 30 s, and gets the steps that it lacks then.",
        "the tracker Notes has not worked again. It lacks the steps after step 1.",
    ]


def test_a_tracker_that_works_again_gets_the_steps_that_it_lacks(clock: Clock) -> None:
    failing, good, backlog = Notes(fails_at=2), Notes(), filled(3)
    trackers, notices = made(failing, good, backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == [1, 2, 3]
    failing.fails_at = -1
    backlog.add(4, {"loss": 0.0})
    clock.now += 30.0
    trackers.hand_over()
    assert [step for step, _ in failing.got] == [step for step, _ in good.got] == [1, 2, 3, 4]
    assert notices[1:] == ["the tracker Notes works again, and has got the steps up to 4."]
    backlog.confirm(trackers.report())
    assert not backlog.steps


class Unreachable:
    """A tracker whose server does not answer: each try takes ``takes_s`` of the clock."""

    def __init__(self, clock: Clock, takes_s: float) -> None:
        self.clock, self.takes_s, self.tries, self.closed = clock, takes_s, 0, 0

    def open(self, run_id: str, folder: Path) -> None:
        self.clock.now += self.takes_s
        self.tries += 1
        raise TimeoutError("the server does not answer")

    def log(self, step: int, values: dict[str, float]) -> None:
        raise AssertionError("it is not open")

    def close(self) -> None:
        self.closed += 1


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lockstep.observe.trackers.time", clock)
    monkeypatch.setattr("lockstep.observe.tracker_backlog.time", clock)
    return clock


@pytest.mark.parametrize("takes_s", [0.01, 1.0, 30.0, 200.0])
def test_the_tries_of_a_tracker_that_fails_take_5_percent_of_the_time_at_most(takes_s: float, clock: Clock) -> None:
    tracker = Unreachable(clock, takes_s)
    trackers, _ = made(tracker)
    trackers.hand_over()
    began, tries = clock.now, tracker.tries
    while tracker.tries < 6:
        clock.now += 1.0
        trackers.hand_over()
        trackers.settle()  # a loop ends
        trackers.enter_generation(is_main=True)  # another worker has left or joined
    assert (tracker.tries - tries) * takes_s <= 0.05 * (clock.now - began)


def test_a_tracker_that_fails_is_tried_once_more_when_the_script_ends(clock: Clock) -> None:
    tracker = Unreachable(clock, 30.0)
    trackers, _ = made(tracker)
    trackers.hand_over()
    trackers.settle(is_last=True)
    assert tracker.tries == 2


def test_the_next_rank_0_does_not_try_a_tracker_again_before_the_pause_is_over(clock: Clock) -> None:
    backlog, failing = filled(3), Unreachable(clock, 30.0)
    trackers, _ = made(failing, backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    good, successor = Notes(), Unreachable(clock, 30.0)
    after, notices = made(successor, good, backlog=backlog)
    clock.now += 590.0
    after.hand_over()
    assert (successor.tries, len(good.got)) == (0, 3)
    clock.now += 10.0
    after.hand_over()
    assert successor.tries == 1
    assert notices == [], "the rank 0 before has said that it fails"


def test_a_tracker_that_was_opened_in_part_is_closed(clock: Clock) -> None:
    tracker = Unreachable(clock, 0.0)
    trackers, _ = made(tracker)
    trackers.hand_over()
    trackers.enter_generation(is_main=False)
    trackers.close()
    assert tracker.closed == 1


def test_a_file_is_opened_again_and_its_torn_end_is_cut_off(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = filled(3)
    trackers, _ = made(Csv(), backlog=backlog, folder=tmp_path)
    write_really, room = os.write, [10]

    def write_until_full(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write_really(file, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_until_full)
        trackers.hand_over()
    path = tmp_path / "curves" / "metrics.csv"
    assert not path.read_bytes().endswith(b"\n")
    clock.now += 30.0
    trackers.hand_over()
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3"]


def test_the_steps_that_are_kept_for_a_tracker_that_fails_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.tracker_backlog._MAX_VALUES", 20)
    backlog = filled(100)
    trackers, _ = made(Notes(fails_at=1), backlog=backlog)
    trackers.hand_over()
    backlog.confirm(trackers.report())
    assert [step for step, _ in backlog.steps] == list(range(91, 101))


def test_a_call_that_takes_long_is_announced_and_a_short_one_is_not() -> None:
    announced, lasts = threading.Event(), []

    @contextmanager
    def announce(what: str, limit_s: float) -> Iterator[None]:
        lasts.append(what)
        if what.startswith("writing"):
            announced.set()
        yield
        lasts.append(f"not {what}")

    class Slow(Notes):
        def log(self, step: int, values: dict[str, float]) -> None:
            assert step > 1 or announced.wait(30)
            super().log(step, values)

    slow, backlog = Slow(), filled(1)
    trackers = Trackers([slow], backlog, Path("nowhere"), print, announce, lambda: 3)
    trackers.hand_over()
    backlog.add(2, {"loss": 0.0})
    trackers.hand_over()
    assert len(slow.got) == 2
    opening, writing = "opening the tracker Slow", "writing to the tracker Slow"
    assert lasts == [opening, f"not {opening}", writing, f"not {writing}"]


def test_training_continues_if_a_tracker_fails(capfd: pytest.CaptureFixture[str]) -> None:
    failing, good = Notes(fails_at=3), Notes()
    train(track=[failing, good])
    assert [step for step, _ in good.got] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in failing.got] == [1, 2]
    errors = capfd.readouterr().err
    assert errors.count("has failed") == 1
    assert errors.count("It lacks the steps after step 2.") == 1
    assert good.closed == 1


def test_a_tracker_cannot_change_what_another_one_gets() -> None:
    class Changes(Notes):
        def log(self, step: int, values: dict[str, float]) -> None:
            values.clear()

    good = Notes()
    made(Changes(), good)[0].hand_over()
    assert good.got[0] == (1, {"loss": 1.0})


# -- files ---------------------------------------------------------------------------------------------


def train(steps: int = 6, **settings: Any) -> None:
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Run(model, opt, lanes=2, log_every=2, **settings) as run:
        for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(4 * steps, 4)), global_batch=4):
            loss = model(x).square().mean()
            run.log(loss=loss)
            loss.backward()
            opt.step()
            opt.zero_grad()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def opened(tracker: Any, folder: Path, run_id: str = "curves") -> Any:
    tracker.open(run_id, folder)
    return tracker


def write(tracker: Any, *steps: tuple[int, dict[str, float]]) -> None:
    for step, values in steps:
        tracker.log(step, values)
    tracker.flush()


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


def test_a_record_of_wandb_that_is_not_whole_is_left_for_later() -> None:
    assert list(_records(b"\0" * 7, 7)) == []
    assert list(_records(b":W&B\0\0\0\1\2\3\4\xff\0\1data", 7)) == []


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


# -- mistakes ------------------------------------------------------------------------------------------


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
