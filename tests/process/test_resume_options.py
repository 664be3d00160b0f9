"""``Run(resume=..., override=...)``: which checkpoint a run begins from, whose learning rate counts, what a finished run says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from tests.loop_run import LoopRun

SCRIPT = """
import torch
import torch.nn.functional as F

import lockstep
from tests.loop_notes import note_end, note_step
from tests.models import MLP, data

torch.manual_seed(1)
model = MLP()
opt = torch.optim.AdamW(model.parameters(), lr={lr})
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
run = lockstep.Run(model, opt, sched, lanes=4, checkpoint="../checkpoints"{options})
for epoch in {loop}({epochs}):
    for x, y in run.shard(data(40), global_batch=8, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        note_step(run)
    sched.step()
print("learning rate", opt.param_groups[0]["lr"])
note_end(run)
{end}
"""
NOTHING_LEFT = "there was nothing left to do: this run had ended when it was resumed, after 10 steps."

Start = Callable[..., LoopRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs the script to its end. All runs of a test have one place for checkpoints."""
    started: list[LoopRun] = []

    def start_here(
        epochs: int, options: str = "", *, lr: float = 0.1, workers: int = 0, end: str = "run.close()", loop: str = "range"
    ) -> LoopRun:
        script = SCRIPT.format(lr=lr, epochs=epochs, options=options, end=end, loop=loop)
        run = LoopRun(script, tmp_path / str(len(started)), workers)
        started.append(run)
        run.wait()
        return run

    yield start_here
    for run in started:
        run.stop()


@pytest.mark.parametrize(
    ("loop", "workers", "end"),
    [("range", 0, "run.close()"), ("range", 2, ""), ("run.epochs", 0, ""), ("run.epochs", 2, "run.close()")],
)
def test_a_finished_run_that_is_started_again_says_what_to_do(loop: str, workers: int, end: str, start: Start) -> None:
    first = start(2, loop=loop)
    again = start(2, loop=loop, workers=workers, end=end)
    assert again.result() == first.result()
    assert again.output().count(NOTHING_LEFT) == 1, again.dump()
    assert 'give it more epochs. To begin anew, pass resume="never" or another folder as checkpoint=' in again.output()
    assert "nothing left" not in first.output()


@pytest.mark.parametrize("loop", ["range", "run.epochs"])
def test_a_finished_run_continues_with_more_epochs(loop: str, start: Start) -> None:
    start(2, loop=loop)
    longer = start(3, loop=loop)
    assert longer.result().startswith("15 ")
    assert "resumed at step 10" in longer.output()
    assert "nothing left" not in longer.output()


def test_a_script_that_fails_after_its_loops_is_not_said_to_have_nothing_left(start: Start) -> None:
    start(2)
    for workers in (0, 1):
        failed = start(2, workers=workers, end="raise ValueError('no')")
        assert failed.wait() == 1
        assert "ValueError: no" in failed.output()
        assert "nothing left" not in failed.output()


def test_another_learning_rate_is_named_and_the_checkpoints_is_used_unless_overridden(start: Start) -> None:
    start(2)
    second = start(3, lr=0.2, workers=2)
    differs = "AdamW lr: 0.2 in the script, 0.1 in the checkpoint. The checkpoint's are used."
    assert second.output().count(differs) == 1, second.dump()
    assert f"learning rate {0.1 * 0.5**3}" in second.stdout()
    third = start(4, ', override=("lr",)', lr=0.2, workers=2)
    assert "in the script" not in third.output()
    assert f"learning rate {0.2 * 0.5**4}" in third.stdout(), third.dump()


def test_never_must_and_a_path(start: Start, tmp_path: Path) -> None:
    refused = start(2, ', resume="must"')
    assert refused.wait() == 1
    assert 'UsageError: resume="must", but there is no checkpoint in ' in refused.output()
    first = start(2)
    assert "resumed" not in first.output()
    anew = start(2, ', resume="never"', workers=2)
    assert anew.result() == first.result()
    assert "resumed" not in anew.output()
    folders = Retention(open_storage(tmp_path / "checkpoints")).published()
    path = next(folder.name for folder in folders if folder.step == 5)
    part = start(2, f', resume="../checkpoints/{path}"')
    assert part.result() == first.result()
    assert "resumed at step 5 " in part.output(), part.dump()
