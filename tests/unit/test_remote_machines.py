"""What a head knows of the workers of other machines."""

from __future__ import annotations

from typing import Any, cast

from lockstep.cluster.channel import Channel
from lockstep.cluster.machines import Machine, RemoteMachines
from lockstep.cluster.protocol import Registration
from lockstep.launcher.environment import RunSettings
from lockstep.plan.membership_recovery import MachineReport


class Sent(list[dict[str, Any]]):
    """A channel that keeps what is sent."""

    send = list.append
    local_address = None


def machine(name: str = "a", room: int = 2) -> Machine:
    given = Registration("", name, name, "/run", "train.py", room, 1, "10.0.0.1", 1, (2,), 0, 1, MachineReport(room), 0)
    return Machine(given, cast(Channel, Sent()), 0.0, 0.0)


def test_idle_times_of_long_ago_are_not_used() -> None:
    machines, one = RemoteMachines(), machine()
    machines.add(one)
    machines.spawn([0, 1], RunSettings(2, False, 30.0, 0, 0, None))
    assert machines.idle_s(now=10.0) == {}
    machines.note_idle({"0": 4.0, "1": 0.1})
    assert machines.idle_s(now=10.5) == {0: 4.0, 1: 0.1}
    machines.note_idle({"0": 4.5, "1": 0.1})
    assert machines.idle_s(now=20.0) == {}, "nobody has asked for 9 seconds, and the workers were busy in between"
    machines.note_idle({"0": 0.2})
    assert machines.idle_s(now=20.5) == {0: 0.2}


def test_a_worker_for_which_there_is_no_room_any_more_gets_no_rank() -> None:
    machines, one, two = RemoteMachines(), machine("a"), machine("b")
    machines.add(one)
    machines.add(two)
    machines.spawn([0, 1, 2, 3], RunSettings(4, False, 30.0, 0, 0, None))
    machines.gone(3)
    machines.remove(two)
    assert machines.spawn([4], RunSettings(4, False, 30.0, 0, 0, None)) == {}
    assert machines.ids == [0, 1]
