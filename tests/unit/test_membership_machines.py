"""The rules of membership for several machines: machines that come and go, and what a new head learns from the agents."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from lockstep.cluster.run_memory import RunMemory
from lockstep.launcher.environment import RunSettings
from lockstep.plan.membership import decide
from lockstep.plan.membership_events import (
    Abort,
    Died,
    Form,
    JoinRequested,
    MachineJoined,
    MachineLost,
    Ready,
    ScaleRequested,
    Spawn,
    StopAll,
)
from lockstep.plan.membership_recovery import MachineReport, WorkerReport, has_majority, is_complete, missing_members, recover
from lockstep.plan.membership_state import Policy, Status
from tests.unit.test_membership import connected, newcomer, play, reports, running


def test_a_machine_that_is_lost_takes_its_workers_with_it_and_they_are_not_replaced() -> None:
    state, actions = play(replace(running(6), room=6), MachineLost((4, 5), 2, "machine c is lost"))
    assert actions == [Abort((0, 1, 2, 3, 5), 0, "worker 4 died (machine c is lost)")]
    state, actions = play(state, *(Ready(id, 0, 3) for id in range(4)))
    assert actions == [Form(1, (0, 1, 2, 3))]
    assert state.size == 4


def test_a_machine_that_comes_starts_workers_which_join_at_a_boundary() -> None:
    state, actions = play(replace(running(2), room=2), MachineJoined("b", 2))
    assert actions == [Spawn((2, 3))]
    assert reports(replace(running(2), room=2), MachineJoined("b", 2)) == ["machine b has joined with 2 workers"]
    state, actions = play(state, JoinRequested(2), newcomer(2))
    assert state.size == 4
    assert Form(1, (0, 1, 2)) in play(state, Ready(0, 0, 1), Ready(1, 0, 1))[1]


def test_a_worker_of_a_lost_machine_that_was_about_to_be_replaced_is_not_started() -> None:
    state, actions = play(replace(running(4), room=4), Died(3, "SIGKILL"))
    assert Spawn((4,)) in actions
    state, _ = play(state, MachineLost((2,), 2, "machine b is lost"))
    state, actions = play(state, Died(4, "there was no room for it"))
    assert not any(isinstance(action, Spawn) for action in actions)
    assert Form(1, (0, 1)) in play(state, Ready(0, 0, 1), Ready(1, 0, 1))[1]


def test_a_run_that_was_scaled_down_keeps_its_size_when_machines_come_and_go() -> None:
    state = replace(running(4), room=4)
    state, _ = play(state, ScaleRequested(2))
    state, _ = play(
        state, Ready(0, 0, 1), Ready(1, 0, 1), Ready(2, 0, 1), Ready(3, 0, 1), Died(2, "exit code 0"), Died(3, "exit code 0")
    )
    state, _ = play(state, MachineLost((), 2, "machine b is lost"))
    assert state.size == 2
    state, actions = play(state, MachineJoined("b", 2))
    assert (state.size, actions) == (2, [])


def test_without_a_run_a_lost_machine_restarts_the_others_with_fewer_workers() -> None:
    state, actions = play(replace(connected(4), room=4), MachineLost((2, 3), 2, "machine b is lost"))
    assert StopAll((0, 1, 3)) in actions or StopAll((0, 1)) in actions
    said = reports(replace(connected(4), room=4), MachineLost((2, 3), 2, "machine b is lost"))
    assert said == ["machine b is lost. All workers are stopped and start again (restart 1 of 3)"]
    state, actions = play(state, Died(0, "SIGTERM"), Died(1, "SIGTERM"), Died(3, "SIGTERM"))
    assert Spawn((4, 5)) in actions


SETTINGS = RunSettings(2, ledger=False, hang_timeout_s=3.0, restarts=0, max_restarts=3, debug_rank=None, threads=3)


def member(id: int, **facts: object) -> WorkerReport:
    return replace(WorkerReport(id, 100 + id, has_joined=True), **facts)  # type: ignore[arg-type]


def report(*workers: WorkerReport, generation: int = 3, members: tuple[int, ...] = (0, 1, 2, 3)) -> MachineReport:
    return MachineReport(2, workers, generation, members, stage=1, committed=17, max_members=8, next_id=6, has_joined=True)


def test_a_new_head_that_finds_all_members_leaves_the_generation_as_it_is() -> None:
    both = [report(member(0), member(1)), report(member(2), member(3))]
    (state, actions, _), dropped = recover(Policy(), both, 0.0)
    assert (actions, dropped) == ((), ())
    assert (state.generation, state.members, state.size, state.next_id, state.stage) == (3, (0, 1, 2, 3), 4, 6, 1)
    _, actions, _ = decide(state, Died(3, "SIGKILL"), 0.0)
    assert Abort((0, 1, 2), 3, "worker 3 (pid 103) died (SIGKILL)") in actions
    assert any(isinstance(action, Spawn) and action.workers == (6,) for action in actions)


def test_a_new_head_breaks_a_generation_that_lacks_a_member_and_fills_the_room() -> None:
    both = [report(member(0), member(1)), report(member(2))]
    assert missing_members(both) == [3]
    (state, actions, _), _ = recover(Policy(), both, 0.0)
    assert Abort((0, 1, 2), 3, "the head was replaced, and members are lost") in actions
    assert Spawn((6,)) in actions
    state, actions = play(state, *(Ready(id, 3, 17) for id in range(3)))
    assert actions == [Form(4, (0, 1, 2))]


@pytest.mark.parametrize("facts", [{"is_unsettled": True}, {"ready_generation": 3, "steps": 17}])
def test_a_new_head_breaks_a_generation_in_which_a_member_waits_for_it(facts: dict[str, object]) -> None:
    both = [report(member(0, **facts), member(1)), report(member(2), member(3))]
    (state, actions, _), _ = recover(Policy(), both, 0.0)
    assert actions == (Abort((0, 1, 2, 3), 3, "the head was replaced"),)
    state, actions = play(state, *(Ready(id, 3, 17) for id in range(4)))
    assert Form(4, (0, 1, 2, 3)) in actions


def test_a_new_head_takes_the_newest_generation_and_starts_newcomers_again() -> None:
    both = [report(member(0), member(1), generation=2), report(member(2), member(5), members=(0, 1, 2))]
    (state, actions, _), dropped = recover(Policy(), both, 0.0)
    assert (state.generation, state.members, dropped) == (3, (0, 1, 2), (5,))
    assert Spawn((6,)) in actions


def test_before_the_first_generation_a_new_head_waits_for_all_workers() -> None:
    both = [report(member(0), generation=-1, members=()), report(WorkerReport(1), generation=-1, members=())]
    both = [replace(each, room=1) for each in both]
    (state, actions, _), _ = recover(Policy(), both, 0.0)
    assert actions == ()
    assert [worker.status for worker in state.workers] == [Status.WAITING, Status.STARTING]
    assert play(state, JoinRequested(1))[1] == [Form(0, (0, 1))]


def test_two_disjoint_parts_of_a_run_never_both_have_a_majority() -> None:
    for size in range(1, 8):
        members = tuple(range(size))
        for count in range(size + 1):
            for part in combinations(members, count):
                rest = [id for id in members if id not in part]
                assert not (has_majority(members, part) and has_majority(members, rest))
                assert has_majority(members, part) or has_majority(members, rest)


def test_an_agent_remembers_what_its_workers_and_the_head_have_said() -> None:
    memory = RunMemory()
    memory.spawned({4: 0, 5: 1}, SETTINGS)
    memory.started(4, 44)
    memory.on_packet(4, {"type": "join", "most": 8, "stage": -1})
    memory.on_answer([4], {"type": "generation", "number": 2, "members": [0, 4]})
    memory.on_packet(4, {"type": "store", "op": "get", "id": 0, "generation": 2, "keys": ["a"]})
    assert memory.report(2).workers[0].is_unsettled
    assert memory.unanswered() == [(4, {"type": "store", "op": "get", "id": 0, "generation": 2, "keys": ["a"]})]
    memory.on_answer([4], {"type": "stored", "id": 0, "generation": 2, "value": ["x"]})
    memory.on_packet(4, {"type": "progress", "step": 9})
    memory.on_packet(4, {"type": "ready", "generation": 2, "step": 10})
    found = memory.report(2)
    assert found == MachineReport(
        2,
        (WorkerReport(4, 44, has_joined=True, ready_generation=2, steps=10), WorkerReport(5)),
        generation=2,
        members=(0, 4),
        committed=10,
        max_members=8,
        next_id=6,
        has_joined=True,
        started=2,
    )
    memory.gone(4)
    assert [worker.id for worker in memory.report(2).workers] == [5]


def test_a_new_head_takes_workers_that_were_not_told_of_the_newest_generation_for_ready() -> None:
    told, untold = report(member(0)), report(member(1, ready_generation=2, steps=17), generation=2, members=(0, 1, 2))
    told = replace(told, members=(0, 1))
    (state, actions, _), _ = recover(Policy(), [told, untold], 0.0)
    assert Abort((0, 1), 3, "the head was replaced") in actions
    assert Form(4, (0, 1)) in play(state, Ready(0, 3, 17))[1]


def test_a_new_head_replaces_nobody_if_the_policy_forbids_it() -> None:
    (_, actions, _), _ = recover(Policy(respawn=False), [report(member(0), member(1)), report(member(2))], 0.0)
    assert not any(isinstance(action, Spawn) for action in actions)


def test_a_new_head_leaves_a_script_without_a_run_alone_unless_workers_are_lost() -> None:
    parts = [
        MachineReport(2, (WorkerReport(0, 10), WorkerReport(1, 11)), next_id=2, needs_peers=True, started=4),
        MachineReport(2, (WorkerReport(2, 12), WorkerReport(3, 13)), next_id=4, needs_peers=True, started=4),
    ]
    assert is_complete(parts)
    assert not is_complete(parts[:1])
    assert recover(Policy(), [*parts, MachineReport(2)], 0.0)[0][1] == ()
    assert StopAll((0, 1)) in recover(Policy(), parts[:1], 0.0)[0][1]


def test_an_agent_repeats_that_a_member_is_gone_until_a_generation_is_formed_without_it() -> None:
    memory = RunMemory()
    memory.spawned({0: 0, 1: 1}, SETTINGS)
    memory.on_answer([0, 1], {"type": "generation", "number": 0, "members": [0, 1]})
    memory.on_packet(1, {"type": "finished"})
    memory.exited(1, {"type": "exited", "worker": 1})
    assert [worker.finished for worker in memory.report(2).workers] == [False, True]
    assert memory.exits == [{"type": "exited", "worker": 1}]
    memory.on_answer([0], {"type": "generation", "number": 1, "members": [0]})
    assert [worker.id for worker in memory.report(2).workers] == [0]
    assert memory.exits == []
    memory.spawned({2: 0}, SETTINGS)
    assert (memory.main_worker, memory.threads) == (0, 3)
    memory.exited(2, {"type": "exited", "worker": 2})
    assert memory.exits == []


def test_an_agent_keeps_the_results_that_its_workers_send_until_their_epoch_is_over() -> None:
    memory = RunMemory()
    for index in range(4):
        memory.on_packet(0, {"type": "recorded", "index": index, "part": 0, "parts": 1, "data": "x"})
    memory.on_packet(0, {"type": "epoch", "number": 0, "epoch": 1, "first": 1, "keep": 3})
    assert [packet.get("index") for packet in memory.kept] == [0, 3, None]
