"""Membership is decided purely: scripts of events, and random schedules against a model of obedient workers."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan.membership import (
    Abort,
    Action,
    Change,
    Died,
    Dismiss,
    End,
    Event,
    Failed,
    Finished,
    Form,
    Joined,
    Kill,
    Leaving,
    Lost,
    Policy,
    Ready,
    Scaled,
    Spawn,
    State,
    Stop,
    Tick,
    begin,
    decide,
)


def play(state: State, *events: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more, _ = decide(state, event, now)
        actions += more
    return state, actions


def running(size: int, policy: Policy | None = None) -> State:
    state, (spawn,), _ = begin(size, policy)
    assert spawn == Spawn(tuple(range(size)))
    state, actions = play(state, *(Joined(id) for id in range(size)))
    assert actions == [Form(0, tuple(range(size)))]
    return state


def test_the_first_generation_is_formed_when_all_have_joined() -> None:
    state, _, _ = begin(3)
    state, actions = play(state, Joined(2), Joined(0))
    assert actions == []
    state, actions = play(state, Joined(1))
    assert actions == [Form(0, (0, 1, 2))]


def test_a_death_aborts_the_others_and_the_survivors_go_on_alone() -> None:
    state, actions = play(running(3), Died(1, "was killed by signal 9"))
    assert actions == [Abort((0, 2), 0, "worker 1 was killed by signal 9"), Spawn((3,))]
    state, actions = play(state, Ready(2, 0), Joined(3))
    assert actions == []
    state, actions = play(state, Ready(0, 0))
    assert actions == [Form(1, (0, 2)), Change((0, 2), 1)]  # the newcomer came during the recovery
    state, actions = play(state, Ready(0, 1), Ready(2, 1))
    assert actions == [Form(2, (0, 2, 3))]


def test_a_death_during_a_recovery_needs_no_second_abort() -> None:
    state, _ = play(running(4), Died(1, "died"), Ready(0, 0))
    state, actions = play(state, Died(2, "died"))
    assert not any(isinstance(action, Abort) for action in actions)
    state, actions = play(state, Ready(3, 0))
    assert Form(1, (0, 3)) in actions


def test_a_member_that_dies_last_to_be_ready_completes_the_recovery() -> None:
    state, _ = play(running(3), Died(1, "died"), Ready(0, 0))
    _, actions = play(state, Died(2, "died"))
    assert Form(1, (0,)) in actions


def test_a_newcomer_waits_for_a_change_at_a_boundary() -> None:
    state, actions = play(running(2), Scaled(3), Joined(2))
    assert actions == [Spawn((2,)), Change((0, 1), 0)]
    state, actions = play(state, Ready(1, 0), Ready(0, 0))
    assert actions == [Form(1, (0, 1, 2))]


def test_a_death_during_a_change_forms_from_survivors_and_changes_again() -> None:
    state, _ = play(running(3, Policy(respawn=False)), Scaled(4), Joined(3), Ready(0, 0))
    state, actions = play(state, Died(1, "died"))
    assert actions == [Abort((0, 2), 0, "worker 1 died")]
    state, actions = play(state, Ready(2, 0))
    assert actions == [Form(1, (0, 2)), Change((0, 2), 1)]


def test_scaling_down_lets_the_last_ranks_leave_at_a_boundary() -> None:
    state, actions = play(running(3), Scaled(2))
    assert actions == [Change((0, 1, 2), 0)]
    state, actions = play(state, Ready(0, 0), Ready(1, 0), Ready(2, 0))
    assert actions == [Dismiss(2, "it was asked to leave"), Form(1, (0, 1))]
    state, actions = play(state, Finished(2), Died(2, "exited with code 0"))
    assert actions == []


def test_a_worker_that_wants_to_leave_is_left_out_and_not_replaced() -> None:
    state, actions = play(running(2), Leaving(0), Ready(0, 0), Ready(1, 0))
    assert actions == [Change((0, 1), 0), Dismiss(0, "it was asked to leave"), Form(1, (1,))]
    _, actions = play(state, Died(0, "exited with code 0"))
    assert actions == []


def test_one_that_stands_still_is_killed_when_others_say_so() -> None:
    state, actions = play(running(3), Lost(0, 0, (2,), hung=True, why="rank 2 never sent bucket 1"))
    assert isinstance(actions[0], Kill)
    assert actions[0].worker == 2
    assert isinstance(actions[1], Abort)
    state, actions = play(state, Lost(1, 0, (2,), hung=True, why="the same"))
    assert [type(action) for action in actions] == [Kill]


def test_one_that_never_leaves_a_broken_generation_is_killed() -> None:
    state, _ = play(running(3, Policy(hang_timeout_s=5)), Died(0, "died"), Ready(1, 0), now=100.0)
    assert play(state, Tick(), now=104.0)[1] == []
    _, actions = play(state, Tick(), now=106.0)
    assert [action.worker for action in actions if isinstance(action, Kill)] == [2]


def test_a_script_that_raises_before_training_ends_the_run_at_once() -> None:
    state, _, _ = begin(4)
    _, actions = play(state, Failed(2, -1, "NameError: x"))
    assert isinstance(actions[0], End)
    assert actions[0].code == 1


def test_a_script_that_raises_once_is_a_fault_twice_at_a_step_a_bug() -> None:
    state, actions = play(running(3), Failed(1, 7, "ValueError: y"), Died(1, "exited with code 1"))
    assert not any(isinstance(action, End) for action in actions)
    _, actions = play(state, Failed(2, 7, "ValueError: y"))
    assert isinstance(actions[0], End)
    _, actions = play(state, Failed(2, 9, "ValueError: y"))
    assert actions == []


def test_all_at_once_ends_the_run() -> None:
    _, actions = play(running(2), Died(0, "was killed by signal 9"), Died(1, "was killed by signal 9"))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1


def test_the_end_of_the_script_everywhere_ends_the_run_well() -> None:
    state, actions = play(running(2), Finished(0), Died(0, "exited with code 0"))
    assert actions == []
    _, actions = play(state, Finished(1), Died(1, "exited with code 0"))
    assert actions[-1] == End(0, "all workers have finished")


def test_a_latecomer_is_dismissed_when_the_run_is_over() -> None:
    state, _ = play(running(2), Died(1, "died"), Ready(0, 0), Finished(0))
    _, actions = play(state, Joined(2))
    assert actions == [Dismiss(2, "the run is over")]


def test_respawns_are_bounded_and_backed_off() -> None:
    state = running(2, Policy(max_respawns=5))
    delays = []
    for worker in range(1, 12):
        state, actions = play(state, Died(worker, "died")) if state.worker(worker) else (state, [])
        delays += [action.delay_s for action in actions if isinstance(action, Spawn)]
    assert delays == [0.0, 0.0, 0.0, 0.25, 0.5]
    assert play(running(2, Policy(respawn=False)), Died(1, "died"))[1] == [Abort((0,), 0, "worker 1 died")]


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 6), st.integers(0, 2**32).map(Random))
def test_whatever_happens_survivors_are_never_stuck(size: int, random: Random) -> None:
    """Workers obey; faults come at random. As long as a member lives, a generation is running or will be formed."""
    state, actions, _ = begin(size, Policy(max_respawns=4))
    todo = list(actions)
    starting: list[int] = []
    owed: list[Event] = []  # what workers will say, in some order
    number = -1
    for _ in range(200):
        while todo:
            action = todo.pop(0)
            if isinstance(action, Spawn):
                starting += action.workers
                owed += [Joined(id) for id in action.workers]
            elif isinstance(action, (Abort, Change)):
                owed = [e for e in owed if not isinstance(e, Ready)]
                owed += [Ready(id, action.generation) for id in action.workers]
            elif isinstance(action, Form):
                assert action.number == number + 1
                number = action.number
                assert len(set(action.members)) == len(action.members) > 0
                assert all(state.worker(id) for id in action.members)
                owed = [e for e in owed if not isinstance(e, Ready)]
            elif isinstance(action, Dismiss):
                owed += [Finished(action.worker), Died(action.worker, "exited")] if False else [Died(action.worker, "exited")]
            elif isinstance(action, End):
                assert not state.members or action.code == 0
                return
        alive = [worker.id for worker in state.workers]
        if random.random() < 0.15:
            event: Event = Died(random.choice(alive), "was killed")
        elif random.random() < 0.05:
            event = Scaled(random.randint(1, 6))
        elif owed:
            event = owed.pop(random.randrange(len(owed)))
        else:
            assert state.members, "nobody owes anything, and nobody trains"
            assert state.broken_at is None
            assert not state.changing
            event = Tick()
        state, more, _ = decide(state, event, 0.0)
        todo += more


def test_who_does_not_come_at_the_start_while_others_wait_is_killed_and_replaced() -> None:
    state, actions, _ = begin(3, Policy(hang_timeout_s=30))
    assert decide(state, Tick(), 1000.0)[1] == ()  # nobody waits: all may be importing for long
    for worker, now in ((0, 1000.0), (2, 1020.0)):
        state, actions, _ = decide(state, Joined(worker), now)
        assert actions == ()
    assert decide(state, Tick(), 1049.0)[1] == ()
    state, actions, _ = decide(state, Tick(), 1051.0)
    assert [type(action) for action in actions] == [Kill]
    assert actions[0].worker == 1
    assert decide(state, Tick(), 1052.0)[1] == ()
    state, actions, _ = decide(state, Died(1, "was killed by SIGKILL"), 1053.0)
    assert actions == (Spawn((3,), 0.0),)
    assert decide(state, Tick(), 1082.0)[1] == ()  # the new one has its time
    state, actions, _ = decide(state, Joined(3), 1083.0)
    assert actions == (Form(0, (0, 2, 3)),)


def test_where_all_members_are_late_none_is_killed_for_long() -> None:
    """A machine that swaps: killing everybody would lose the state for nobody's sake."""
    state, _ = play(running(3), Died(2, "was killed by SIGKILL"))
    assert decide(state, Tick(), 100.0)[1] == ()
    assert len(decide(state, Tick(), 301.0)[1]) == 2  # ten times --hang-timeout: the run must not hang for ever
    state, _, _ = decide(state, Ready(0, 0, 5), 100.0)
    assert decide(state, Tick(), 129.0)[1] == ()
    assert [action.worker for action in decide(state, Tick(), 131.0)[1]] == [1]


def test_a_member_that_does_not_leave_for_a_change_while_others_wait_is_killed() -> None:
    """A worker that is stopped after the last bucket of the step: the others have left, and miss nothing from it."""
    state, _ = play(running(3), Scaled(4), Joined(3))
    assert state.changing
    assert decide(state, Tick(), 1000.0)[1] == ()  # nobody has left yet: a step may take long
    state, _, _ = decide(state, Ready(0, 0, 5), 1000.0)
    state, _, _ = decide(state, Ready(2, 0, 5), 1010.0)
    assert decide(state, Tick(), 1039.0)[1] == ()
    state, actions, _ = decide(state, Tick(), 1041.0)
    assert [action.worker for action in actions if isinstance(action, Kill)] == [1]
    assert decide(state, Tick(), 1042.0)[1] == ()
    state, actions, _ = decide(state, Died(1, "was killed by SIGKILL"), 1043.0)
    assert Form(1, (0, 2)) in actions


def test_where_all_want_to_leave_they_are_stopped_together() -> None:
    """So that they can save."""
    state, actions = play(running(2), Leaving(0))
    assert actions == [Change((0, 1), 0)]
    late, actions = play(state, Leaving(1))
    assert actions == [Stop((0, 1))]
    state, _ = play(late, Ready(0, 0, 5))
    state, actions = play(state, Ready(1, 0, 5))  # they had heard of the change before
    assert actions == [Form(1, (0, 1)), Stop((0, 1))]
    state, actions = play(state, Finished(0), Finished(1), Died(0, "exited with code 0"), Died(1, "exited with code 0"))
    assert actions[-1] == End(0, "all workers have finished")
