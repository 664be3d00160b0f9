"""run.epochs, run.state, run.epoch_means and run.gather/mean/broadcast in one process, and a sentence for each misuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import UsageError
from tests.models import build, data

pytestmark = pytest.mark.usefixtures("one_thread")


def made(**options: Any) -> tuple[lockstep.Run, nn.Module, torch.optim.Optimizer]:
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return lockstep.Run(model, opt, lanes=4, **options), model, opt


def train(run: lockstep.Run, model: nn.Module, opt: torch.optim.Optimizer, samples: int = 16) -> None:
    for x, y in run.shard(data(samples), global_batch=8):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.log(loss=loss, size=len(x))
        opt.step()
        opt.zero_grad()


# -- run.epochs ----------------------------------------------------------------------------------------


def test_epochs_are_counted_and_named_and_results_of_old_ones_are_dropped() -> None:
    run, model, opt = made()
    for epoch in run.epochs(9):
        assert run.epoch == epoch
        train(run, model, opt)
        assert run.evaluate(lambda batch: {"n": len(batch[0])}, data(16), global_batch=8) == {"n": 16}
    assert (epoch, run.step, run.epoch) == (8, 18, 0)
    assert len(run._progress.results) <= 7  # those of the last two epochs, and the end
    assert list(run.epochs(0)) == []
    run.close()


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", None])
def test_a_number_of_epochs_that_is_none_is_refused(count: Any) -> None:
    run, _, _ = made()
    with pytest.raises(UsageError, match="pass the number of epochs"):
        run.epochs(count)
    run.close()


def test_loops_over_epochs_inside_other_loops_are_refused() -> None:
    run, model, opt = made()
    with pytest.raises(UsageError, match="inside another one"):
        for _ in run.epochs(2):
            next(run.epochs(2))
    with pytest.raises(UsageError, match="inside a loop over the data"):
        for x, y in run.shard(data(16), global_batch=8):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            next(run.epochs(2))
    assert list(run.epochs(2)) == [0, 1]
    run.close()


def test_a_finished_run_goes_on_with_more_epochs_and_one_that_was_left_does_not(tmp_path: Path) -> None:
    def epochs(folder: str, count: int, leave_after: int) -> list[int]:
        seen = []
        run, model, opt = made(checkpoint=tmp_path / folder)
        for epoch in run.epochs(count):
            seen.append(epoch)
            train(run, model, opt)
            if epoch == leave_after:
                break
        run.save()
        run.close()
        return seen

    assert epochs("finished", 2, 9) == [0, 1]
    assert epochs("finished", 2, 9) == []
    assert epochs("finished", 4, 9) == [2, 3]
    assert epochs("left", 9, 1) == [0, 1]
    assert epochs("left", 9, 5) == []


def test_a_checkpoint_of_a_run_over_epochs_does_not_fit_a_script_without_them(tmp_path: Path) -> None:
    run, model, opt = made(checkpoint=tmp_path)
    for _ in run.epochs(4):
        train(run, model, opt)
        run.save()
    run.close()
    run, model, opt = made(checkpoint=tmp_path)
    with pytest.raises(UsageError, match="Start it with the script that the run was begun with"):
        for _ in range(4):
            train(run, model, opt)
            run.save()
    run.close()


# -- run.state -----------------------------------------------------------------------------------------


def test_the_state_holds_plain_values_and_names_others() -> None:
    run, _, _ = made()
    run.state["best"] = 0.5
    run.state["table"] = {"a": [1, (2.0, None)], "b": torch.ones(2, requires_grad=True)}
    run.state["tensor"] = torch.ones(2, requires_grad=True)
    assert not run.state["tensor"].requires_grad
    assert dict(run.state) == {"best": 0.5, "table": run.state["table"], "tensor": run.state["tensor"]}
    del run.state["table"]
    assert len(run.state) == 2
    with pytest.raises(UsageError, match=r"run\.state\['model'\] is a torch\.nn\.modules\.linear\.Linear"):
        run.state["model"] = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"run\.state\['a'\]\[1\] is a builtins\.set"):
        run.state["a"] = [1, {2}]
    with pytest.raises(UsageError, match="the name is a int"):
        run.state[3] = 1  # type: ignore[index]
    run.close()


def test_the_state_holds_copies() -> None:
    """The script may go on changing what it assigned: the state must not change with it, on this worker alone."""
    run, _, _ = made()
    history, tensor = [[1]], torch.ones(2)
    run.state["history"], run.state["tensor"], run.state["table"] = history, tensor, {"t": tensor}
    history[0].append(2)
    tensor.zero_()
    assert run.state["history"] == [[1]]
    assert run.state["tensor"].tolist() == run.state["table"]["t"].tolist() == [1, 1]
    run.close()


def test_the_state_changes_when_a_step_is_committed_and_not_in_every_lane() -> None:
    run, model, opt = made()
    for x, y in run.shard(data(16), global_batch=8):
        with pytest.raises(UsageError, match=r"if run\.committed"):
            run.state["steps"] = 1
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if run.committed:
            run.state["steps"] = run.state.get("steps", 0) + 1
    assert run.state["steps"] == 2
    run.close()


CHANGES_IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "list": lambda state: state["list"].append(1),
    "nested": lambda state: state["nested"]["a"][1].update(b=2),
    "tensor": lambda state: state["tensor"].add_(1),
    "got": lambda state: state.get("list").append(1),
    "listed": lambda state: [value.append(1) for name, value in state.items() if name == "list"],
}


@pytest.mark.parametrize("place", ["before backward", "before opt.step", "lane of run.steps"])
@pytest.mark.parametrize("change", CHANGES_IN_PLACE)
def test_a_value_of_the_state_that_is_changed_in_place_in_a_lane_is_refused(change: str, place: str) -> None:
    """It would be changed once per lane. The last lane is no exception."""
    name = {"got": "list", "listed": "list"}.get(change, change)
    says = rf"run\.state\['{name}'\] was changed in place before the step was committed.*`if run\.committed:`"
    for lanes in (1, 4):
        model = build("mlp")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run = lockstep.Run(model, opt, lanes=lanes)
        run.state.update({"list": [], "nested": {"a": [0, {"b": 1}]}, "tensor": torch.zeros(2)})

        def body(x: torch.Tensor, y: torch.Tensor, run: lockstep.Run = run, model: nn.Module = model) -> None:
            if place == "before backward":
                CHANGES_IN_PLACE[change](run.state)
            F.cross_entropy(model(x), y).backward()
            if place != "before backward":
                CHANGES_IN_PLACE[change](run.state)

        with pytest.raises(UsageError, match=says):
            if place == "lane of run.steps":
                for step in run.steps(data(16), global_batch=8):
                    for x, y in step:
                        body(x, y)
            else:
                for x, y in run.shard(data(16), global_batch=8):
                    body(x, y)
                    opt.step()
        run.close()


def test_values_of_the_state_may_be_read_in_lanes_and_changed_in_place_when_the_step_is_committed() -> None:
    run, model, opt = made()
    run.state["weights"], run.state["history"] = torch.ones(4), [math.nan]
    for x, y in run.shard(data(16), global_batch=8):
        history = run.state["history"]
        F.cross_entropy(model(x), y, weight=run.state["weights"]).backward()
        opt.step()
        if run.committed:
            history.append(run.step)
            run.state["weights"].mul_(0.5)
    for step in run.steps(data(16), global_batch=8):
        for x, y in step:
            history = run.state["history"]
            F.cross_entropy(model(x), y, weight=run.state["weights"]).backward()
        opt.step()
        history.append(run.step)
    run.state["history"].append("end")
    assert run.state["history"][1:] == [1, 2, 2, 3, "end"]
    assert run.state["weights"].tolist() == [0.25] * 4
    run.close()


def test_a_plain_range_that_is_resumed_reads_the_state_that_it_read_before(tmp_path: Path) -> None:
    """Else it would stop in its first epoch: the patience of the checkpoint is used up there."""

    def stop_at(epochs: int) -> tuple[list[Any], int]:
        run, model, opt = made(checkpoint=tmp_path)
        read = []
        for _ in range(epochs):
            train(run, model, opt)
            read.append((run.state.get("waited", 0), run.epoch_means["loss"], run.logged["loss"]))
            run.state["waited"] = run.state.get("waited", 0) + 1
            run.save()
            if run.state["waited"] == 3:
                break
        run.close()
        return read, run.state["waited"]

    first, waited = stop_at(3)
    assert [each for each, _, _ in first] == [0, 1, 2]
    assert stop_at(9) == (first, waited)


@pytest.mark.parametrize("uses_run_epochs", [False, True])
def test_a_checkpoint_that_is_saved_after_the_scheduler_has_stepped_resumes_there(tmp_path: Path, uses_run_epochs: bool) -> None:
    def rates(folder: str, epochs: int) -> list[float]:
        model = build("mlp")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        seen = []
        with lockstep.Run(model, opt, sched, lanes=4, checkpoint=tmp_path / folder) as run:
            for _ in run.epochs(epochs) if uses_run_epochs else range(epochs):
                train(run, model, opt)
                sched.step()
                run.save()
                seen.append(opt.param_groups[0]["lr"])
        return seen

    expected = rates("undisturbed", 5)
    rates("cut", 3)
    assert rates("cut", 5)[-2:] == expected[-2:]


# -- run.epoch_means -----------------------------------------------------------------------------------


def test_epoch_means_are_weighted_by_samples_and_begin_anew_with_each_epoch() -> None:
    heard: dict[int, dict[str, float]] = {}
    run, model, opt = made(on_log=heard.__setitem__, log_every=100)
    assert run.epoch_means == {}
    for epoch in run.epochs(2):
        train(run, model, opt, 20)  # steps of 8, 8 and 4 samples
        steps = [heard[3 * epoch + step] for step in (1, 2, 3)]
        assert run.epoch_means["loss"] == pytest.approx((8 * steps[0]["loss"] + 8 * steps[1]["loss"] + 4 * steps[2]["loss"]) / 20)
        assert run.epoch_means["size"] == pytest.approx((8 * 2 + 8 * 2 + 4) / 20)
    for _ in run.shard(data(16), global_batch=8, epochs=2):
        break
    run.close()


@pytest.mark.filterwarnings("ignore:a loop over run.shard was left")
def test_values_of_a_loop_that_is_left_are_kept_if_their_step_committed() -> None:
    heard: dict[int, dict[str, float]] = {}
    run, model, opt = made(on_log=heard.__setitem__)
    for x, y in run.shard(data(32), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        run.log(step=run.step)
        opt.step()
        if run.step == 2:
            break  # in the last lane of step 2
    for _ in run.shard(data(32), global_batch=8):
        run.log(step=-1.0)
        break  # in the first lane of a step
    train(run, model, opt)
    assert [values.get("step") for values in heard.values()] == [0.0, 1.0, None, None]
    run.close()


def test_the_mean_of_equal_values_is_that_value_whatever_the_weights_are() -> None:
    rate = 0.1 + 0.2
    run, model, opt = made()
    for _ in run.epochs(3):
        for x, y in run.shard(data(23), global_batch=7):
            run.weigh(0.1 * len(x))
            F.cross_entropy(model(x), y).backward()
            run.log(rate=rate)
            opt.step()
        assert run.logged["rate"] == run.epoch_means["rate"] == rate
    run.close()


# -- run.gather, run.mean, run.broadcast -----------------------------------------------------------------


def test_values_of_one_worker_are_copied() -> None:
    run, _, _ = made()
    given = torch.ones(2, requires_grad=True)
    (gathered,) = run.gather({"a": given})
    assert torch.equal(gathered["a"], given)
    assert gathered["a"].data_ptr() != given.data_ptr()
    assert run.mean(3) == 3.0
    assert isinstance(run.mean(3), float)
    assert math.isnan(run.mean(math.nan))
    assert run.mean(torch.tensor([1, 2])).dtype is torch.float32
    assert run.broadcast("x") == "x"
    run.close()


def test_results_between_loops_are_replayed_as_they_were_before_the_script_changed_them(tmp_path: Path) -> None:
    """The first run records them, the second one replays them and saves them again, the third one replays what the second saved."""
    read = []
    for epochs in (1, 2, 3):
        run, model, opt = made(checkpoint=tmp_path)
        results = [run.gather({"a": torch.ones(1)})[0], {"a": run.mean(torch.ones(1))}, run.broadcast({"a": torch.ones(1)})]
        read.append([float(result["a"]) for result in results])
        for result in results:
            result["a"].zero_()
        for _ in run.epochs(epochs):
            train(run, model, opt)
        run.close()
    assert read == [[1.0, 1.0, 1.0]] * 3


def test_values_that_cannot_be_exchanged_are_named() -> None:
    run, model, _ = made()
    with pytest.raises(UsageError, match=r"the value given to run\.gather\(\.\.\.\)\['m'\] is a torch"):
        run.gather({"m": nn.Linear(1, 1)})
    with pytest.raises(UsageError, match="cannot average a str"):
        run.mean("three")
    with pytest.raises(UsageError, match="there is no such rank, the run has 1 now"):
        run.broadcast(1, source=1)
    with pytest.raises(UsageError, match="the loop body runs once per lane"):
        for x, y in run.shard(data(16), global_batch=8):
            run.mean(F.cross_entropy(model(x), y))
    run.close()
