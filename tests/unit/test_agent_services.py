"""What the agent serves its workers: the store of a generation, and recorded results. Both ends, over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.store import StoreTimeoutError, StoreWaitError, await_ranks
from lockstep.elastic.agent_link import AgentLink, CommOptions
from lockstep.errors import PeerError
from lockstep.launcher import packets
from lockstep.launcher.idle_times import IdleTimes
from lockstep.launcher.key_value_store import KeyValueStore
from lockstep.launcher.recorded_results import RecordedResults
from lockstep.world import AgentEndpoint
from tests.waiting import wait_until


class FakeAgent:
    """The agent's end of the sockets of ``size`` workers, served by a thread, and their AgentLinks."""

    def __init__(self, size: int, timeout_s: float = 5.0) -> None:
        self.said: list[str] = []
        self.received: list[packets.Packet] = []
        self.operations: list[str] = []
        """What workers have requested of the store, in the order of the requests."""
        self.sockets: list[socket.socket] = []
        self.links: list[AgentLink] = []
        self.store = KeyValueStore(self.send)
        self.results = RecordedResults(self.send, self.said.append, max_chars=1 << 20)
        self._lock = threading.Lock()
        options = CommOptions(torch.device("cpu"), None, timeout_s, lambda workers: 0)
        for worker in range(size):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.sockets.append(mine)
            self.links.append(AgentLink(AgentEndpoint(theirs.detach(), worker, ""), options))
            threading.Thread(target=self._serve, args=(worker, mine), daemon=True).start()

    def send(self, worker: int, packet: packets.Packet) -> None:
        packets.send(self.sockets[worker], packet)

    def form(self, number: int = 0) -> list[Any]:
        """Form a generation of all workers; returns their stores."""
        with self._lock:
            self.store.begin(number)
        for worker in range(len(self.links)):
            self.send(worker, {"type": "generation", "number": number, "members": list(range(len(self.links)))})
        return [link._await(object).store for link in self.links]  # type: ignore[arg-type]

    def _serve(self, worker: int, connection: socket.socket) -> None:
        while True:
            try:
                packet = packets.receive(connection)
            except OSError:
                return
            if packet is None:
                return
            with self._lock:
                if packet["type"] == "store":
                    assert self.store.handle(worker, packet)
                    self.operations.append(packet["op"])
                elif packet["type"] == "recorded":
                    self.results.record(packet)
                elif packet["type"] == "recall":
                    self.results.recall(worker, packet)
                else:
                    self.received.append(packet)

    def close(self) -> None:
        for connection in self.sockets:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for link in self.links:
            link._socket.close()


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    agent = FakeAgent(2)
    yield agent
    agent.close()


def test_a_store_does_what_torch_expects_of_one(agent: FakeAgent) -> None:
    one, two = (dist.PrefixStore("a/b", store) for store in agent.form())
    one.set("key", b"\x00\xff value")
    assert two.get("key") == b"\x00\xff value"
    assert two.check(["key"])
    assert not two.check(["key", "other"])
    assert one.add("sum", 2) == 2
    assert two.add("sum", -5) == -3
    assert one.get("sum") == b"-3"
    assert one.num_keys() == 2
    assert one.delete_key("key")
    assert not one.delete_key("key")
    assert not two.check(["key"])


def test_a_wait_ends_as_soon_as_the_key_is_set(agent: FakeAgent) -> None:
    one, two = agent.form()
    waited: list[float] = []

    def wait() -> None:
        two.wait(["first", "second"], timedelta(seconds=5))
        waited.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    one.set("first", "1")
    wait_until(lambda: one.num_keys() == 1 and "wait" in agent.operations, "the agent knows of the wait and of the first key")
    assert not waited
    at = time.monotonic()
    one.set("second", "2")
    thread.join(5)
    assert waited[0] - at < 0.1


def test_a_wait_that_times_out_names_the_key(agent: FakeAgent) -> None:
    one, _ = agent.form()
    with pytest.raises(StoreTimeoutError, match=r"no worker set missing within 0\.1 s"):
        one.wait(["missing"], timedelta(seconds=0.1))


def test_an_abort_and_the_next_generation_end_all_waits(agent: FakeAgent) -> None:
    one, two = agent.form()
    errors: list[Exception] = []

    def wait(store: Any) -> None:
        try:
            store.get("missing")
        except StoreWaitError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(store,)) for store in (one, two)]
    for thread in threads:
        thread.start()
    agent.send(0, {"type": "abort", "generation": 0, "why": "worker 1 died"})
    threads[0].join(5)
    assert [str(error) for error in errors] == ["worker 1 died"]
    later, _ = agent.form(1)
    threads[1].join(5)
    assert len(errors) == 2
    with pytest.raises(StoreWaitError):
        one.check(["key"])
    later.set("key", "new")
    assert later.num_keys() == 1


def test_workers_that_do_not_arrive_are_named(agent: FakeAgent) -> None:
    one, two = agent.form()
    thread = threading.Thread(target=await_ranks, args=(dist.PrefixStore("x", two), 1, 2, 5.0))
    thread.start()
    await_ranks(dist.PrefixStore("x", one), 0, 2, 5.0)
    thread.join(5)
    with pytest.raises(PeerError, match="rank 1 of 2 never arrived"):
        await_ranks(dist.PrefixStore("y", one), 0, 2, 0.1)


def test_a_newcomer_prepares_recalls_passes_and_is_dismissed(agent: FakeAgent) -> None:
    member, newcomer = agent.links
    agent.send(1, {"type": "prepare", "size": 7})
    assert newcomer.join(4) is None
    assert newcomer.run_size == 7
    text = '\u20ac "quoted\\ ' * 40_000
    member.record(3, text)
    assert newcomer.recall(3) == text
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(newcomer.recall(4)))
    thread.start()
    member.record(4, "later")
    thread.join(5)
    assert answers == ["later"]
    agent.send(1, {"type": "pass", "stage": 0})
    assert newcomer.join_loop(0) is None
    agent.send(1, {"type": "dismiss", "why": "the run is over"})
    for _ in range(2):
        with pytest.raises(SystemExit):
            newcomer.recall(5)
    member.enter_stage(2)
    wait_until(lambda: {"type": "stage", "stage": 2} in agent.received, "the agent knows the stage", 5.0)
    of_newcomer = [packet for packet in agent.received if packet["type"] == "join"]  # the two links are read in any order
    assert of_newcomer == [{"type": "join", "most": 4, "stage": -1, "gpu": ""}, {"type": "join", "stage": 0}]
    assert len(agent.received) == 3


def test_results_beyond_the_limit_are_not_kept_and_that_is_said_once() -> None:
    sent: list[tuple[int, packets.Packet]] = []
    said: list[str] = []
    results = RecordedResults(lambda worker, packet: sent.append((worker, packet)), said.append, max_chars=10)
    first = {"index": 0, "part": 0, "parts": 2, "data": "abcd"}
    assert results.record(first) == []
    assert results.record(first) == []  # another rank 0 begins again
    assert results.record({**first, "part": 1}) == []
    assert results.recall(5, {"index": 1})
    assert results.record({**first, "index": 1}) == [5]
    assert results.record({**first, "index": 2}) == []
    assert len(said) == 1
    assert not results.recall(6, {"index": 2})
    assert results.recall(6, {"index": 0})
    assert [(worker, packet["part"]) for worker, packet in sent] == [(6, 0), (6, 1)]
    for nonsense in ({}, {**first, "index": "x"}, {**first, "index": 9, "part": 5}, {**first, "index": 9, "data": 3}):
        assert results.record(nonsense) == []


def test_results_of_earlier_epochs_are_dropped_unless_a_newcomer_may_ask_for_them() -> None:
    sent: list[packets.Packet] = []
    results = RecordedResults(lambda worker, packet: sent.append(packet), lambda text: None)
    for index in range(8):  # one before the loop over epochs, two in each epoch
        results.record({"index": index, "part": 0, "parts": 1, "data": "x"})

    def begin(epoch: int, is_left: bool = False) -> None:
        keep = max(1, 2 * epoch - 1)
        results.begin_epoch(
            {
                "number": 0,
                "epoch": epoch,
                "stage": epoch,
                "result": 1 + 2 * epoch,
                "first": 1,
                "keep": keep,
                "is_left": is_left,
                "is_exhausted": False,
            }
        )

    begin(0)
    results.latest_epoch(5, {"number": 0})
    assert sent[-1]["epoch"]["result"] == 1
    begin(3)
    begin(2)  # a rank 0 that is gone
    assert results.recall(5, {"index": 1})
    results.forget(5)  # it has joined
    assert not results.recall(6, {"index": 4})
    assert results.recall(6, {"index": 0})
    assert results.recall(6, {"index": 5})
    begin(3, is_left=True)
    results.latest_epoch(6, {"number": 0})
    assert (sent[-1]["epoch"]["epoch"], sent[-1]["epoch"]["is_left"]) == (3, True)
    results.latest_epoch(6, {"number": 1})
    assert sent[-1]["epoch"] is None
    for nonsense in ({}, {"number": "x"}, {"number": 0, "epoch": 9}):
        results.begin_epoch(nonsense)
        results.latest_epoch(6, {**nonsense, "number": None})


@pytest.mark.parametrize(
    "request_",
    [{}, {"op": "set"}, {"op": "set", "keys": ["a"]}, {"op": "fly", "keys": []}, {"op": 3, "keys": 3}, {"op": "wait", "keys": [3]}],
)
def test_requests_that_make_no_sense_are_refused(request_: packets.Packet) -> None:
    store = KeyValueStore(lambda worker, packet: None)
    store.begin(0)
    assert not store.handle(0, {"id": 1, "generation": 0, **request_})


def test_a_process_that_sleeps_is_idle_and_one_that_works_is_not() -> None:
    import subprocess
    import sys

    sleeps = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    works = subprocess.Popen(["sh", "-c", f"{sys.executable} -c 'while True: pass' & wait"], process_group=0)  # its child works
    try:
        assert sleeps.stdout is not None
        sleeps.stdout.readline()
        idle = IdleTimes()
        pids = {1: sleeps.pid, 2: works.pid}
        idle.measure(pids, time.monotonic())
        deadline = time.monotonic() + 20
        while (found := idle.measure(pids, time.monotonic()))[1] < 2.0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found[1] >= 2.0
        assert found[2] < 1.5
        assert idle.measure({3: 2**22 + 1}, time.monotonic()) == {}
    finally:
        import os
        import signal

        os.killpg(works.pid, signal.SIGKILL)
        sleeps.kill()
        works.wait()
        sleeps.communicate()
