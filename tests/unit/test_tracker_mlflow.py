"""What one process can show of the MLflow tracker: names, many values, and a server that does not answer."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.tracker_mlflow import Mlflow, _batches, accepted_name
from tests.local_trackers import opened, write

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that it uses
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")


@needs_mlflow
def test_mlflow_gets_any_name_and_any_number_of_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = opened(Mlflow(), tmp_path)
    names = ["acc@1", "acc@5", "acc#1", "acc_1", "../up", "a//b", "", ".", "plain/name", "n" * 300, "n" * 299]
    write(tracker, (1, dict.fromkeys(names, 1.0)), (2, {f"many {index}": 1.0 for index in range(2500)}), (3, {"acc@1": 2.0}))
    said = capfd.readouterr().err
    assert said.count("the tracker mlflow logs 'acc@1' as 'acc_1-71dfc1': MLflow refuses the name.") == 1
    tracker.close()
    again = opened(Mlflow(), tmp_path)
    assert again.last_step() == 3
    metrics = again._client.get_run(again._run).data.metrics
    assert {"acc_1", "plain/name", *map(accepted_name, names)} <= set(metrics)
    assert len(metrics) == len(names) + 2500
    again.close()


def test_no_two_names_become_the_same_in_mlflow() -> None:
    names = ["acc@1", "acc#1", "acc_1", "a/b", "a//b", "a_b", "", "_", ".", "..", "\udc80", "n" * 250, "n" * 251, "n" * 252]
    accepted = [accepted_name(name) for name in names]
    assert len(set(accepted)) == len(names)
    assert max(map(len, accepted)) == 250
    assert [accepted_name(name) for name in ("acc_1", "a/b", "_")] == ["acc_1", "a/b", "_"]


def test_a_step_is_in_one_batch_unless_it_is_too_large() -> None:
    steps: list[list[Any]] = [[step] * count for step, count in enumerate([0, 400, 600, 1, 999, 2500, 500, 1])]
    batches = _batches(steps)
    assert [len(batch) for batch in batches] == [1000, 1000, 1000, 1000, 1000, 1]
    assert list(chain(*batches)) == list(chain(*steps))
    assert _batches([]) == []


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@needs_mlflow
def test_mlflow_waits_for_a_server_for_a_limited_time(silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")  # a variable of the user counts
    tracker, began = Mlflow(uri=silent_server), time.monotonic()
    with pytest.raises(Exception, match="Read timed out"):
        opened(tracker, tmp_path)
    tracker.close()
    assert 2.0 <= time.monotonic() - began < 15.0, "two tries, and none to close it"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ, "the limits are those of the tracker alone"


@needs_mlflow
def test_mlflow_does_not_wait_again_for_a_server_that_is_gone(tmp_path: Path) -> None:
    tracker = opened(Mlflow(), tmp_path)

    class Gone:
        def log_batch(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("gone")

        def set_terminated(self, *_: Any) -> None:
            raise AssertionError("it would wait for the server again")

    tracker._client = Gone()
    with pytest.raises(ConnectionError):
        write(tracker, (1, {"loss": 1.0}))
    tracker.close()
    assert opened(tracker, tmp_path).last_step() == 0, "it can be opened again"
    tracker.close()
