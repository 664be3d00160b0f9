"""What a resumed script does before it is where the checkpoint was made leaves no trace, and which hyperparameters then count."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints
from lockstep.checkpoint.hyperparameters import override, read_hyperparameters
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.plain_state import digest, flatten
from lockstep.errors import UsageError
from tests.models import build, data
from tests.threads import on_threads
from tests.unit.test_checkpoint import Ema
from tests.unit.test_checkpoint_states import OneWeight, open_checkpoints, published

pytestmark = pytest.mark.usefixtures("one_thread")


class Script:
    """A model, an optimizer, a scheduler and a registered object in a Run, after ``Run(...)`` has resumed it."""

    def __init__(self, place: Path, comm: Comm | None = None, lr: float = 0.01, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = build("mlp")
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 20)
        self.ema = Ema()
        self.run = lockstep.Run(self.model, self.opt, self.sched, lanes=4, checkpoint=place, every="1000h", comm=comm, **options)
        self.run.register("ema", self.ema)

    @property
    def checkpoints(self) -> Checkpoints:
        assert self.run._checkpoints is not None
        return self.run._checkpoints

    def train(self) -> None:
        for x, y in self.run.shard(data(), global_batch=8, shuffle=True, epochs=1):
            F.cross_entropy(self.model(x), y).backward()
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()
            if self.run.committed:
                self.ema.seen += 1

    def state(self) -> str:
        whole = {**self.run._state.replicated(), "trainable": self.run._engine.trainable()}
        return digest(*flatten(whole, "state")).hex()


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint after five steps in ``tmp_path``. Returns a digest of its state."""
    script = Script(tmp_path)
    script.train()
    state = script.state()
    script.run.close()
    return state


def step_scheduler(script: Script) -> None:
    script.sched.step()


def change_weights(script: Script) -> None:
    with torch.no_grad():
        next(script.model.parameters()).mul_(0.9)


def flip_a_bit(script: Script) -> None:
    next(script.model.parameters()).detach().view(torch.int32).view(-1)[3] ^= 1


def halve_learning_rate(script: Script) -> None:
    script.opt.param_groups[0]["lr"] *= 0.5


def clear_optimizer_state(script: Script) -> None:
    script.opt.state.clear()


def change_optimizer_state(script: Script) -> None:
    next(iter(script.opt.state.values()))["exp_avg"].zero_()


def change_registered_object(script: Script) -> None:
    script.ema.seen += 1


def freeze(script: Script) -> None:
    next(script.model.parameters()).requires_grad_(False)


CHANGES = (
    step_scheduler,
    change_weights,
    flip_a_bit,
    halve_learning_rate,
    clear_optimizer_state,
    change_optimizer_state,
    change_registered_object,
    freeze,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_changed_after_the_resume_is_restored(change: Callable[[Script], None], saved: str, tmp_path: Path) -> None:
    script = Script(tmp_path)
    assert script.state() == saved
    change(script)
    assert script.state() != saved
    assert script.checkpoints.restore_if_changed()
    assert script.state() == saved
    assert script.run.step == 5
    script.run.close()


def test_nothing_is_read_if_nothing_has_changed(saved: str, tmp_path: Path) -> None:
    script = Script(tmp_path)
    for folder in Retention(open_storage(tmp_path)).published():
        shutil.rmtree(tmp_path / folder.name)
    assert not script.checkpoints.restore_if_changed()
    assert script.state() == saved
    step_scheduler(script)
    assert not script.checkpoints.restore_if_changed()  # it is asked once, at the place of the checkpoint
    script.run.close()


def test_an_object_that_is_not_registered_yet_does_not_matter(saved: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = build("mlp")
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    with lockstep.Run(model, opt, sched, lanes=4, checkpoint=tmp_path, every="1000h") as run:
        assert run._checkpoints is not None
        assert not run._checkpoints.restore_if_changed()


def test_a_run_that_did_not_resume_has_nothing_to_restore(tmp_path: Path) -> None:
    script = Script(tmp_path)
    change_weights(script)
    assert not script.checkpoints.restore_if_changed()
    script.run.close()


def test_each_worker_decides_alone(saved: str, tmp_path: Path) -> None:
    def body(comm: Comm) -> tuple[bool, str]:
        script = Script(tmp_path, comm)
        if comm.rank == 1:
            change_weights(script)
            step_scheduler(script)
        result = script.checkpoints.restore_if_changed(), script.state()
        script.run.close()
        return result

    assert on_threads(2, body) == [(False, saved), (True, saved)]


def test_the_resumed_checkpoint_stays_until_then(tmp_path: Path) -> None:
    def resumed() -> tuple[Checkpoints, OneWeight]:
        state = OneWeight()
        checkpoints = open_checkpoints(tmp_path, state, keep=1)
        checkpoints.resume()
        return checkpoints, state

    checkpoints, state = resumed()
    state.weight.fill_(7)
    checkpoints.save(5)
    checkpoints.close()
    checkpoints, state = resumed()
    state.weight.fill_(8)
    checkpoints.save(5)  # run.save() before the script is there
    checkpoints.save(5)
    assert published(tmp_path) == [5, 5]
    assert checkpoints.restore_if_changed()
    assert state.weight.eq(7).all()
    checkpoints.save(5)
    assert published(tmp_path) == [5]
    checkpoints.close()


def test_the_first_step_ends_the_wait(tmp_path: Path) -> None:
    for _ in range(2):
        state = OneWeight()
        checkpoints = open_checkpoints(tmp_path, state, keep=1)
        checkpoints.resume()
        state.weight += 1
        checkpoints.save(checkpoints._schedule.last_step + 2)
        assert len(published(tmp_path)) == 1
        assert not checkpoints.restore_if_changed()
        checkpoints.close()
    assert state.weight.eq(2).all()


def test_a_checkpoint_that_is_gone_is_named(saved: str, tmp_path: Path) -> None:
    script = Script(tmp_path)
    step_scheduler(script)
    (folder,) = Retention(open_storage(tmp_path)).published()
    shutil.rmtree(tmp_path / folder.name)
    with pytest.raises(UsageError, match="from which this run was resumed, cannot be read again"):
        script.checkpoints.restore_if_changed()
    script.run.close()


# -- which checkpoint, and whose hyperparameters --------------------------------------------------


def resume_options(tmp_path: Path, optimizer: torch.optim.Optimizer, **options: Any) -> Checkpoints:
    """Checkpoints with these options, of an optimizer alone."""

    class State(OneWeight):
        def capture(self) -> dict[str, Any]:
            return {**super().capture(), "objects": {"SGD": optimizer.state_dict()}}

        def restore(self, state: Any, *, resumes: bool = False) -> None:
            super().restore(state)
            optimizer.load_state_dict(state["objects"]["SGD"])

    (comm,) = loopback(1, 10.0)
    return Checkpoints(tmp_path, "1000h", 3, State(), lambda: comm, CheckpointCallbacks(), **options)


def sgd(lr: float = 0.1, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=momentum)


def save_with(tmp_path: Path, optimizer: torch.optim.Optimizer, step: int = 1, **options: Any) -> None:
    checkpoints = resume_options(tmp_path, optimizer, **options)
    checkpoints.resume()
    checkpoints.save(step)
    checkpoints.close()


def test_hyperparameters_that_differ_are_named_in_one_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with(tmp_path, sgd())
    optimizer = sgd(lr=0.5, momentum=0.8)
    save_with(tmp_path, optimizer, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "in the script" in line]
    assert len(lines) == 1
    assert "SGD lr: 0.5 in the script, 0.1 in the checkpoint; SGD momentum: 0.8 in the script, 0.9 in the checkpoint" in lines[0]
    assert optimizer.param_groups[0]["lr"] == 0.1
    save_with(tmp_path, sgd(), 3)  # the script has the values again with which the run began
    assert "in the script" not in capsys.readouterr().err


def test_a_learning_rate_that_a_scheduler_or_the_script_has_changed_is_not_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = sgd()
    checkpoints = resume_options(tmp_path, optimizer)
    checkpoints.resume()
    optimizer.param_groups[0]["lr"] *= 0.5
    checkpoints.save(1)
    checkpoints.close()
    optimizer = sgd()
    save_with(tmp_path, optimizer, 2)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert "in the script" not in capsys.readouterr().err


def test_an_overridden_hyperparameter_is_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with(tmp_path, sgd())
    optimizer = sgd(lr=0.5, momentum=0.8)
    checkpoints = resume_options(tmp_path, optimizer, override=("lr",))
    assert checkpoints.resume()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.9)
    said = capsys.readouterr().err
    assert "SGD momentum: 0.8" in said
    assert "SGD lr" not in said
    assert not checkpoints.restore_if_changed()
    checkpoints.close()


def test_an_overridden_learning_rate_is_scaled_as_its_scheduler_has_scaled_it() -> None:
    def build_with(lr: float, steps: int) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.SequentialLR]:
        optimizer = sgd(lr)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [4])
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler

    saved, saved_scheduler = build_with(0.1, 6)
    optimizer, scheduler = build_with(0.5, 0)
    script = read_hyperparameters({"SGD": optimizer.state_dict(), "SequentialLR": scheduler.state_dict()})
    assert script["SGD"][0]["lr"] == 0.5
    objects = {"SGD": saved.state_dict(), "SequentialLR": saved_scheduler.state_dict()}
    override(objects, script, ("lr",))
    optimizer.load_state_dict(objects["SGD"])
    scheduler.load_state_dict(objects["SequentialLR"])
    expected, expected_scheduler = build_with(0.5, 6)
    for _ in range(5):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected.param_groups[0]["lr"])
        for each in (optimizer, expected):
            each.step()
        scheduler.step()
        expected_scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx(expected_scheduler.get_last_lr())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"override": ("speed",)}, "no optimizer of this run has a hyperparameter 'speed'. Choose from these.* lr, "),
        ({"override": "lr"}, "as in override="),
        ({"resume": "sometimes"}, 'is neither "auto", "never" or "must" nor the folder of a checkpoint'),
    ],
)
def test_arguments_that_make_no_sense_get_a_sentence(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        resume_options(tmp_path, sgd(), **options)


def test_must_never_and_a_path_choose_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='resume="must", but there is no checkpoint in'):
        open_checkpoints(tmp_path, resume="must").resume()
    state = OneWeight()
    checkpoints = open_checkpoints(tmp_path, state)
    for step in (1, 2):
        state.weight.fill_(step)
        checkpoints.save(step)
    checkpoints.close()
    first = tmp_path / Retention(open_storage(tmp_path)).published()[-1].name

    def weight(mode: str, place: Path = tmp_path) -> float:
        state = OneWeight()
        checkpoints = open_checkpoints(place, state, resume=mode)
        checkpoints.resume()
        checkpoints.close()
        return float(state.weight[0])

    assert weight("must") == 2
    assert weight("never") == 0
    assert weight(str(first)) == 1
    assert weight(f"{first}/", tmp_path / "elsewhere") == 1
    assert published(tmp_path) == [2, 1]
    (first / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"step-000000001-.* is damaged: manifest.json cannot be read"):
        weight(str(first))


def test_what_was_saved_at_the_end_of_a_loop_is_saved_again_if_replicas_differed(tmp_path: Path) -> None:
    """The comparison at the end of a loop comes before the checkpoint, and may find that one of the same step is wrong."""
    state = OneWeight()
    checkpoints = open_checkpoints(tmp_path, state, keep=10)
    checkpoints.save(2)
    state.weight.fill_(666)
    checkpoints.save(4)
    state.weight.fill_(4)
    checkpoints.distrust_after(2)
    checkpoints.loop_ended(4)
    assert published(tmp_path) == [4, 2]
    checkpoints.loop_ended(4)
    assert published(tmp_path) == [4, 2]
    loaded = OneWeight()
    assert open_checkpoints(tmp_path, loaded).resume()
    assert loaded.weight.eq(4).all()
