"""The rules for spares: when they start, whose place they take, and that they never make a run fail."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.launcher.local_ranks import LocalRanks
from lockstep.plan.membership import begin, decide
from lockstep.plan.membership_events import (
    Abort,
    Action,
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
    MachineJoined,
    MachineLost,
    Prepare,
    Ready,
    Report,
    ScaleRequested,
    ScriptFinished,
    ScriptRaised,
    SkipLoop,
    Spawn,
    StageEntered,
    Stop,
    Tick,
)
from lockstep.plan.membership_recovery import recover
from lockstep.plan.membership_spares import device_of
from lockstep.plan.membership_state import Policy, State, Status
from tests.unit.test_membership import connected, newcomer, play, play_all, reports
from tests.unit.test_membership_machines import member, report


def spawn(*workers: int) -> Spawn:
    return Spawn(workers, are_spares=True)


def on_gpu(worker: int, gpu: int, stage: int = -1) -> JoinRequested:
    return JoinRequested(worker, stage=stage, device=f"/GPU-{gpu}", device_room=1)


def with_spares(size: int, spares: int = 1, *, gpus: bool = False, room: int = 0, **limits: int) -> State:
    """A run whose spares stand by. Their numbers follow those of the members; spare k uses the GPU of member k."""
    state, _, _ = begin(size, Policy(spares=spares, spares_after_s=0.0, hang_timeout_s=5.0, **limits), room)  # type: ignore[arg-type]
    state, actions = play(state, *(on_gpu(id, id) if gpus else JoinRequested(id) for id in range(size)), StageEntered(0, 0))
    assert actions == [Form(0, tuple(range(size)))]
    ids = range(size, size + spares)
    state, actions = play(state, Tick())
    assert actions == [spawn(*ids)]
    for id in ids:
        state, actions = play(state, on_gpu(id, id - size) if gpus else JoinRequested(id), JoinRequested(id, stage=0))
        assert actions == [Prepare(id, size - 1)]
    return state


def lost(state: State, worker: int, *others: int, step: int = 0) -> tuple[State, list[Action]]:
    """The worker is killed, and the others recover."""
    return play_all(state, Died(worker, "SIGKILL"), *(Ready(id, state.generation, step) for id in others))


# -- they stand by, and take a place -----------------------------------------------------------------


def test_spares_start_when_the_run_has_all_its_members_and_say_once_that_they_stand_by() -> None:
    state, actions, _ = begin(2, Policy(spares=2, spares_after_s=0.0))
    assert actions == (Spawn((0, 1)),)
    state, actions = play(state, JoinRequested(0), Tick())
    assert actions == []
    state, actions = play(state, JoinRequested(1), Tick(), Tick())
    assert actions == [Form(0, (0, 1)), spawn(2, 3)]
    state, texts = play_all(state, StageEntered(0, 0), JoinRequested(2, pid=42), JoinRequested(2, stage=0))
    assert texts == [Prepare(2, 1), Report("worker 2 (pid 42) stands by as a spare")]
    assert play_all(state, StageEntered(0, 1), JoinRequested(2, stage=1))[1] == [SkipLoop(2, 0)]


def test_a_spare_takes_the_place_of_a_dead_member_after_the_repeated_step_and_the_next_spare_starts_then() -> None:
    state, actions = lost(with_spares(4), 2, 0, 1, 3)
    assert actions == [
        Abort((0, 1, 3), 0, "worker 2 died (SIGKILL)"),
        Report("worker 2 died: SIGKILL. 3 workers go on; spare 4 takes its place"),
        Form(1, (0, 1, 3)),
        Change((0, 1, 3), 1),
    ]
    state, actions = play_all(state, Tick(), *(Ready(id, 1, 1) for id in (0, 1, 3)))
    assert actions == [Report("spare 4 joined. 4 workers, generation 2"), Form(2, (0, 1, 3, 4))]
    state, actions = play(state, Tick())
    assert actions == [spawn(5)]
    assert play(state, newcomer(5), Tick())[1] == []
    assert reports(state, newcomer(5)) == ["worker 5 stands by as a spare"]


def test_a_spare_starts_when_no_worker_has_joined_or_left_for_a_while() -> None:
    state, _ = play(begin(2, Policy(spares=1, spares_after_s=0.5))[0], JoinRequested(0), JoinRequested(1))
    state, actions = play(state, Tick(), now=10.0)
    assert actions == []
    again, _ = play(state, ScaleRequested(1), Tick(), now=10.4)
    again, actions = play(again, Ready(0, 0, 1), Ready(1, 0, 1), Tick(), now=10.6)
    assert not any(isinstance(action, Spawn) for action in actions)
    for calm, now in ((state, 10.5), (again, 11.1)):
        assert play(calm, Tick(), now=now - 0.01)[1] == []
        assert play(calm, Tick(), now=now)[1] == [spawn(2)]


def test_a_spare_takes_the_place_of_a_member_that_leaves_at_the_same_boundary() -> None:
    state, actions = play(with_spares(3), LeaveRequested(1), *(Ready(id, 0, 1) for id in range(3)))
    assert actions == [Change((0, 1, 2), 0), Dismiss(1, "it was asked to leave"), Form(1, (0, 2, 3))]
    _, actions = play(state, ScriptFinished(1), Died(1, "exit code 0", exited=True), Tick())
    assert actions == [spawn(4)]


def test_if_all_members_were_asked_to_leave_no_worker_is_started() -> None:
    state, actions = play(with_spares(2), LeaveRequested(2), LeaveRequested(0), LeaveRequested(1))
    assert actions == [Dismiss(2, "it was asked to leave"), Change((0, 1), 0), Stop((0, 1))]
    ends = [each for id in (2, 0, 1) for each in (ScriptFinished(id), Died(id, "exit code 0", exited=True))]
    _, actions = play(state, *ends)
    assert not any(isinstance(action, Spawn) for action in actions)
    assert actions[-1] == End(0, "all workers have finished")


def test_if_all_members_leave_the_first_of_them_hands_the_state_over_to_the_spares() -> None:
    state, actions = play(with_spares(2, 2), LeaveRequested(0), LeaveRequested(1), Ready(0, 0, 3), Ready(1, 0, 3))
    assert actions == [Change((0, 1), 0), Dismiss(1, "it was asked to leave"), Form(1, (0, 2)), Change((0, 2), 1)]
    state, actions = play(state, Ready(0, 1, 4), Ready(2, 1, 4))
    assert actions == [Dismiss(0, "it was asked to leave"), Form(2, (2, 3))]


def test_two_members_die_at_once_and_a_replacement_is_started_for_the_one_that_no_spare_replaces() -> None:
    state, actions = play_all(with_spares(4), Died(1, "SIGKILL"), Died(3, "SIGKILL"), Ready(0, 0), Ready(2, 0))
    assert Spawn((5,)) in actions
    assert [action.text for action in actions if isinstance(action, Report)] == [
        "worker 1 died: SIGKILL. 3 workers go on; spare 4 takes its place",
        "worker 3 died: SIGKILL. 2 workers go on; a replacement is starting",
    ]
    assert actions[-1] == Change((0, 2), 1)
    state, actions = play(state, Ready(0, 1, 1), Ready(2, 1, 1), Tick())
    assert actions == [Form(2, (0, 2, 4))]
    state, actions = play(state, newcomer(5), *(Ready(id, 2, 2) for id in (0, 2, 4)), Tick())
    assert actions == [Change((0, 2, 4), 2), Form(3, (0, 2, 4, 5)), spawn(6)]


def test_a_spare_follows_the_members_through_their_loops_and_is_never_taken_for_hung() -> None:
    state, actions = play(with_spares(2), StageEntered(0, 1))
    assert actions == [SkipLoop(2, 0)]
    assert play(state, Died(1, "SIGKILL"))[1] == [Abort((0,), 0, "worker 1 died (SIGKILL)")]  # it is on its way
    state, actions = play(state, JoinRequested(2, stage=1), Tick(((2, 1e6),)), now=1e6)
    assert actions == []
    finishing, _ = play(state, ScriptFinished(0))
    assert not any(isinstance(action, Kill) for action in play(finishing, Tick(((0, 0.0), (1, 0.0), (2, 1e6))), now=1e6)[1])


def test_spares_are_dismissed_when_the_first_member_has_finished_and_none_is_started_again() -> None:
    state, actions = play(with_spares(2), ScriptFinished(0))
    assert actions == [Dismiss(2, "the run is over")]
    _, actions = play(
        state,
        *(ScriptFinished(2), Died(2, "exit code 0", exited=True), Died(0, "exit code 0", exited=True), Tick()),
        *(ScriptFinished(1), Died(1, "exit code 0", exited=True)),
    )
    assert actions == [End(0, "all workers have finished")]


def test_if_all_members_die_at_once_a_spare_cannot_help() -> None:
    _, actions = play(with_spares(2), Died(0, "SIGKILL"), Died(1, "SIGKILL"))
    assert isinstance(actions[-1], End)
    assert actions[-1].code == 1


# -- spares that fail --------------------------------------------------------------------------------


def test_a_spare_that_dies_is_replaced_and_disturbs_nobody() -> None:
    state, actions = play_all(with_spares(3), Died(3, "SIGKILL"), Tick())
    assert actions == [Report("spare 3 died: SIGKILL. Another one will start"), spawn(4)]
    _, actions = play(state, Died(4, "SIGKILL"), Tick())
    assert actions == [spawn(5)]


def test_spares_that_die_one_after_the_other_are_limited_and_do_not_count_for_members() -> None:
    state, now, texts = with_spares(2, max_respawns=2), 0.0, list[str]()
    for id in range(2, 5):
        state, actions = play_all(state, Died(id, "SIGKILL"), Tick(), now=now)
        texts += [action.text for action in actions if isinstance(action, Report)]
        now += 1000.0
    limit = "2 replacements in a row died before they took part in a step (--max-respawns)"
    assert texts == ["spare 2 died: SIGKILL. Another one will start", f"spare 3 died: SIGKILL. No replacement is started: {limit}"]
    _, actions = play(state, Tick(), Died(1, "SIGKILL"), now=now)
    assert actions == [Abort((0,), 0, "worker 1 died (SIGKILL)"), Spawn((4,))]


def test_spares_that_die_at_once_are_started_again_later_and_later() -> None:
    state, now = with_spares(2), 0.0
    for id in range(2, 7):
        state, actions = play(state, Died(id, "SIGKILL"), Tick(), now=now)
        if actions == []:
            now = state.spares_at
            state, actions = play(state, Tick(), now=now)
        assert actions == [spawn(id + 1)]
    assert now == pytest.approx(0.75)


def test_the_exceptions_of_spares_are_no_bug_of_the_script() -> None:
    """It may be the lack of memory on a GPU that the spare shares with a member."""
    state = with_spares(2)
    for id in range(2, 6):
        raised = ScriptRaised(id, -1, "OutOfMemoryError", "OutOfMemoryError at train.py:3")
        state, actions = play(state, raised, Died(id, "exit code 1", exited=True), Tick(), now=1000.0 * id)
        assert actions == [spawn(id + 1)]
    state, actions = play(state, ScriptRaised(1, 7, "OutOfMemoryError", "OutOfMemoryError at train.py:3"), now=1e5)
    assert isinstance(actions[0], Abort)  # one fault of a member


def test_a_spare_whose_script_ends_is_not_started_again() -> None:
    _, actions = play(with_spares(2), ScriptFinished(2), Died(2, "exit code 0", exited=True), Tick())
    assert actions == []


def test_no_spare_is_started_if_no_newcomer_can_join_any_more() -> None:
    state, actions = play(with_spares(2), LeaveRequested(2, cannot_join=True))
    assert actions == [Dismiss(2, "it was asked to leave")]
    assert play(state, ScriptFinished(2), Died(2, "exit code 0", exited=True), Tick())[1] == []


def test_without_respawn_the_spares_are_used_up() -> None:
    state = with_spares(3, respawn=False)
    state, actions = lost(state, 0, 1, 2)
    assert actions[-1] == Change((1, 2), 1)
    state, actions = play(state, Ready(1, 1, 1), Ready(2, 1, 1), Tick())
    assert actions == [Form(2, (1, 2, 3))]
    assert lost(state, 1, 2, 3)[1][-1] == Form(3, (2, 3))


def test_if_members_may_not_be_replaced_any_more_spares_are_used_up() -> None:
    state = with_spares(3, max_respawns=0)
    assert reports(state, Died(0, "SIGKILL")) == [
        "worker 0 died: SIGKILL. 2 workers go on; spare 3 takes its place; "
        "no other spare is started: --max-respawns allows 0 replacements in 5 minutes"
    ]
    state, _ = lost(state, 0, 1, 2)
    assert play(state, Ready(1, 1, 1), Ready(2, 1, 1), Tick())[1] == [Form(2, (1, 2, 3))]


# -- scaling, lanes, and scripts without a run -------------------------------------------------------


def test_scaling_up_takes_the_spare_at_once_and_starts_another_one() -> None:
    state, actions = play(with_spares(2), ScaleRequested(3))
    assert actions == [Change((0, 1), 0)]
    assert decide(with_spares(2), ScaleRequested(3), 0.0)[2] == "scaling to 3 workers: 1 spare joins after the current step"
    _, actions = play(state, Ready(0, 0, 1), Ready(1, 0, 1), Tick())
    assert actions == [Form(1, (0, 1, 2)), spawn(3)]
    assert play(with_spares(2), ScaleRequested(4))[1] == [Spawn((3,)), Change((0, 1), 0)]


def test_scaling_down_dismisses_members_and_keeps_the_spare() -> None:
    state, actions = play(with_spares(3), ScaleRequested(2))
    assert actions == [Change((0, 1, 2), 0)]
    state, actions = play(state, *(Ready(id, 0, 1) for id in range(3)))
    assert actions == [Dismiss(2, "it was asked to leave"), Form(1, (0, 1))]
    assert play(state, ScriptFinished(2), Died(2, "exit code 0", exited=True), Tick())[1] == []
    assert lost(state, 1, 0)[1][-1] == Change((0,), 2)


def test_scaling_down_keeps_the_newcomers_that_are_ready() -> None:
    state, _ = play(begin(2, Policy(spares=1, spares_after_s=0.0))[0], JoinRequested(0), JoinRequested(1), StageEntered(0, 0))
    state, actions = play(state, Tick(), ScaleRequested(4), newcomer(3))
    assert actions == [spawn(2), Spawn((3,)), Change((0, 1), 0)]
    assert play(state, ScaleRequested(2))[1] == [Dismiss(2, "the run was scaled to 2 workers")]


def test_a_spare_that_dies_does_not_keep_a_member_that_was_scaled_away() -> None:
    state, _ = play(with_spares(3), ScaleRequested(2), Died(3, "SIGKILL"))
    _, actions = play(state, *(Ready(id, 0, 1) for id in range(3)))
    assert Form(1, (0, 1)) in actions


def test_workers_for_which_there_are_no_lanes_are_spares() -> None:
    state, _, _ = begin(2, Policy(spares=1, spares_after_s=0.0))
    state, _ = play(state, JoinRequested(0, max_members=2), JoinRequested(1, max_members=2), StageEntered(0, 0), ScaleRequested(3))
    state, actions = play(state, Tick())
    assert actions == [spawn(2)]
    state, actions = play(state, JoinRequested(2), newcomer(2), Tick(), ScaleRequested(4), Tick())
    assert actions == [Prepare(2, 1), spawn(3)]
    assert lost(state, 1, 0)[1][-1] == Change((0,), 1)


def test_without_a_run_there_are_no_spares() -> None:
    state = connected(2, Policy(spares=1, spares_after_s=0.0))
    assert play(state, Tick())[1] == []
    state, actions = play(state, Died(1, "SIGKILL"), Died(0, "SIGTERM"))
    assert actions[-1] == Spawn((2, 3))


# -- GPUs and machines -------------------------------------------------------------------------------


def test_over_nccl_a_spare_replaces_only_the_member_that_used_its_gpu() -> None:
    state = with_spares(4, gpus=True)
    _, actions = lost(state, 0, 1, 2, 3)
    assert actions[-1] == Change((1, 2, 3), 1)
    state, actions = lost(state, 2, 0, 1, 3)
    assert Spawn((5,)) in actions  # on the GPU of worker 2
    assert actions[-1] == Form(1, (0, 1, 3))
    state, actions = play(state, Tick(), on_gpu(5, 2), JoinRequested(5, stage=0), *(Ready(id, 1, 1) for id in (0, 1, 3)), Tick())
    assert actions == [Prepare(5, 3), Change((0, 1, 3), 1), Form(2, (0, 1, 3, 5))]
    assert state.worker(4).status is Status.WAITING


def test_a_spare_that_was_starting_and_uses_another_gpu_leaves_the_place_to_a_replacement() -> None:
    state, _ = play(with_spares(2, gpus=True), Died(2, "SIGKILL"), Tick())
    state, actions = lost(state, 1, 0)
    assert not any(isinstance(action, Spawn) for action in actions)  # nobody knows yet which GPU the spare uses
    state, actions = play(state, Tick(), on_gpu(3, 0), JoinRequested(3, stage=0), Tick())
    assert actions == [Prepare(3, 1), Spawn((4,))]
    _, actions = play(state, Tick(), on_gpu(4, 1), JoinRequested(4, stage=0))
    assert actions == [Prepare(4, 1), Change((0,), 1)]


def test_members_that_share_gpus_may_have_any_spare() -> None:
    state, _, _ = begin(3, Policy(spares=1, spares_after_s=0.0))
    state, _ = play(state, JoinRequested(0), on_gpu(1, 0), JoinRequested(2), StageEntered(0, 0), Tick())
    state, _ = play(state, on_gpu(3, 0), JoinRequested(3, stage=0))
    assert lost(state, 2, 0, 1)[1][-1] == Change((0, 1), 1)


def on_machine(worker: int, machine: str, stage: int = -1) -> JoinRequested:
    device, room = device_of(machine, 2, "")
    return JoinRequested(worker, stage=stage, device=device, device_room=room)


def on_machines(spare_on: str, wanted: int = 4, room: int = 4) -> State:
    """Machines a and b with two members each, and a spare."""
    state, _, _ = begin(4, Policy(spares=1, spares_after_s=0.0), room)
    state = replace(state, wanted=wanted)
    state, _ = play(state, *(on_machine(id, "ab"[id // 2]) for id in range(4)), StageEntered(0, 0), Tick())
    state, actions = play(state, on_machine(4, spare_on), JoinRequested(4, stage=0))
    assert actions == [Prepare(4, 3)]
    return state


def test_a_machine_has_no_more_members_than_it_has_room_for() -> None:
    _, actions = lost(on_machines("a"), 1, 0, 2, 3)
    assert actions[-1] == Change((0, 2, 3), 1)
    _, actions = lost(on_machines("a"), 3, 0, 1, 2)
    assert Spawn((5,)) in actions
    assert actions[-1] == Form(1, (0, 1, 2))


def test_spares_of_a_machine_with_room_make_up_for_a_machine_that_is_lost() -> None:
    state, actions = play(on_machines("c", room=6), MachineLost((2, 3), 2, "machine b is lost"))
    assert Spawn((5,)) in actions
    state, actions = play(state, Ready(0, 0), Ready(1, 0))
    assert actions == [Form(1, (0, 1)), Change((0, 1), 1)]


def test_spares_of_a_lost_machine_are_started_elsewhere() -> None:
    state, actions = play(on_machines("b"), MachineLost((2, 3, 4), 2, "machine b is lost"), Ready(0, 0), Ready(1, 0))
    assert actions[-1] == Form(1, (0, 1))
    state, actions = play(state, Tick())
    assert (state.size, actions) == (2, [spawn(5)])
    state, actions = play(state, on_machine(5, "a"), JoinRequested(5, stage=0), MachineJoined("b", 2))
    assert actions == [Prepare(5, 1), Spawn((6, 7))]
    assert play(state, on_machine(6, "b"), JoinRequested(6, stage=0))[1] == [Prepare(6, 2), Change((0, 1), 1)]


def test_a_new_head_starts_the_spares_again_and_knows_the_gpus_of_the_members() -> None:
    a, b = ([member(id, gpu=f"GPU-{id % 2}") for id in ids] for ids in ((0, 1), (2, 3)))
    both = [replace(report(*a, member(9)), machine="a"), replace(report(*b), machine="b")]
    (state, actions, _), dropped = recover(Policy(spares=1, spares_after_s=0.0), both, 0.0)
    assert (actions, dropped) == ((), (9,))
    state, actions = play(state, Tick())
    assert actions == [spawn(6)]
    state, _ = play(state, JoinRequested(6, device="a/GPU-1", device_room=1), JoinRequested(6, stage=1))
    assert lost(state, 1, 0, 2, 3)[1][-1] == Change((0, 2, 3), 4)
    assert lost(state, 3, 0, 1, 2)[1][-1] == Form(4, (0, 1, 2))


# -- whatever happens --------------------------------------------------------------------------------


class Workers:
    """A model of workers that obey, on a machine with as many GPUs as they like. The local ranks are those of the launcher."""

    def __init__(self, random: Random, *, gpus: bool) -> None:
        self._random, self._gpus, self._local_ranks = random, gpus, LocalRanks()
        self._devices: dict[int, str] = {}
        self.owed: list[Event] = []
        self.steps = self.stage = 0
        self.members: tuple[int, ...] = ()

    def lost(self, id: int) -> None:
        self._local_ranks.release(id)
        self.owed = [event for event in self.owed if getattr(event, "worker", None) != id]

    def perform(self, action: Action) -> None:
        if isinstance(action, Spawn):
            assign = self._local_ranks.assign_to_spares if action.are_spares else self._local_ranks.assign
            for id, local_rank in assign(action.workers).items():
                self._devices[id] = f"/GPU-{local_rank}" if self._gpus else ""
                self.owed.append(JoinRequested(id, device=self._devices[id], device_room=1))
        elif isinstance(action, Prepare):
            self.owed.append(JoinRequested(action.worker, stage=self._random.choice([self.stage, max(0, self.stage - 1)])))
        elif isinstance(action, SkipLoop):
            self.owed.append(JoinRequested(action.worker, stage=self.stage))
        elif isinstance(action, (Abort, Change)):
            self.owed = [event for event in self.owed if not isinstance(event, Ready)]
            self.steps += isinstance(action, Change)
            self.owed += [Ready(id, action.generation, self.steps) for id in action.workers]
        elif isinstance(action, Form):
            devices = [self._devices[id] for id in action.members]
            assert not self._gpus or len(set(devices)) == len(devices), f"two members on one GPU: {devices}"
            self.owed = [event for event in self.owed if not isinstance(event, Ready)]
            self.steps, self.members = self.steps + 1, action.members
            self.owed += [Committed(action.members[0], self.steps), StageEntered(action.members[0], self.stage)]
        elif isinstance(action, Dismiss):
            self.owed += [ScriptFinished(action.worker), Died(action.worker, "exit code 0", exited=True)]
        elif isinstance(action, Stop):
            ends = [(ScriptFinished(id), Died(id, "exit code 0", exited=True)) for id in action.workers]
            self.owed = [event for pair in ends for event in pair]


@settings(deadline=None, max_examples=300)
@given(st.integers(2, 5), st.integers(0, 3), st.booleans(), st.integers(0, 2**32).map(Random))
def test_whatever_happens_the_run_has_all_its_members_and_spares_in_the_end(
    size: int, spares: int, gpus: bool, random: Random
) -> None:
    state, actions, _ = begin(size, Policy(spares=spares, max_respawns=1000))
    workers, todo, now = Workers(random, gpus=gpus), list(actions), 0.0
    for round in range(600):
        now += 20.0
        while todo:
            action = todo.pop(0)
            if isinstance(action, End):
                return
            workers.perform(action)
        alive = [worker.id for worker in state.workers]
        is_faulty, event = round < 150, Tick()
        if is_faulty and random.random() < 0.15:
            event = Died(random.choice(alive), "SIGKILL")
        elif is_faulty and random.random() < 0.03:
            event = ScaleRequested(random.randint(2, 5))
        elif is_faulty and state.generation >= 0 and len(state.members) > 2 and random.random() < 0.03:
            event = LeaveRequested(random.choice(alive))
        elif is_faulty and state.members and random.random() < 0.05:
            workers.stage += 1
            event = StageEntered(state.members[0], workers.stage)
        elif workers.owed and random.random() < 0.9:
            event = workers.owed.pop(random.randrange(len(workers.owed)))
            if isinstance(event, ScriptFinished):  # its death follows
                state, more, _ = decide(state, event, now)
                todo += more
                event = next(each for each in workers.owed if isinstance(each, Died) and each.worker == event.worker)
            elif isinstance(event, Died):
                state, more, _ = decide(state, ScriptFinished(event.worker), now)
                todo += more
        if isinstance(event, Died):
            workers.lost(event.worker)
        state, more, _ = decide(state, event, now)
        todo += more
    assert not workers.owed
    assert len(state.members) == state.size or spares == 0, state
    waiting = [id for id in state.with_status(Status.WAITING) if id not in state.members]
    assert len(waiting) == spares or spares == 0, state
