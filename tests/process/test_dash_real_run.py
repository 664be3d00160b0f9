"""The page of a real run whose worker is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import browser, console_errors, needs_browser
from tests.dash_server import dash
from tests.process.test_dash_browser import Page
from tests.training_run import TrainingRun

for needed in ("starlette", "uvicorn", "plotly", "selenium"):
    pytest.importorskip(needed)


@needs_browser
@pytest.mark.exclusive
def test_a_worker_of_a_real_run_that_is_killed_is_shown_within_two_seconds(
    tmp_path: Path, train: Callable[..., TrainingRun]
) -> None:
    run = train(3, "--hang-timeout", "30", hold_at=20)
    run.wait_for_step(22)
    with dash(run.run_dir, "--port", "0", note=tmp_path / "dash.txt") as server, browser(tmp_path / "profile") as driver:
        driver.get(server.url)
        shown = Page(driver)
        shown.wait_for_step(23)
        assert shown.text(".pill") == "running"
        assert shown.fact("Workers") == "3"
        shown.wait_for_chart("#heat")
        run.kill(1)
        killed_at = time.monotonic()
        shown.wait(lambda: "died: SIGKILL" in shown.text(".workers"), "the dead worker is shown")
        assert time.monotonic() - killed_at < 2.0
        shown.wait(
            lambda: "worker 3 joined; 3 workers train, generation 2" in shown.text(".entries"), "its replacement is shown", 30
        )
        run.hurry()
        assert run.wait() == 0
        shown.wait(lambda: shown.text(".pill") == "finished", "the end is shown")
        shown.wait(lambda: int(shown.fact("Step")) >= 59, "the last steps are shown")
        assert "1 failure survived" in shown.text("#summary")
        assert console_errors(driver) == []
