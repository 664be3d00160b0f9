"""What a head knows of the workers of other machines."""

from __future__ import annotations

import selectors
import time
from pathlib import Path
from typing import Any, cast

from lockstep.cluster.channel import Channel
from lockstep.cluster.machines import Machine, RemoteMachines
from lockstep.cluster.protocol import Registration
from lockstep.launcher.console import Console
from lockstep.launcher.environment import RunSettings
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.supervisor import Settings, Supervisor
from lockstep.plan.membership_recovery import MachineReport
from lockstep.plan.membership_state import Policy


class Sent(list[dict[str, Any]]):
    """A channel that keeps what is sent."""

    send = list.append
    local_address = None
    __hash__ = object.__hash__  # type: ignore[assignment]


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


SETTINGS = RunSettings(4, False, 30.0, 0, 0, None)


def spawned(machine: Machine) -> dict[str, Any]:
    """The places in the last order to start workers, which is then forgotten."""
    channel = cast(list[dict[str, Any]], machine.channel)
    places: dict[str, Any] = channel[-1]["places"]
    channel.clear()
    return places


def test_spares_go_where_there_is_room_or_share_a_place_on_the_machine_with_the_fewest_spares() -> None:
    machines, one, two = RemoteMachines(), machine("a"), machine("b")
    machines.add(one)
    machines.add(two)
    machines.spawn([0, 1, 2], SETTINGS)
    for each in (one, two):
        spawned(each)
    assert machines.spawn([3, 4, 5], SETTINGS, are_spares=True) == {4: 4, 3: 7, 5: 6}, "their ranks are behind those of members"
    assert one.workers == {0: 0, 1: 1, 4: 0}
    assert two.workers == {2: 0, 3: 1, 5: 0}
    assert all(place["is_spare"] for each in (one, two) for place in spawned(each).values())
    assert machines.device(3, "") == ("b", 2)
    assert machines.device(3, "GPU-7") == ("b/GPU-7", 1)


def test_a_replacement_starts_on_the_machine_that_lacks_a_worker() -> None:
    """On machine a, a spare has taken the place of a lost worker."""
    machines, one, two = RemoteMachines(), machine("a"), machine("b")
    machines.add(one)
    machines.add(two)
    machines.spawn([0, 1, 2, 3], SETTINGS)
    machines.spawn([4], SETTINGS, are_spares=True)
    machines.gone(1)
    machines.gone(2)
    assert one.free == [1]
    assert machines.spawn([5], SETTINGS) == {5: 2}


def test_a_worker_for_which_there_is_no_room_any_more_gets_no_rank() -> None:
    machines, one, two = RemoteMachines(), machine("a"), machine("b")
    machines.add(one)
    machines.add(two)
    machines.spawn([0, 1, 2, 3], RunSettings(4, False, 30.0, 0, 0, None))
    machines.gone(3)
    machines.remove(two)
    assert machines.spawn([4], RunSettings(4, False, 30.0, 0, 0, None)) == {}
    assert machines.ids == [0, 1]


def test_a_spare_that_waits_at_a_loop_still_has_the_gpu_that_it_has_named_before(tmp_path: Path) -> None:
    """With the second request to join it names none, and would count as a worker that may use any GPU of its machine."""
    machines = RemoteMachines()
    machines.add(machine("a"))
    folder, settings = RunFolder.create(str(tmp_path / "run"), 0.0), Settings(2, policy=Policy(spares=1, spares_after_s=0.0))
    selector = selectors.DefaultSelector()
    supervisor = Supervisor(settings, machines, folder, Console(NonblockingOutput()), selector, time.monotonic)
    supervisor.start()
    supervisor.on_time(time.monotonic())
    for id in (0, 1):
        supervisor.on_packet(id, {"type": "join", "most": 4, "stage": -1, "gpu": f"GPU-{id}"})
    supervisor.on_packet(0, {"type": "stage", "stage": 0})
    for _ in range(2):  # the spare is due, and is started
        supervisor.on_time(time.monotonic())
    supervisor.on_packet(2, {"type": "join", "most": 4, "stage": -1, "gpu": "GPU-0"})
    supervisor.on_packet(2, {"type": "join", "stage": 0})
    devices = [(worker.device, worker.device_room) for worker in supervisor.state.workers]
    supervisor.close()
    folder.close()
    selector.close()
    assert devices == [("a/GPU-0", 1), ("a/GPU-1", 1), ("a/GPU-0", 1)]
