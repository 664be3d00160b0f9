"""Trackers get each step exactly once, with the bits of an undisturbed run: through deaths of rank 0, resumes, changes of size."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun, is_running
from tests.tracked import SCRIPT, Curves, environment, mlflow_curves, read, require_equal, undisturbed

Start = Callable[..., LaunchedRun]
PACKAGES = {"csv": (), "tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
STEPS = 60
MANY_STEPS = 1500
LEFT_EARLY = ROOT / "tests" / "scripts" / "left_early.py"
PLACES = ("anywhere", "before", "half", "after")


def needs(*trackers: str) -> pytest.MarkDecorator:
    missing = [package for name in trackers for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Curves, str]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", STEPS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LaunchedRun] = []

    def start_here(trackers: str, workers: int = 3, **settings: Any) -> LaunchedRun:
        settings = {"steps": STEPS, **settings}
        checkpoints = tmp_path / "checkpoints" if settings.pop("checkpoints", False) else None
        env = environment(trackers, checkpoints, **settings)
        options = ("--hang-timeout", "20", "--max-respawns", "100")
        started.append(LaunchedRun(SCRIPT, *options, folder=tmp_path / "run", workers=workers, env=env))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


def step_of(run: LaunchedRun) -> int:
    note = run.folder / "step"
    return int(note.read_text()) if note.exists() else 0


def members(run: LaunchedRun) -> list[int]:
    return run.generations()[-1] if run.generations() else []


def wait_for_step(run: LaunchedRun, step: int) -> None:
    run.wait_until(lambda: step_of(run) >= step, f"step {step}")


def kill_main(run: LaunchedRun, place: str, random: Random) -> None:
    """Kill rank 0: at any moment, or around a tracker's write. There are others that go on."""
    run.wait_until(lambda: len(run.workers()) >= 2 and len(members(run)) >= 2, "others can go on")
    wait_for_step(run, step_of(run) + 2)
    main = run.folder / "main"
    pid = int(run.notes("pid")[main.read_text().strip()])
    if place == "anywhere":
        time.sleep(random.uniform(0.0, 0.2))  # not to wait for something: any moment is as good
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    else:
        (run.folder / f"die-{place}").touch()
    run.wait_until(lambda: not is_running(pid), f"rank 0 has died ({place})")


def finish(run: LaunchedRun) -> str:
    (run.folder / "hurry").touch()
    return run.result()


def kill_everything(run: LaunchedRun) -> None:
    """Agent, zygote and workers, as if the machine had lost its power."""
    workers = run.workers()
    for pid in [run.process.pid, *workers.values()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait(10)
    run.wait_until(lambda: not any(map(is_running, workers.values())), "all have died", may_end=True)
    for path in [*run.folder.glob("pid-*"), run.folder / "main", run.folder / "step"]:
        path.unlink(missing_ok=True)


def require_curves(trackers: str, folder: Path, curves: Curves) -> None:
    for name in trackers.split(","):
        require_equal(read(name, folder), curves, is_float32=name == "tensorboard")


# -- deaths of rank 0 ----------------------------------------------------------------------------------


@needs("tensorboard")
@pytest.mark.parametrize("place", PLACES[1:])
def test_a_step_arrives_once_if_rank_0_dies_around_the_write(place: str, expected: tuple[Curves, str], start: Start) -> None:
    for tracker in ("csv", "tensorboard"):
        run = start(tracker)
        kill_main(run, place, Random(place))
        assert finish(run) == expected[1]
        require_curves(tracker, run.run_dir / "tracking", expected[0])
        for path in run.folder.iterdir():
            if path.is_file():
                path.unlink()


def play_20_kills(trackers: str, run: LaunchedRun) -> None:
    random = Random(trackers)
    places = list(PLACES) * 5
    random.shuffle(places)
    for place in places:
        if place == "half" and "csv" not in trackers and "tensorboard" not in trackers:
            place = "after"
        kill_main(run, place, random)
    assert len(run.generations()) > 20


@needs("tensorboard")
@pytest.mark.slow
def test_after_20_deaths_of_rank_0_the_curves_are_those_of_an_undisturbed_run(start: Start, tmp_path: Path) -> None:
    curves, result = undisturbed(tmp_path / "undisturbed", MANY_STEPS)
    run = start("csv,tensorboard", steps=MANY_STEPS)
    play_20_kills("csv,tensorboard", run)
    assert finish(run) == result
    require_curves("csv,tensorboard", run.run_dir / "tracking", curves)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", [pytest.param("wandb", marks=needs("wandb")), pytest.param("mlflow", marks=needs("mlflow"))])
def test_after_20_deaths_of_rank_0_so_are_those_of_a_service(tracker: str, start: Start, tmp_path: Path) -> None:
    """About 70 s each: every rank 0 loads the package anew."""
    curves, result = undisturbed(tmp_path / "undisturbed", MANY_STEPS)
    run = start(tracker, steps=MANY_STEPS)
    play_20_kills(tracker, run)
    assert finish(run) == result
    require_curves(tracker, run.run_dir / "tracking", curves)


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_s_file_store_has_the_curves_of_an_undisturbed_run(expected: tuple[Curves, str], start: Start) -> None:
    """Rank 0 is killed before and after it writes. A step is not one write there, so one that it has begun would be incomplete."""
    run = start("mlflow-files")
    for place in ("before", "after"):
        kill_main(run, place, Random(place))
    assert finish(run) == expected[1]
    require_equal(mlflow_curves((run.folder / "mlruns").as_uri()), expected[0])


def test_a_death_in_the_last_write_of_a_loop_loses_nothing(expected: tuple[Curves, str], start: Start) -> None:
    run = start("csv", stop_at=STEPS, verify_every=0)  # the last step is committed, not published, and nothing is compared later
    wait_for_step(run, STEPS)
    pid = int(run.notes("pid")[(run.folder / "main").read_text().strip()])
    (run.folder / "die-before").touch()
    (run.folder / "hurry").touch()
    run.wait_until(lambda: not is_running(pid), "rank 0 has died", may_end=True)
    assert run.result() == expected[1]
    require_curves("csv", run.run_dir / "tracking", expected[0])


@pytest.mark.parametrize("place", ["before", "after"])
def test_no_worker_leaves_the_loop_before_a_tracker_in_the_background_holds_everything(
    place: str, expected: tuple[Curves, str], start: Start
) -> None:
    run = start("late", stop_at=30, verify_every=0)
    wait_for_step(run, 30)
    pid = int(run.notes("pid")[(run.folder / "main").read_text().strip()])
    (run.folder / f"die-{place}").touch()
    (run.folder / "hurry").touch()
    run.wait_until(lambda: not is_running(pid), "rank 0 has died", may_end=True)
    assert run.result() == expected[1]
    lines = [json.loads(line) for line in (run.folder / "late.jsonl").read_text().splitlines()]
    assert lines == [[step, {name: value.hex() for name, value in values.items()}] for step, values in expected[0]]


# -- resumes -------------------------------------------------------------------------------------------


@needs("tensorboard", "wandb", "mlflow")
@pytest.mark.slow
def test_a_run_that_is_killed_as_a_whole_and_resumed_continues_all_curves(
    expected: tuple[Curves, str], start: Start, tmp_path: Path
) -> None:
    trackers = "csv,tensorboard,wandb,mlflow"
    for step in (18, 37):
        run = start(trackers, checkpoints=True)
        wait_for_step(run, step)
        kill_everything(run)
    run = start(trackers, workers=2, checkpoints=True)
    assert finish(run) == expected[1]
    require_curves(trackers, tmp_path / "checkpoints" / "tracking", expected[0])


@needs("tensorboard")
def test_a_run_that_is_resumed_from_an_older_checkpoint_adds_no_step_twice(
    expected: tuple[Curves, str], start: Start, tmp_path: Path
) -> None:
    first = start("csv,tensorboard", checkpoints=True, stop_at=57)
    wait_for_step(first, 57)
    kill_everything(first)
    older = [path for path in (tmp_path / "checkpoints").glob("step-*") if "20-" in path.name]
    (checkpoint,) = older
    second = start("csv,tensorboard", checkpoints=True, resume=checkpoint)
    assert finish(second) == expected[1]
    assert "resumed at step 20" in second.output()
    require_curves("csv,tensorboard", tmp_path / "checkpoints" / "tracking", expected[0])


def test_a_run_that_begins_anew_has_curves_of_its_own(expected: tuple[Curves, str], start: Start, tmp_path: Path) -> None:
    first = start("csv", checkpoints=True)
    assert finish(first) == expected[1]
    for path in first.folder.glob("done-*"):
        path.unlink()
    second = start("csv", checkpoints=True, resume="never")
    assert finish(second) == expected[1]
    folders = [path for path in (tmp_path / "checkpoints" / "tracking").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert len({(folder / "metrics.csv").read_text() for folder in folders}) == 1


def test_a_resumed_run_says_which_steps_a_tracker_lacks(expected: tuple[Curves, str], start: Start, tmp_path: Path) -> None:
    first = start("csv", checkpoints=True, stop_at=42)
    wait_for_step(first, 42)
    first.wait_until(lambda: list((tmp_path / "checkpoints").glob("step-*40-*/manifest.json")), "the checkpoint of step 40")
    kill_everything(first)
    (metrics,) = (tmp_path / "checkpoints" / "tracking").glob("*/metrics.csv")
    metrics.unlink()
    second = start("csv", checkpoints=True)
    assert finish(second) == expected[1]
    assert "the tracker csv holds the steps up to 0, and the run goes on after step 36" in second.output()
    assert [step for step, _ in read("csv", tmp_path / "checkpoints" / "tracking")] == list(range(37, STEPS + 1))


# -- other changes -------------------------------------------------------------------------------------


def test_the_curves_do_not_depend_on_how_workers_come_and_go(expected: tuple[Curves, str], start: Start) -> None:
    run = start("csv,plain")
    wait_for_step(run, 6)
    run.scale(1)
    run.wait_until(lambda: len(members(run)) == 1, "one worker is left")
    wait_for_step(run, step_of(run) + 5)
    run.scale(3)
    run.wait_until(lambda: len(members(run)) == 3, "three workers train")
    assert finish(run) == expected[1]
    require_curves("csv", run.run_dir / "tracking", expected[0])
    lines = [json.loads(line) for line in (run.folder / "plain.jsonl").read_text().splitlines()]
    assert [step for step, _ in lines] == list(range(1, STEPS + 1)), "rank 0 has not changed"


def test_an_object_that_cannot_say_what_it_holds_gets_each_step_at_least_once(expected: tuple[Curves, str], start: Start) -> None:
    run = start("plain,csv")
    wait_for_step(run, 13)
    kill_main(run, "after", Random(0))
    assert finish(run) == expected[1]
    lines = [json.loads(line) for line in (run.folder / "plain.jsonl").read_text().splitlines()]
    steps = [step for step, _ in lines]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    twice = [step for step in set(steps) if steps.count(step) > 1]
    assert 1 <= len(twice) <= 4, f"the steps of the last exchange, not {twice}"
    assert dict(lines) == {step: {name: value.hex() for name, value in values.items()} for step, values in expected[0]}


def test_a_tracker_whose_server_is_gone_is_tried_by_the_first_rank_0_and_when_the_script_ends(
    expected: tuple[Curves, str], start: Start
) -> None:
    run = start("csv,gone")
    wait_for_step(run, 9)  # the first exchange after the failed try tells the others
    first = (run.folder / "main").read_text().strip()
    kill_main(run, "before", Random(0))
    assert finish(run) == expected[1]
    tries = (run.folder / "tries").read_text().split()
    assert len(tries) == 2, "the pause of 60 s is not over"
    assert tries[0] == first != tries[1]
    lines = run.output().splitlines()
    assert sum(line.startswith("lockstep: the tracker Gone has failed") for line in lines) == 1
    assert "lockstep: the tracker Gone has not worked again. It lacks the steps after step 0." in lines
    require_curves("csv", run.run_dir / "tracking", expected[0])


# -- runs that end between two exchanges ---------------------------------------------------------------

ENDS = ["break", "break and close", "break and with", "break in epochs", "exit", "raise", "raise before", "wait"]


def left_early(folder: Path, how: str, workers: int, dies: str = "") -> LaunchedRun:
    env = {"HOW": how, "DIES": dies, "OMP_NUM_THREADS": "1"}
    options = ("--hang-timeout", "20", "--max-respawns", "0") if workers else ()
    return LaunchedRun(LEFT_EARLY, *options, folder=folder, workers=workers, env=env, own_imports=not workers)


def early_curves(run: LaunchedRun) -> list[tuple[int, str]]:
    """The step and the line of each step, with the name of each value."""
    (path,) = run.folder.glob("**/metrics.csv")
    with path.open(newline="") as file:
        return [(int(row["step"]), repr(sorted(row.items()))) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    run = left_early(tmp_path_factory.mktemp("early"), "break and close", 0)
    run.result()
    curves = early_curves(run)
    assert [step for step, _ in curves] == list(range(1, 16))
    return curves


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_ends_between_two_exchanges_publishes_every_committed_step(
    how: str, workers: int, early: list[tuple[int, str]], tmp_path: Path
) -> None:
    run = left_early(tmp_path, how, workers)
    if how == "wait":
        run.wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == max(workers, 1), "step 15")
        if not workers:
            run.stop()  # a lone process without a checkpoint is ended by SIGTERM
            return
        run.process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: "got SIGTERM" in run.output(), "the agent has got the signal")
        (tmp_path / "go").touch()
    code = run.wait()
    assert (code != 0) == (how in ("raise", "raise before", "wait")), run.dump()
    last = 15
    if how == "wait":
        last = run.events("end")[0]["step"]
    elif workers > 1 and how in ("raise", "exit"):
        last = 14  # nobody knows what the others have logged in step 15 after the commit
    curves = early_curves(run)
    assert [step for step, _ in curves] == list(range(1, last + 1)), run.dump()
    if how != "raise before":  # which logs no learning rate
        assert curves[: len(early)] == early[: len(curves)]
    if how.startswith("break"):
        assert (tmp_path / "on-log").read_text().split() == [str(step) for step in range(1, last + 1)]


@pytest.mark.parametrize("how", ENDS[:4])
@pytest.mark.parametrize("dies", ["before the break", "before the write", "after the write"])
def test_if_rank_0_dies_near_the_break_every_step_is_published_once(
    how: str, dies: str, early: list[tuple[int, str]], tmp_path: Path
) -> None:
    run = left_early(tmp_path, how, 3, dies)
    run.result()
    assert len(run.generations()) == 2, run.dump()
    assert early_curves(run) == early, run.dump()
