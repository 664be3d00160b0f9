"""What one process can show of the W&B tracker, offline: it is opened again after errors, and does not wait long for a server."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.tracker_wandb import Wandb, _files_of, _writers
from lockstep.observe.wandb_file import WandbFile, _records

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages that it uses
    pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed"),
]
QUICK_S = 15.0
"""Less than the tracker waits for another process that writes the file."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the variables again
    yield
    wandb.teardown()


def write(tracker: Wandb, *steps: int) -> None:
    for step in steps:
        tracker.log(step, {"loss": 1.0 / step})
    tracker.settle()
    assert tracker.held() == max(steps)


def last_steps(folder: Path) -> list[int]:
    return sorted(WandbFile(path).read_on() for path in _files_of(folder, "curves"))


def test_wandb_is_opened_again_without_a_close_in_between(tmp_path: Path) -> None:
    tracker, began = Wandb(), time.monotonic()
    tracker.open("curves", tmp_path)
    write(tracker, 1, 2)
    tracker.open("curves", tmp_path)
    assert tracker.last_step() == 2
    write(tracker, 3)
    tracker.close()
    assert max(last_steps(tmp_path)) == 3
    assert time.monotonic() - began < QUICK_S


def test_wandb_is_opened_again_after_its_process_has_died(tmp_path: Path) -> None:
    tracker, began = Wandb(), time.monotonic()
    tracker.open("curves", tmp_path)
    write(tracker, 1, 2)
    (path,) = _files_of(tmp_path, "curves")
    for pid in _writers(path):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        for step in range(3, 1000):
            tracker.log(step, {"loss": 1.0})
            time.sleep(0.01)  # until wandb notices it
    tracker.open("curves", tmp_path)
    assert tracker.last_step() == 2
    write(tracker, 3)
    tracker.close()
    assert time.monotonic() - began < QUICK_S


def test_a_run_of_the_script_is_not_that_of_the_tracker(tmp_path: Path) -> None:
    import wandb

    with wandb.init(dir=str(tmp_path)) as mine:
        tracker = Wandb()
        tracker.open("curves", tmp_path)
        write(tracker, 1)
        tracker.open("curves", tmp_path)
        tracker.close()
        assert wandb.run is mine
        mine.log({"mine": 1.0})
    assert max(last_steps(tmp_path)) == 1


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("no_server")
def test_wandb_waits_for_the_server_as_long_as_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    tracker, began = Wandb(), time.monotonic()
    for _ in range(2):
        with pytest.raises(Exception, match="connection refused"):
            tracker.open("curves", tmp_path)
    tracker.close()
    assert time.monotonic() - began < QUICK_S


@pytest.mark.usefixtures("no_server")
def test_another_try_does_not_end_a_run_of_the_script(tmp_path: Path) -> None:
    import wandb

    with wandb.init(dir=str(tmp_path), mode="offline") as mine:
        tracker = Wandb(settings={"init_timeout": 1})
        with pytest.raises(Exception, match="connection refused"):
            tracker.open("curves", tmp_path)
        with pytest.raises(RuntimeError, match=r"^the script has a W&B run of its own"):
            tracker.open("curves", tmp_path)
        mine.log({"mine": 1.0})


@pytest.mark.parametrize("given", [{}, {"settings": {"finish_timeout": 7}}])
def test_the_waits_of_wandb_have_limits(given: dict[str, Any], tmp_path: Path) -> None:
    tracker = Wandb(**given)
    tracker.open("curves", tmp_path)
    settings = tracker._run.settings
    assert (settings.init_timeout, settings.finish_timeout) == (30.0, 7.0 if given else 60.0)
    tracker.close()


def test_a_record_of_wandb_that_is_not_whole_is_left_for_later() -> None:
    assert list(_records(b"\0" * 7, 7)) == []
    assert list(_records(b":W&B\0\0\0\1\2\3\4\xff\0\1data", 7)) == []
