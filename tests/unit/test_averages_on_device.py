"""A worker tells the others that it has the averages when they are in the memory of its device, and not before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.comm.exchange import broadcast_in_place
from lockstep.comm.loopback import Loopback, LoopbackGroup
from lockstep.errors import PeerError
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import EngineCallbacks, LaneEngine


class Device(Loopback):
    """A rank whose results are on a device: notes what is called, and may lose a peer before the device is done."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(LoopbackGroup(size, 5.0), 0)
        self.calls: list[str] = []
        self.fails = False

    def await_device(self) -> None:
        self.calls.append("device")
        if self.fails:
            raise PeerError("worker 1 died")

    def barrier(self, what: str = "a barrier") -> None:
        self.calls.append(what)

    def _issue(self, collective: Any, tensor: Any, output: Any = None) -> Any:
        self.group.size, size = 1, self.group.size  # the other ranks are silent
        try:
            if output is not None:
                output.copy_(tensor.expand_as(output))
            return super()._issue(collective, tensor, output if output is None else torch.empty(1, *output.shape[1:]))
        finally:
            self.group.size = size


def engine_of(comm: Device, **callbacks: Any) -> tuple[LaneEngine, nn.Module]:
    model = nn.Linear(3, 2)
    engine = LaneEngine(model, comm, lanes=2, exact=False, callbacks=EngineCallbacks(**callbacks))
    engine.start_phase(0, (4, 4))
    engine.start_lane(0, is_last=True)
    return engine, model


def test_the_device_is_awaited_before_the_averages_are_there_for_the_user_and_the_others() -> None:
    comm = Device()
    engine, model = engine_of(comm, on_peer_lost=pytest.fail, on_averaged=lambda: comm.calls.append("averaged"))
    model(torch.ones(4, 3)).sum().backward()
    assert engine.state is EngineState.AVERAGED
    engine.confirm()
    assert comm.calls == ["device", "averaged", "what was logged", "the confirmation of step 0"]


def test_a_worker_that_lost_a_peer_before_its_device_was_done_does_not_have_the_averages() -> None:
    comm, lost = Device(), []
    engine, model = engine_of(comm, on_peer_lost=lost.append)
    comm.fails = True
    model(torch.ones(4, 3)).sum().backward()
    assert len(lost) == 1
    assert not engine.is_averaged
    engine.discard_step()
    assert engine.state is EngineState.DISCARDED


def test_without_an_agent_or_without_peers_nothing_waits_for_the_device() -> None:
    for comm, callbacks in ((Device(), {}), (Device(1), {"on_peer_lost": pytest.fail})):
        _, model = engine_of(comm, **callbacks)
        model(torch.ones(4, 3)).sum().backward()
        assert "device" not in comm.calls


def test_a_state_that_was_sent_is_believed_when_it_is_on_the_device() -> None:
    comm = Device()
    broadcast_in_place(comm, [torch.zeros(3)], 0, "the state of the run")
    assert comm.calls == ["the state of the run", "device"]
    comm.fails = True
    with pytest.raises(PeerError):
        broadcast_in_place(comm, [torch.zeros(3)], 0, "the state of the run")
