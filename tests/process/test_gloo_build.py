"""A gloo group whose members do not all connect: with an agent, the others are told so and can recover."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.comm import gloo_devices
from lockstep.comm.connections import Connections
from lockstep.comm.gloo_devices import build_gloo
from lockstep.comm.store import AbortableStore, StoreWaitError, open_store
from lockstep.errors import PeerError
from lockstep.world import World
from tests.workers import WorkerProcesses


class Abortable(AbortableStore):
    """A store that can be aborted. ``dies``: the process is killed as soon as gloo has published its address."""

    def __init__(self, inner: dist.Store, *, dies: bool) -> None:
        super().__init__()
        self._inner, self._dies = inner, dies
        self._callbacks: list[Any] = []
        self.waits = threading.Event()

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)
        if self._dies and not key.startswith("network"):
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str) -> bytes:
        value: bytes = self._inner.get(key)
        if not key.startswith("network"):  # the address of the other member: now it is waited for
            self.waits.set()
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timedelta(seconds=30))

    def on_abort(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def abort(self) -> None:
        for callback in self._callbacks:
            callback()


def connect(rank: int, size: int, victim: int) -> str:
    """The victim dies when it has published its address; the other one connects to it, or waits for its connection."""
    store = Abortable(open_store(World.detect(), 30.0), dies=rank == victim)
    if rank != victim:
        threading.Thread(target=lambda: store.waits.wait(30) and threading.Timer(1.5, store.abort).start(), daemon=True).start()
    try:
        build_gloo(store, rank, size, connections := Connections())
    except StoreWaitError as error:
        return str(error)
    connections.cut()
    return "they had connected before the victim died"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_dies_while_the_group_is_built_does_not_hold_the_other_one(victim: int) -> None:
    outcomes = WorkerProcesses(connect, 2, (victim,), {}).collect(20.0)
    assert outcomes[victim].signal == signal.SIGKILL
    message = outcomes[1 - victim].value
    assert message is not None, outcomes[1 - victim]
    assert any(text in message for text in ("did not connect", "was aborted while its members connected", "had connected before"))


def test_without_an_agent_a_member_that_does_not_connect_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer\na C++ stack")

    monkeypatch.setattr(gloo_devices, "_new_group", fail)
    with pytest.raises(PeerError, match=r"did not connect to rank 0 over gloo .*Connection closed by peer.*log") as caught:
        build_gloo(dist.HashStore(), 0, 1, connections := Connections())
    assert "C++ stack" not in str(caught.value)
    connections.cut()
