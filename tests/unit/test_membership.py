"""The rules of membership, on sequences of events and on random schedules with a model of workers that obey."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan.membership import begin, decide
from lockstep.plan.membership_events import (
    Abort,
    Action,
    AloneBegan,
    AloneEnded,
    Change,
    Committed,
    Died,
    Dismiss,
    End,
    Event,
    Form,
    JoinRequested,
    Kill,
    LeaveRequested,
    PeersLost,
    PostponeTimeouts,
    Prepare,
    RankRead,
    Ready,
    Report,
    ScaleRequested,
    ScriptFinished,
    ScriptRaised,
    SkipLoop,
    Spawn,
    StageEntered,
    StartAgain,
    Stop,
    StopAll,
    Tick,
)
from lockstep.plan.membership_state import Policy, State


def play_all(state: State, *events: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more, _ = decide(state, event, now)
        actions += more
    return state, actions


def play(state: State, *events: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    """As ``play_all``, without what is only shown to people."""
    state, actions = play_all(state, *events, now=now)
    return state, [action for action in actions if not isinstance(action, Report)]


def reports(state: State, *events: Event, now: float = 0.0) -> list[str]:
    return [action.text for action in play_all(state, *events, now=now)[1] if isinstance(action, Report)]


def running(size: int, policy: Policy | None = None) -> State:
    state, (spawn,), _ = begin(size, policy)
    assert spawn == Spawn(tuple(range(size)))
    state, actions = play(state, *(JoinRequested(id) for id in range(size)))
    assert actions == [Form(0, tuple(range(size)))]
    state, actions = play(state, StageEntered(0, 0))
    assert actions == []
    return state


def newcomer(id: int, pid: int | None = None) -> JoinRequested:
    """It has set up, and waits at the entry of the loop that the others are in."""
    return JoinRequested(id, pid=pid, stage=0)


def test_the_first_generation_is_formed_when_all_have_joined() -> None:
    state, _, _ = begin(3)
    state, actions = play(state, JoinRequested(2), JoinRequested(0))
    assert actions == []
    state, actions = play(state, JoinRequested(1))
    assert actions == [Form(0, (0, 1, 2))]


def test_a_death_aborts_the_others_and_the_survivors_continue_alone() -> None:
    state, actions = play(running(3), Died(1, "SIGKILL"))
    assert actions == [Abort((0, 2), 0, "worker 1 died (SIGKILL)"), Spawn((3,))]
    state, actions = play(state, Ready(2, 0), newcomer(3))
    assert actions == []
    state, actions = play(state, Ready(0, 0))
    assert actions == [Form(1, (0, 2)), Change((0, 2), 1)]  # the newcomer came during the recovery
    state, actions = play(state, Ready(0, 1), Ready(2, 1))
    assert actions == [Form(2, (0, 2, 3))]


def test_a_death_during_a_recovery_needs_no_second_abort() -> None:
    state, _ = play(running(4), Died(1, "SIGKILL"), Ready(0, 0))
    state, actions = play(state, Died(2, "SIGKILL"))
    assert not any(isinstance(action, Abort) for action in actions)
    state, actions = play(state, Ready(3, 0))
    assert Form(1, (0, 3)) in actions


def test_a_member_that_dies_last_to_be_ready_completes_the_recovery() -> None:
    state, _ = play(running(3), Died(1, "SIGKILL"), Ready(0, 0))
    _, actions = play(state, Died(2, "SIGKILL"))
    assert Form(1, (0,)) in actions


def test_a_newcomer_waits_for_a_change_at_a_boundary() -> None:
    state, actions = play(running(2), ScaleRequested(3), newcomer(2))
    assert actions == [Spawn((2,)), Change((0, 1), 0)]
    state, actions = play(state, Ready(1, 0), Ready(0, 0))
    assert actions == [Form(1, (0, 1, 2))]


def test_a_death_during_a_change_forms_from_survivors_and_changes_again() -> None:
    state, _ = play(running(3, Policy(respawn=False)), ScaleRequested(4), newcomer(3), Ready(0, 0))
    state, actions = play(state, Died(1, "SIGKILL"))
    assert actions == [Abort((0, 2), 0, "worker 1 died (SIGKILL)")]
    state, actions = play(state, Ready(2, 0))
    assert actions == [Form(1, (0, 2)), Change((0, 2), 1)]


def test_scaling_down_lets_the_last_ranks_leave_at_a_boundary() -> None:
    state, actions = play(running(3), ScaleRequested(2))
    assert actions == [Change((0, 1, 2), 0)]
    state, actions = play(state, Ready(0, 0), Ready(1, 0), Ready(2, 0))
    assert actions == [Dismiss(2, "it was asked to leave"), Form(1, (0, 1))]
    state, actions = play(state, ScriptFinished(2), Died(2, "exit code 0", exited=True))
    assert actions == []


def test_scaling_down_keeps_as_many_workers_as_were_asked_for_although_one_leaves_already() -> None:
    _, actions = play(running(2), LeaveRequested(0), ScaleRequested(1), Ready(0, 0), Ready(1, 0))
    assert actions == [Change((0, 1), 0), Dismiss(0, "it was asked to leave"), Form(1, (1,))]


def test_a_worker_that_wants_to_leave_is_left_out_and_not_replaced() -> None:
    state, actions = play(running(2), LeaveRequested(0), Ready(0, 0), Ready(1, 0))
    assert actions == [Change((0, 1), 0), Dismiss(0, "it was asked to leave"), Form(1, (1,))]
    _, actions = play(state, Died(0, "exit code 0", exited=True))
    assert actions == []


def test_a_worker_that_hangs_is_killed_when_other_workers_report_it() -> None:
    state, actions = play(running(3), PeersLost(0, 0, (2,), hung=True, why="rank 2 never sent bucket 1"))
    assert isinstance(actions[0], Kill)
    assert actions[0].worker == 2
    assert isinstance(actions[1], Abort)
    state, actions = play(state, PeersLost(1, 0, (2,), hung=True, why="the same"))
    assert actions == []  # it is killed once


def test_a_worker_that_never_leaves_a_broken_generation_is_killed() -> None:
    state, _ = play(running(3, Policy(hang_timeout_s=5)), Died(0, "SIGKILL"), Ready(1, 0), now=100.0)
    assert play(state, Tick(), now=104.0)[1] == []
    _, actions = play(state, Tick(), now=106.0)
    assert [action.worker for action in actions if isinstance(action, Kill)] == [2]


def test_a_script_that_raises_before_training_ends_the_run_at_once() -> None:
    state, _, _ = begin(4)
    _, actions = play(state, ScriptRaised(2, -1, "NameError: x"))
    assert isinstance(actions[0], End)
    assert actions[0].code == 1


def test_a_script_that_raises_once_is_a_fault_but_twice_at_a_step_it_is_a_bug() -> None:
    state, actions = play(running(3), ScriptRaised(1, 7, "ValueError: y"), Died(1, "exit code 1", exited=True))
    assert not any(isinstance(action, End) for action in actions)
    _, actions = play(state, ScriptRaised(2, 7, "ValueError: y"))
    assert isinstance(actions[0], End)
    _, actions = play(state, ScriptRaised(2, 9, "ValueError: y"))
    assert actions == []


def test_the_death_of_all_workers_ends_the_run() -> None:
    _, actions = play(running(2), Died(0, "SIGKILL"), Died(1, "SIGKILL"))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1


def test_the_run_succeeds_when_the_script_has_finished_on_every_worker() -> None:
    state, actions = play(running(2), ScriptFinished(0), Died(0, "exit code 0", exited=True))
    assert actions == []
    _, actions = play(state, ScriptFinished(1), Died(1, "exit code 0", exited=True))
    assert actions[-1] == End(0, "all workers have finished")


def test_a_worker_that_dies_behind_the_last_loop_is_named_whether_others_exit_before_or_after_it() -> None:
    finished = ScriptFinished(0), Died(0, "exit code 0", exited=True)
    killed = Died(1, "SIGKILL")
    for order in ((*finished, killed), (finished[0], killed, finished[1]), (killed, *finished)):
        _, actions = play(running(2, Policy(respawn=False)), *order)
        end = actions[-1]
        assert isinstance(end, End)
        assert end.code == 1
        assert "worker 1 died (SIGKILL) before the end of the script" in end.why


def test_a_worker_that_joins_after_the_script_has_finished_elsewhere_is_dismissed() -> None:
    state, _ = play(running(2), Died(1, "SIGKILL"), Ready(0, 0), ScriptFinished(0))
    _, actions = play(state, JoinRequested(2))
    assert actions == [Dismiss(2, "the run is over")]


def test_respawns_are_bounded_and_backed_off() -> None:
    state = running(2, Policy(max_respawns=5))
    delays = []
    for worker in range(1, 12):
        state, actions = play(state, Died(worker, "SIGKILL")) if state.find(worker) else (state, [])
        delays += [action.delay_s for action in actions if isinstance(action, Spawn)]
    assert delays == [0.0, 0.0, 0.0, 0.25, 0.5]
    assert play(running(2, Policy(respawn=False)), Died(1, "SIGKILL"))[1] == [Abort((0,), 0, "worker 1 died (SIGKILL)")]


def test_people_are_told_who_joined_left_or_died_and_how_many_workers_there_are() -> None:
    state, _, _ = begin(3)
    state, actions = play_all(state, *(JoinRequested(id, pid=100 + id) for id in range(3)), StageEntered(0, 0))
    assert actions == [Form(0, (0, 1, 2))]
    state, actions = play_all(state, Died(1, "SIGKILL"), Ready(0, 0), Ready(2, 0))
    assert [action.text for action in actions if isinstance(action, Report)] == [
        "worker 1 (pid 101) died: SIGKILL. 2 workers go on; a replacement is starting",
    ]
    joined, actions = play_all(state, newcomer(3, pid=103), Ready(0, 1), Ready(2, 1))
    assert Report("worker 3 (pid 103) joined. 3 workers, generation 2") in actions
    assert reports(joined, LeaveRequested(2), Ready(0, 2), Ready(2, 2), Ready(3, 2)) == [
        "worker 2 (pid 102) left. 2 workers, generation 3"
    ]
    both = (ScaleRequested(4), newcomer(4), LeaveRequested(0), Ready(0, 2), Ready(2, 2), Ready(3, 2))
    assert reports(joined, *both) == ["worker 0 (pid 100) left, worker 4 joined. 3 workers, generation 3"]


def test_a_worker_that_has_announced_its_work_is_not_killed_before_its_limit() -> None:
    state, actions = play(running(3), AloneBegan(0, "saving", 50.0), now=10.0)
    assert actions == [PostponeTimeouts((1, 2), 0, 50.0)]
    state, actions = play(state, PeersLost(1, 0, (0,), hung=True, why="rank 0 is late"), now=59.0)
    assert actions == [Abort((0, 1, 2), 0, "worker 1 lost its peers: rank 0 is late")]
    state, actions = play(state, Ready(1, 0), Ready(2, 0), now=59.0)
    assert play(state, Tick(), now=89.0)[1] == []
    (kill,) = play(state, Tick(), now=91.0)[1]
    assert isinstance(kill, Kill)
    assert "in run.alone('saving') for longer than its limit_s=50" in kill.why
    state, actions = play(state, AloneEnded(0), now=60.0)
    assert actions == [PostponeTimeouts((1, 2), 0, 0.0)]
    assert play(state, Tick(), now=89.0)[1] == []  # the hang timeout begins anew
    (kill,) = play(state, Tick(), now=91.0)[1]
    assert isinstance(kill, Kill)
    assert kill.why.endswith("--hang-timeout raises the limit, and `with run.alone(...):` announces long work of one worker")


def test_behind_the_last_loop_nobody_is_killed_while_a_worker_has_announced_its_work() -> None:
    state, _ = play(running(3), AloneBegan(0, "saving", 500.0), ScriptFinished(1))
    idle = Tick(tuple((id, 400.0) for id in range(3)))  # worker 2 may wait for worker 0
    assert play(state, idle, now=400.0)[1] == []
    state, _ = play(state, AloneEnded(0), now=400.0)
    assert play(state, idle, now=430.0)[1] == []
    assert len(play(state, idle, now=440.0)[1]) == 1


def test_what_a_newcomer_announces_concerns_nobody() -> None:
    state, _ = play(running(2), Died(1, "SIGKILL"), JoinRequested(2))
    assert play(state, AloneBegan(2, "loading", 50.0))[1] == []


def test_people_are_told_of_hung_workers_lost_connections_and_exhausted_respawns() -> None:
    hung = PeersLost(0, 0, (1,), hung=True, why="rank 1 is late")
    assert (
        reports(running(2), hung, Ready(0, 0), Died(1, "SIGKILL"))[-1]
        == "worker 1 hung and was killed. 1 worker goes on; a replacement is starting"
    )
    lost = PeersLost(0, 0, (1,), why="connection reset")
    assert reports(running(2), lost, Ready(0, 0), Ready(1, 0)) == [
        "worker 0 lost its peers: connection reset. 2 workers, generation 1"
    ]
    limit = "no replacement is started: --max-respawns allows 0 replacements in 5 minutes"
    assert reports(running(2, Policy(max_respawns=0)), Died(1, "SIGKILL")) == [f"worker 1 died: SIGKILL. 1 worker goes on; {limit}"]


def test_a_worker_that_left_does_not_keep_others_from_joining_or_being_replaced() -> None:
    """Its script ends early, which is not the end of the run."""
    state, _ = play(running(3), ScaleRequested(2), *(Ready(id, 0) for id in range(3)))
    state, _ = play(state, ScriptFinished(2), Died(2, "exit code 0", exited=True))
    _, actions = play(state, Died(1, "SIGKILL"))
    assert Spawn((3,)) in actions
    state, actions = play(state, ScaleRequested(3), newcomer(3))
    assert actions == [Spawn((3,)), Change((0, 1), 1)]


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 6), st.integers(0, 2**32).map(Random))
def test_whatever_happens_survivors_are_never_stuck(size: int, random: Random) -> None:
    """Workers obey, and faults are random. While a member lives, a generation runs or will be formed."""
    state, actions, _ = begin(size, Policy(max_respawns=4))
    todo = list(actions)
    starting: list[int] = []
    owed: list[Event] = []  # what workers will report, in any order
    number, steps, stage = -1, 0, 0
    for _ in range(200):
        while todo:
            action = todo.pop(0)
            if isinstance(action, Spawn):
                starting += action.workers
                owed += [JoinRequested(id) for id in action.workers]
            elif isinstance(action, Prepare):
                assert state.generation >= 0
                owed.append(JoinRequested(action.worker, stage=random.choice([stage, stage, max(0, stage - 1)])))
            elif isinstance(action, SkipLoop):
                assert action.stage < stage
                owed.append(JoinRequested(action.worker, stage=stage))
            elif isinstance(action, (Abort, Change)):
                owed = [e for e in owed if not isinstance(e, Ready)]
                owed += [Ready(id, action.generation, steps + isinstance(action, Change)) for id in action.workers]
                steps += isinstance(action, Change)  # they leave after a step
            elif isinstance(action, Form):
                assert action.number == number + 1
                number = action.number
                assert len(set(action.members)) == len(action.members) > 0
                assert all(state.find(id) for id in action.members)
                owed = [e for e in owed if not isinstance(e, Ready)]
                steps += 1
                owed += [Committed(action.members[0], steps), StageEntered(action.members[0], stage)]
            elif isinstance(action, Dismiss):
                owed += [Died(action.worker, "exit code 0")]
            elif isinstance(action, End):
                assert not state.members or action.code == 0
                return
        alive = [worker.id for worker in state.workers]
        if random.random() < 0.15:
            event: Event = Died(random.choice(alive), "SIGKILL")
        elif random.random() < 0.05:
            event = ScaleRequested(random.randint(1, 6))
        elif state.members and random.random() < 0.05:
            stage += 1
            event = StageEntered(state.members[0], stage)
        elif owed:
            event = owed.pop(random.randrange(len(owed)))
        else:
            assert state.members, "no report is due, and no worker trains"
            assert state.broken_at is None
            assert not state.changing
            event = Tick()
        state, more, _ = decide(state, event, 0.0)
        todo += more


def test_a_worker_that_does_not_join_at_the_start_while_others_wait_is_killed_and_replaced() -> None:
    state, actions, _ = begin(3, Policy(hang_timeout_s=30))
    assert decide(state, Tick(), 1000.0)[1] == ()  # no worker waits: all of them may import for a long time
    for worker, now in ((0, 1000.0), (2, 1020.0)):
        state, actions, _ = decide(state, JoinRequested(worker), now)
        assert actions == ()
    assert decide(state, Tick(), 1049.0)[1] == ()
    state, actions, _ = decide(state, Tick(), 1051.0)
    assert [type(action) for action in actions] == [Kill]
    assert actions[0].worker == 1
    assert decide(state, Tick(), 1052.0)[1] == ()
    state, actions = play(state, Died(1, "SIGKILL"), now=1053.0)
    assert actions == [Spawn((3,), 0.0)]
    assert decide(state, Tick(), 1082.0)[1] == ()  # the replacement has its own time
    state, actions, _ = decide(state, JoinRequested(3), 1083.0)
    assert actions == (Form(0, (0, 2, 3)),)


def test_if_all_members_are_late_none_is_killed_for_a_long_time() -> None:
    """The machine swaps: to kill all workers would lose the training state and help nobody."""
    state, _ = play(running(3), Died(2, "SIGKILL"))
    assert decide(state, Tick(), 100.0)[1] == ()
    assert decide(state, Tick(((0, 20.0), (1, 301.0))), 299.0)[1] == ()
    killed = decide(state, Tick(((0, 20.0), (1, 301.0))), 301.0)[1]  # ten times --hang-timeout: the run must not hang forever
    assert [action.worker for action in killed] == [1]  # but who works may be behind the last loop
    state, _, _ = decide(state, Ready(0, 0, 5), 100.0)
    assert decide(state, Tick(), 129.0)[1] == ()
    assert [action.worker for action in decide(state, Tick(), 131.0)[1]] == [1]


def test_a_member_that_does_not_leave_for_a_change_while_others_wait_is_killed() -> None:
    """The worker was stopped after the last bucket of the step. The other members have left and wait for nothing else from it."""
    state, _ = play(running(3), StageEntered(0, 0), ScaleRequested(4), JoinRequested(3), JoinRequested(3, stage=0))
    assert state.changing
    assert decide(state, Tick(), 1000.0)[1] == ()  # no member has left yet: a step may take long
    state, _, _ = decide(state, Ready(0, 0, 5), 1000.0)
    state, _, _ = decide(state, Ready(2, 0, 5), 1010.0)
    assert decide(state, Tick(), 1039.0)[1] == ()
    state, actions, _ = decide(state, Tick(), 1041.0)
    assert [action.worker for action in actions if isinstance(action, Kill)] == [1]
    assert decide(state, Tick(), 1042.0)[1] == ()
    state, actions, _ = decide(state, Died(1, "SIGKILL"), 1043.0)
    assert Form(1, (0, 2)) in actions


def test_if_all_workers_want_to_leave_they_are_stopped_together() -> None:
    """So that they can save."""
    state, actions = play(running(2), LeaveRequested(0))
    assert actions == [Change((0, 1), 0)]
    late, actions = play(state, LeaveRequested(1))
    assert actions == [Stop((0, 1))]
    state, _ = play(late, Ready(0, 0, 5))
    state, actions = play(state, Ready(1, 0, 5))  # they were told of the change before
    assert actions == [Form(1, (0, 1)), Stop((0, 1))]
    state, actions = play(
        state, ScriptFinished(0), ScriptFinished(1), Died(0, "exit code 0", exited=True), Died(1, "exit code 0", exited=True)
    )
    assert actions[-1] == End(0, "all workers have finished")


# -- newcomers -------------------------------------------------------------------------------------


def test_a_newcomer_prepares_and_is_taken_in_where_the_others_are() -> None:
    state, actions = play(running(2), ScaleRequested(3), JoinRequested(2))
    assert actions == [Spawn((2,)), Prepare(2, 2)]
    state, _ = play(state, StageEntered(0, 1))
    state, actions = play(state, JoinRequested(2, stage=0))
    assert actions == [SkipLoop(2, 0)]
    early, actions = play(state, JoinRequested(2, stage=2))  # it is ahead: the others have not come to that loop
    assert actions == []
    _, actions = play(early, StageEntered(0, 2))
    assert actions == [Change((0, 1), 0)]
    state, actions = play(state, JoinRequested(2, stage=1))
    assert actions == [Change((0, 1), 0)]
    _, actions = play(state, StageEntered(0, 2))  # the others enter the next loop before they have left the generation
    assert actions == [SkipLoop(2, 1)]
    state, actions = play(state, Ready(0, 0, 3), Ready(1, 0, 3))
    assert actions == [Form(1, (0, 1, 2))]


def test_only_a_member_says_which_loop_the_run_is_in_and_it_never_goes_back() -> None:
    state, _ = play(running(2), StageEntered(0, 3), ScaleRequested(3), JoinRequested(2), StageEntered(2, 7), StageEntered(1, 2))
    assert state.stage == 3


def test_a_newcomer_that_sets_up_holds_nobody_up_and_its_death_is_replaced() -> None:
    state, _ = play(running(2, Policy(hang_timeout_s=5)), Died(1, "SIGKILL"), Ready(0, 0), JoinRequested(2))
    assert decide(state, Tick(((2, 1000.0),)), 1000.0)[1] == ()
    _, actions = play(state, Died(2, "SIGKILL"))
    assert actions == [Spawn((3,))]
    _, actions = play(state, Ready(0, 1))
    assert actions == [Form(2, (0,))]


def test_a_newcomer_whose_script_ends_early_does_not_end_the_run() -> None:
    state, _ = play(running(2), ScaleRequested(3), JoinRequested(2), ScriptFinished(2), Died(2, "exit code 0", exited=True))
    _, actions = play(state, ScaleRequested(3), JoinRequested(3))
    assert actions == [Spawn((3,)), Prepare(3, 2)]


# -- the hang timeout ------------------------------------------------------------------------------


def test_a_member_that_does_not_leave_while_others_have_left_is_killed_though_nothing_is_broken() -> None:
    state, _ = play(running(3, Policy(hang_timeout_s=5)), ScaleRequested(4), newcomer(3))
    assert decide(state, Tick(), 1000.0)[1] == ()  # they are in a step
    state, _ = play(state, Ready(0, 0, 7), Ready(2, 0, 7), now=100.0)
    assert decide(state, Tick(), 104.0)[1] == ()
    state, actions = play(state, Tick(), now=106.0)
    (action,) = actions
    assert isinstance(action, Kill)
    assert action.worker == 1
    assert action.why == (
        "it did not leave generation 0 within 5 s, while 2 of 3 members waited for the next one; "
        "it was in generation 0 after 7 committed steps. --hang-timeout raises the limit, and `with run.alone(...):` announces "
        "long work of one worker"
    )
    assert decide(state, Tick(), 120.0)[1] == ()  # killed once
    _, actions = play(state, Died(1, "SIGKILL"), now=107.0)
    assert Form(1, (0, 2)) in actions


def test_behind_the_last_loop_idle_workers_are_killed_and_those_that_work_are_not() -> None:
    state, _ = play(running(3, Policy(hang_timeout_s=10)), ScriptFinished(0))
    assert decide(state, Tick(((0, 0.0), (1, 12.0), (2, 3.0))), 50.0)[1] == ()
    _, (action,), _ = decide(state, Tick(((0, 0.0), (1, 13.0), (2, 3.0))), 50.0)
    assert isinstance(action, Kill)
    assert action.worker == 1
    assert "used no CPU time for 12.5 s" in action.why
    _, actions, _ = decide(state, Tick(((0, 13.0), (1, 13.0))), 50.0)  # worker 1 may wait for worker 0, which hangs at exit
    assert [action.worker for action in actions] == [0]
    assert decide(running(2), Tick(((0, 1000.0),)), 50.0)[1] == ()  # nobody has finished


def test_workers_without_a_run_are_watched_too_once_others_have_finished() -> None:
    state, _, _ = begin(2, Policy(hang_timeout_s=10))
    state, _ = play(state, ScriptFinished(0), Died(0, "exit code 0", exited=True))
    _, actions, _ = decide(state, Tick(((1, 13.0),)), 50.0)
    assert [action.worker for action in actions] == [1]


# -- recovery without progress, and how a run ends -------------------------------------------------


def lose(state: State, step: int) -> tuple[State, list[Action]]:
    """Both members report that they lost each other in the current generation, after ``step`` committed steps."""
    number = state.generation
    lost = [PeersLost(0, number, why="rank 1 sent 3 bytes"), PeersLost(1, number, why="rank 0 sent 4 bytes")]
    return play(state, *lost, Ready(0, number, step), Ready(1, number, step))


def test_generations_without_a_commit_a_death_or_a_join_are_bounded() -> None:
    state = running(2)
    for number in range(1, 4):
        state, actions = lose(state, 0)
        assert actions[-1] == Form(number, (0, 1))
    end = lose(state, 0)[1][-1]
    assert isinstance(end, End)
    assert end.code == 1
    assert "generations 0 to 3 ended without a committed step" in end.why
    assert "worker 0: rank 1 sent 3 bytes; worker 1: rank 0 sent 4 bytes" in end.why
    for step in range(1, 10):  # with a commit in each there is no bound
        state, actions = lose(state, step)
        assert isinstance(actions[-1], Form)


def test_replacements_that_never_reach_a_commit_are_bounded_by_number() -> None:
    """However far apart they die: the window of time does not help."""
    state = running(2, Policy(max_respawns=3))
    now, worker, spawned = 0.0, 1, 0
    for _ in range(10):
        state, actions = play_all(state, Died(worker, "SIGKILL"), now=now)
        starts = [action for action in actions if isinstance(action, Spawn)]
        if not starts:
            break
        spawned += 1
        (worker,) = starts[0].workers
        now += 1000.0
        state, _ = play(state, Ready(0, state.generation, spawned), Committed(0, spawned + 1), JoinRequested(worker), now=now)
    assert spawned == 3
    limit = "3 replacements in a row died before they took part in a step (--max-respawns)"
    assert Report(f"worker 4, which was to join, died: SIGKILL. No replacement is started: {limit}") in actions


def test_a_replacement_that_took_part_in_a_step_counts_as_a_success() -> None:
    state = running(2, Policy(max_respawns=1))
    now = 0.0
    for worker in range(1, 6):
        state, actions = play(state, Died(worker, "SIGKILL"), now=now)
        assert Spawn((worker + 1,)) in actions
        now += 1000.0
        state, _ = play(
            state, Ready(0, state.generation, worker), newcomer(worker + 1), Ready(0, state.generation + 1, worker), now=now
        )
        assert state.members == (0, worker + 1)
        state, _ = play(state, Committed(0, worker + 1), now=now)


def test_workers_that_were_told_to_leave_and_are_killed_first_are_no_success() -> None:
    _, actions = play(running(2), LeaveRequested(0), LeaveRequested(1), Died(0, "SIGKILL"), Died(1, "SIGKILL"))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1


def test_a_worker_that_dies_when_others_have_finished_is_no_success() -> None:
    _, actions = play(running(2), ScriptFinished(1), Died(1, "exit code 0", exited=True), Died(0, "SIGKILL"))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1
    _, actions = play(running(2), Died(0, "SIGKILL"), ScriptFinished(1), Died(1, "exit code 0", exited=True))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1
    assert "worker 0 died (SIGKILL) before the end of the script" in actions[-1].why
    recovered, _ = play(running(2), Died(0, "SIGKILL"), Ready(1, 0, 3))  # the other worker repeats the step
    _, actions = play(recovered, ScriptFinished(1), Died(1, "exit code 0", exited=True))
    assert actions[-1] == End(0, "all workers have finished")


def test_the_same_error_at_the_same_place_ends_the_run_at_whatever_steps() -> None:
    first = ScriptRaised(1, 3, "ValueError: bad value on rank 1", "ValueError at train.py:7")
    state, actions = play(running(3), first, Died(1, "exit code 1", exited=True), Ready(0, 0, 3), Ready(2, 0, 3))
    assert not any(isinstance(action, End) for action in actions)
    _, actions = play(state, ScriptRaised(2, 9, "ValueError: other", "ValueError at train.py:7"))
    assert not any(isinstance(action, End) for action in actions)
    _, actions = play(state, ScriptRaised(3, -1, "ValueError: bad value on rank 2", "ValueError at train.py:7"))
    assert isinstance(actions[0], End)
    assert "train.py:7 on more than one worker: ValueError: bad value on rank 2" in actions[0].why


def test_a_worker_that_says_that_its_gpu_has_failed_is_reported() -> None:
    error, place = "lockstep.errors.DeviceError: cuda:1 cannot be used: CUDA error.", "DeviceError at train.py:7"
    assert reports(running(3), ScriptRaised(1, 3, error, place)) == [
        "worker 1 cannot use its GPU any more (cuda:1 cannot be used: CUDA error)"
    ]


@pytest.mark.parametrize("error", ["lockstep.errors.DeviceError: cuda:1 is broken.", "torch.AcceleratorError: CUDA error: x\ny"])
def test_gpus_that_fail_at_one_place_are_no_bug_of_the_script_unless_two_fail_at_one_step(error: str) -> None:
    place = "an error at train.py:7"
    first = ScriptRaised(1, 3, error, place)
    state, _ = play(running(3), first, Died(1, "exit code 1", exited=True), Ready(0, 0, 3), Ready(2, 0, 3))
    _, actions = play(state, ScriptRaised(2, 9, error, place))
    assert not any(isinstance(action, End) for action in actions)
    _, actions = play(state, ScriptRaised(2, 3, error, place))
    assert isinstance(actions[0], End)


def test_workers_that_were_not_replaced_are_named_at_the_end() -> None:
    state, _ = play(running(2, Policy(max_respawns=0)), Died(1, "SIGKILL"), Ready(0, 0), ScriptFinished(0))
    _, actions = play(state, Died(0, "exit code 0", exited=True))
    note = "worker 1 was not replaced: --max-respawns allows 0 replacements in 5 minutes"
    assert actions == [End(0, "all workers have finished", (note,))]


def test_a_worker_that_was_to_leave_after_scaling_down_stays_if_another_dies() -> None:
    """Otherwise no worker would be left that wants to stay, and the run would stop as if all had been asked to leave."""
    state, actions = play(running(3), ScaleRequested(1))
    assert actions == [Change((0, 1, 2), 0)]
    state, actions = play(state, Died(0, "SIGKILL"), Ready(1, 0), Ready(2, 0))
    assert not [action for action in actions if isinstance(action, (Spawn, Stop))]
    assert Form(1, (1,)) in actions


def test_members_that_are_asked_to_leave_during_a_recovery_are_not_dismissed_before_they_can_save() -> None:
    """They hold the state. If all of them were dismissed one by one, the run would end as if it had finished."""
    state, _ = play(
        running(3, Policy(respawn=False)), PeersLost(0, 0, (2,), hung=True, why="rank 2 is silent"), Ready(0, 0), Ready(1, 0)
    )
    state, actions = play(state, LeaveRequested(0), LeaveRequested(1))
    assert actions == []
    _, actions = play(state, Died(2, "SIGKILL"))
    assert actions[-2:] == [Form(1, (0, 1)), Stop((0, 1))]


def connected(size: int, policy: Policy | None = None) -> State:
    """Workers of a script that uses torch.distributed."""
    state, _, _ = begin(size, policy)
    state, actions = play(state, *(RankRead(id, needs_peers=True) for id in range(size)))
    assert actions == []
    return state


def test_without_a_run_a_failure_stops_all_workers_and_starts_them_again() -> None:
    state, actions = play(connected(2), Died(1, "SIGKILL"))
    assert actions == [StopAll((0,))]
    state, actions = play(state, ScriptRaised(0, -1, "connection closed"), Tick(((0, 1e9),)), JoinRequested(0), Died(0, "SIGTERM"))
    assert actions == [StartAgain(1), Spawn((2, 3))]
    state, _ = play(state, RankRead(2, needs_peers=True), ScriptFinished(3), Died(3, "exit code 0", exited=True))
    state, actions = play(state, Died(2, "exit code 3", exited=True))
    assert actions == [StartAgain(2), Spawn((4, 5))]
    assert not state.finishing
    state, actions = play(state, *(ScriptFinished(id) for id in (4, 5)), *(Died(id, "exit code 0", exited=True) for id in (4, 5)))
    assert actions == [End(0, "all workers have finished")]


def test_without_a_run_restarts_are_bounded_and_the_same_error_twice_ends_the_run() -> None:
    state = connected(1, Policy(max_restarts=1))
    state, _ = play(state, Died(0, "SIGKILL"), RankRead(1, needs_peers=True))
    (end,) = play(state, Died(1, "SIGKILL"))[1]
    assert isinstance(end, End)
    assert end.code == 1
    assert "--max-restarts" in end.why
    assert isinstance(play(connected(2, Policy(respawn=False)), Died(1, "SIGKILL"))[1][0], End)
    state, actions = play(connected(1), ScriptRaised(0, -1, "KeyError: 1", "KeyError at train.py:3"), Died(0, "", exited=True))
    assert actions == [StopAll((0,)), StartAgain(1), Spawn((1,))]
    state, _ = play(state, RankRead(1, needs_peers=True))
    (end,) = play(state, ScriptRaised(1, -1, "KeyError: 2", "KeyError at train.py:3"))[1]
    assert end == End(1, "the script raised at train.py:3 again after a restart: KeyError: 2")


def test_without_a_run_a_kernel_that_does_something_illegal_twice_at_one_place_ends_the_run() -> None:
    error, place = "torch.AcceleratorError: CUDA error: device-side assert triggered", "AcceleratorError at train.py:3"
    state, _ = play(connected(1), ScriptRaised(0, -1, error, place), Died(0, "", exited=True), RankRead(1, needs_peers=True))
    (end,) = play(state, ScriptRaised(1, -1, error, place))[1]
    assert isinstance(end, End)
    assert "again after a restart" in end.why


def test_without_a_run_an_exception_that_a_dead_worker_explains_is_no_bug() -> None:
    lost = "connection closed"
    state = connected(2)
    for first in (0, 2, 4):
        state, _ = play(state, ScriptRaised(first, -1, lost, "RuntimeError at train.py:3"))
        assert reports(state, Died(first + 1, "SIGKILL")) == [f"worker {first + 1} died (SIGKILL), which may be why others failed"]
        state, actions = play(state, Died(first + 1, "SIGKILL"), Died(first, "exit code 1", exited=True))
        assert Spawn((first + 2, first + 3)) in actions
        state, _ = play(state, RankRead(first + 2, needs_peers=True))


def test_without_a_run_the_number_of_workers_cannot_be_changed() -> None:
    state, actions, why = decide(connected(2), ScaleRequested(3), 0.0)
    assert (state.size, actions) == (2, ())
    assert "lockstep.Run" in why


def test_workers_that_never_ask_for_their_rank_are_reported() -> None:
    ends = [each for id in (0, 1) for each in (ScriptFinished(id), Died(id, "exit code 0", exited=True))]
    (end,) = play(begin(2)[0], *ends)[1]
    assert isinstance(end, End)
    assert end.notes[0].startswith("2 workers ran the whole script independently")
    for state in (play(begin(2)[0], RankRead(1))[0], connected(2)):
        assert play(state, *ends)[1] == [End(0, "all workers have finished")]


def test_workers_that_end_the_script_after_different_steps_fail_the_run() -> None:
    """A replacement that counts in a variable of its own leaves its loop later than the others."""
    state, _ = play(running(2), ScriptFinished(0, 7), Died(0, "exit code 0", exited=True))
    _, actions = play(state, ScriptFinished(1, 9), Died(1, "exit code 0", exited=True))
    assert actions[-1].code == 1
    assert "worker 0 after step 7, worker 1 after step 9" in actions[-1].why
