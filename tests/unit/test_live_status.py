"""What an agent answers about its run: the state in one word, and all workers, however many they are."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launcher.control_client import ControlClient, NoAnswerError, RefusedError
from lockstep.launcher.control_socket import ControlSocket
from lockstep.launcher.live_status import LiveStatus, run_state
from lockstep.launcher.observation import WorkerNow
from lockstep.plan.membership_state import State, Status, Worker
from lockstep.recording.summary import RunSummary


def live_status(count: int, now: dict[int, WorkerNow] | None = None) -> LiveStatus:
    """Of a run whose last worker has no machine yet."""

    def host(worker: int) -> str:
        assert worker < count - 1, "the machine of a worker that was not placed is not known"
        return "node-with-a-rather-long-name.cluster.example.org"

    machines: Any = SimpleNamespace(ids=list(range(count - 1)), pid=lambda worker: 4000 + worker, host=host)
    observation: Any = SimpleNamespace(workers=now or {}, recent=[])
    stragglers: Any = SimpleNamespace(verdict=None)
    return LiveStatus(machines, observation, stragglers, RunSummary())


def state_of(count: int) -> State:
    members = tuple(range(count - 1))
    workers = (*(Worker(id, Status.MEMBER) for id in members), Worker(count - 1))
    return State(count, workers=workers, members=members, generation=3, formed=members)


@contextmanager
def agent(folder: Path, status: LiveStatus, state: State) -> Iterator[None]:
    """Answers at the control socket, in a thread."""
    (folder / "events.jsonl").touch()
    selector, ended = selectors.DefaultSelector(), threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("type") != "status":
            return {"ok": False, "error": "no"}
        ranks = {id: rank for rank, id in enumerate(state.members)}
        return {"ok": True, "value": status.answer(state, ranks, request, is_ending=False)}

    def serve() -> None:
        while not ended.is_set():
            for key, _ in selector.select(0.05):
                key.data()

    control = ControlSocket(str(folder / "agent.sock"), selector, answer)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)
        control.close()
        selector.close()


@pytest.mark.parametrize("count", [2, 256, 257, 2000])
def test_all_workers_are_in_the_status_also_if_they_do_not_fit_into_one_answer(tmp_path: Path, count: int) -> None:
    now = {id: WorkerNow(123456, "exchange", 1763500000.0, 10 << 30, (id, id + 1)) for id in range(count - 1)}
    with agent(tmp_path, live_status(count, now), state_of(count)), ControlClient(tmp_path) as client:
        live = client.status()
        with pytest.raises(RefusedError, match="no"):
            client.ask({"type": "fly"})
    assert live["worker_count"] == len(live["workers"]) == count
    assert [worker["rank"] for worker in live["workers"]] == [*range(count - 1), None]
    assert live["workers"][0]["lanes"] == [0, 1]
    assert live["workers"][-1]["host"] == ""


def test_the_newest_checkpoint_is_in_the_status(tmp_path: Path) -> None:
    status = live_status(2)
    status._summary.add_event({"time": 1.0, "kind": "saved", "step": 7, "where": "there"})
    with agent(tmp_path, status, state_of(2)), ControlClient(tmp_path, 10.0) as client:
        assert client.status()["checkpoint"] == [7, "there"]


def test_no_agent_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(NoAnswerError, match=r"agent\.sock"):
        ControlClient(tmp_path)
    with pytest.raises(NoAnswerError):
        ControlClient(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("state", "has_processes", "is_ending", "expected"),
    [
        (State(2), False, False, "starting"),
        (State(2), True, False, "running"),
        (State(2, generation=0), True, False, "running"),
        (State(2, generation=0, broken_at=5.0), True, False, "recovering"),
        (State(2, restarting=True), True, False, "recovering"),
        (State(2, restarts=1), False, False, "recovering"),
        (State(2, restarts=1), True, False, "running"),
        (State(2, generation=0, broken_at=5.0), True, True, "stopping"),
        (State(2, ended=True), False, False, "stopping"),
    ],
)
def test_the_state_of_a_run_in_one_word(state: State, has_processes: bool, is_ending: bool, expected: str) -> None:
    assert run_state(state, is_ending=is_ending, has_processes=has_processes) == expected
