"""RunLength: how many steps the whole run has, for the bar in the terminal."""

from __future__ import annotations

from lockstep.data.step_loader import StepPlan
from lockstep.training.progress import CurrentLoop, Progress
from lockstep.training.run_length import RunLength


class Script:
    """Moves a Progress as the loops of a script do."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.length = RunLength(self.progress)
        self.totals: list[int | None] = []

    def loop(self, samples: int | None, batch: int, epochs: int = 1, stop: int = 10**9, begin: tuple[int, int] = (0, 0)) -> None:
        progress = self.progress
        progress.data = {"length": samples, "global_batch": batch, "drop_last": False, "epochs": epochs}
        progress.loop, progress.position = CurrentLoop(progress.stage), begin
        steps = 5 if samples is None else -(-samples // batch)
        for number in range(begin[0] * steps + begin[1], min(epochs * steps, stop)):
            epoch, index = divmod(number, steps)
            progress.commit(StepPlan(epoch, index, (batch,), index == steps - 1))
            self.length.note_step()
            self.totals.append(self.length.total)
        progress.loop = None
        progress.end_loop(progress.stage)

    def enter_epoch(self, epoch: int | None, count: int | None = None) -> None:
        if epoch == 0:
            self.progress.epoch_loops_reached += 1
        self.progress.epoch_now, self.progress.epoch_count = epoch, count


def test_one_loop_has_its_epochs_times_the_steps_of_an_epoch() -> None:
    script = Script()
    script.loop(100, 32, epochs=3)
    assert script.totals == [12] * 12


def test_a_resumed_loop_counts_the_steps_before_it() -> None:
    script = Script()
    script.progress.step = 6
    script.loop(100, 32, epochs=3, begin=(1, 2))
    assert script.totals == [12] * 6


def test_of_a_stream_and_of_a_second_loop_nothing_is_known() -> None:
    script = Script()
    script.loop(None, 32)
    assert script.totals == [None] * 5
    script.loop(64, 32)
    assert script.totals[5:] == [None] * 2


def test_in_epochs_the_first_is_taken_for_all() -> None:
    script = Script()
    for epoch in range(4):
        script.enter_epoch(epoch, 4)
        script.loop(100, 32)
    assert script.totals == [16] * 16


def test_an_epoch_of_several_loops_counts_whole_once_it_is_complete() -> None:
    script = Script()
    for epoch in range(3):
        script.enter_epoch(epoch, 3)
        script.loop(64, 32)
        script.loop(96, 32)
    assert script.totals == [6, 6, 15, 15, 15] + [15] * 10


def test_epochs_that_differ_are_foretold_by_the_last_complete_one() -> None:
    script = Script()
    for epoch, stop in enumerate((4, 2, 4)):
        script.enter_epoch(epoch, 3)
        script.loop(100, 32, stop=stop)
    assert script.totals[:4] == [12] * 4
    assert script.totals[4:6] == [12] * 2
    assert script.totals[6:] == [10] * 4 or script.totals[6:] == [8 + 2, 8 + 2, 10, 10]


def test_a_worker_that_joins_within_an_epoch_reckons_with_the_current_loop() -> None:
    script = Script()
    script.progress.step = 10
    script.enter_epoch(2, 5)
    script.progress.epoch_loops_reached = 1
    script.loop(100, 32, begin=(0, 2))
    script.enter_epoch(3, 5)
    script.loop(100, 32)
    assert script.totals == [8 + 3 * 4] * 6


def test_a_loop_after_the_epochs_ends_the_foresight() -> None:
    script = Script()
    script.enter_epoch(0, 1)
    script.loop(64, 32)
    script.enter_epoch(None)
    script.loop(64, 32)
    assert script.totals == [2, 2, None, None]
