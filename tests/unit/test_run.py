"""Run in one process: its loop, its weights, its sums, and a sentence for every misuse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.training import run_parts
from tests.models import CNN, MLP, build, data, digest

pytestmark = pytest.mark.usefixtures("one_thread")


def made(
    lanes: int | None = 4, model: nn.Module | None = None, **kwargs: Any
) -> tuple[lockstep.Run, nn.Module, torch.optim.Optimizer]:
    model = model or build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lockstep.Run(model, opt, lanes=lanes, **kwargs), model, opt


def turn(model: nn.Module, opt: torch.optim.Optimizer, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def plain(model: nn.Module, samples: TensorDataset, batch: int, epochs: int = 1) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for each in DataLoader(samples, batch_size=batch):
            turn(model, opt, each)


@pytest.mark.parametrize("samples", [40, 41, 43])
def test_one_lane_gives_the_bits_of_the_plain_loop(samples: int) -> None:
    reference = build("mlp")
    plain(reference, data(samples), 16, epochs=2)
    run, model, opt = made(1)
    for batch in run.shard(data(samples), global_batch=16, epochs=2):
        turn(model, opt, batch)
    assert digest(model) == digest(reference)
    run.close()


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_uneven_lanes_are_weighted_as_one_process_would(lanes: int) -> None:
    """43 = 16 + 16 + 11 samples: lanes of unequal size in every step. Only the order of additions differs: 1e-5."""
    reference = build("mlp")
    plain(reference, data(43), 16)
    run, model, opt = made(lanes)
    for batch in run.shard(data(43), global_batch=16):
        turn(model, opt, batch)
    run.close()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_weighed_by_tokens_is_the_mean_over_all_tokens() -> None:
    """Each sample has another number of tokens; a lane's loss is the mean over its own."""
    tokens = torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(*data(24).tensors, tokens)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        return (F.cross_entropy(model(x), y, reduction="none") * count).sum() / count.sum()

    reference = build("mlp")
    opt = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for x, y, count in DataLoader(samples, batch_size=12):
        loss_of(reference, x, y, count).backward()
        opt.step()
        opt.zero_grad()
    run, model, opt = made(4)
    for x, y, count in run.shard(samples, global_batch=12):
        loss = loss_of(model, x, y, count)
        run.weigh(count.sum())
        loss.backward()
        run.log(loss=loss)
        opt.step()
        opt.zero_grad()
    run.close()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_lane_of_weight_0_counts_for_nothing_even_if_it_is_not_a_number() -> None:
    run, model, opt = made(4)
    for x, y in run.shard(data(16), global_batch=16):
        bad = run.lanes_here[0] == 0 and torch.equal(x, data(16).tensors[0][:4])
        run.weigh(0 if bad else len(x))
        (F.cross_entropy(model(x), y) * (float("nan") if bad else 1)).backward()
        opt.step()
    run.close()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_committed_and_every_are_true_once_per_step() -> None:
    run, model, opt = made(4)
    seen: list[tuple[int, bool, bool, bool]] = []
    shard = run.shard(data(40), global_batch=16, epochs=2)
    for batch in shard:
        before = run.step
        turn(model, opt, batch)
        assert run.step == before + run.committed
        seen.append((run.step, run.committed, run.every(2), run.every("epoch")))
    assert len(seen) == 24
    assert [step for step, committed, _, _ in seen if committed] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, every, _ in seen if every] == [2, 4, 6]
    assert [step for step, _, _, epoch in seen if epoch] == [3, 6]
    assert not run.committed
    run.close()


def test_schedulers_step_once_per_step_and_state_dicts_stay_clean() -> None:
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    run = lockstep.Run(model, opt, sched, plateau, lanes=4)
    for batch in run.shard(data(32), global_batch=16):
        turn(model, opt, batch)
        sched.step()
        if run.every("epoch"):
            sums = run.evaluate(lambda b: {"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum")}, data(8), global_batch=4)
            plateau.step(sums["loss"])
    assert opt.param_groups[0]["lr"] == 0.25
    assert not {"step", "state_dict"} & set(sched.state_dict())
    late = torch.optim.lr_scheduler.StepLR(opt, 1)  # made after Run: wraps the gate
    assert late.get_last_lr() == [0.25]
    run.close()
    assert "step" not in vars(sched)
    opt.step()


def test_param_grad_is_there_in_the_last_turn_only_and_averaged() -> None:
    run, model, opt = made(2)
    there = []
    for x, y in run.shard(data(8), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        there.append([p.grad is not None for p in model.parameters()])
        opt.step()
    run.close()
    assert not any(there[0])
    assert all(there[1])


def test_batch_norm_starts_each_lane_from_the_steps_beginning() -> None:
    """The statistics after a step are the mean of what each lane alone would have made of them."""
    run, model, opt = made(4, build("cnn"))
    expected = []
    for number in range(4):
        lane = build("cnn")
        lane(data(16).tensors[0][4 * number : 4 * number + 4])
        expected.append(lane.body[1].running_mean)
    for batch in run.shard(data(16), global_batch=16):
        turn(model, opt, batch)
    run.close()
    torch.testing.assert_close(model.body[1].running_mean, torch.stack(expected).mean(0))
    assert model.body[1].num_batches_tracked == 1


def test_constant_buffers_keep_their_bits() -> None:
    model = build("mlp")
    model.register_buffer("table", torch.tensor([0.1, float("nan"), -0.0]))
    model.register_buffer("mask", torch.full((200, 200), 0.1))
    before = digest(nn.ModuleDict({"m": model}))
    run, _, opt = made(3, model)
    for batch in run.shard(data(9), global_batch=9):
        turn(model, opt, batch)
    run.close()
    assert model.table[0] == torch.tensor(0.1)
    assert torch.equal(model.mask, torch.full((200, 200), 0.1))
    assert before != digest(nn.ModuleDict({"m": model}))


def test_evaluate_sums_every_sample_once_in_eval_mode() -> None:
    run, model, _ = made(4, nn.Sequential(MLP(), nn.Dropout(0.5)))
    modes = []

    def fn(batch: Any) -> dict[str, Any]:
        modes.append(model.training)
        return {"n": len(batch[0]), "seen": batch[0].sum(0), "correct": (model(batch[0]).argmax(1) == batch[1]).sum()}

    state = torch.get_rng_state()
    sums = run.evaluate(fn, data(43), global_batch=16)
    assert torch.equal(state, torch.get_rng_state())
    assert sums["n"] == 43
    torch.testing.assert_close(sums["seen"], data(43).tensors[0].sum(0))
    assert not any(modes)
    assert model.training
    assert run.evaluate(lambda b: {"n": len(b[0])}, list(data(3)), global_batch=4) == {"n": 3}
    run.close()


def test_logs_are_weighted_means_over_lanes() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    run, model, opt = made(3, on_log=lambda step, values: heard.append((step, values)), log_every=2)
    for x, y in run.shard(data(16), global_batch=8):
        run.log(size=len(x), first=x[0, 0])
        turn(model, opt, (x, y))
        run.log(late=torch.tensor(1.0))
    assert [step for step, _ in heard] == [1, 2]
    assert heard[0][1]["size"] == (2 * 2 + 3 * 3 + 3 * 3) / 8
    assert heard[0][1]["late"] == 1.0
    assert run.logged == heard[1][1]
    run.close()


def test_logged_tensors_are_copied() -> None:
    """They are read when averages are taken: by then the script may have changed them."""
    run, model, opt = made(2, log_every=2)
    norm, rate = torch.zeros(()), torch.zeros(())
    for batch in run.shard(data(16), global_batch=8):
        norm.fill_(2.0)
        run.log(norm=norm)
        norm.zero_()
        turn(model, opt, batch)
        if run.committed:
            rate.fill_(3.0)
            run.log(rate=rate)
            rate.zero_()
    assert run.logged == {"norm": 2.0, "rate": 3.0}
    run.close()


def test_loops_one_after_the_other_are_stages_with_orders_of_their_own() -> None:
    run, model, opt = made(2)
    orders = []
    for _ in range(2):
        seen = []
        for batch in run.shard(data(16), global_batch=8, shuffle=True):
            seen.append(batch[0])
            turn(model, opt, batch)
        orders.append(torch.cat(seen))
    assert run.step == 4
    assert not torch.equal(*orders)
    assert torch.equal(orders[0].sum(0).round(decimals=3), orders[1].sum(0).round(decimals=3))
    run.close()


def test_a_loop_may_be_left_early_and_another_begun() -> None:
    run, model, opt = made(2)
    for batch in run.shard(data(40), global_batch=8):
        turn(model, opt, batch)
        if run.every(2):
            break
    assert run.step == 2
    for batch in run.shard(data(8), global_batch=8):
        turn(model, opt, batch)
    assert run.step == 3
    run.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data(21)


def test_a_stream_gives_every_sample_once_per_epoch_and_knows_its_end() -> None:
    run, model, opt = made(4)
    seen, ends = 0, 0
    shard = run.shard(Stream(), global_batch=8, epochs=2)
    for batch in shard:
        seen += len(batch[0])
        turn(model, opt, batch)
        ends += run.every("epoch")
    assert seen == 42
    assert ends == 2
    assert run.step == 6
    with pytest.raises(TypeError, match="no length"):
        len(shard)
    assert run.evaluate(lambda b: {"n": len(b[0])}, Stream(), global_batch=8) == {"n": 21}
    run.close()


# -- misuse ----------------------------------------------------------------------------------


def test_backward_outside_the_loop_is_told() -> None:
    run, model, _ = made()
    with pytest.raises(UsageError, match="outside the loop"):
        model(torch.randn(2, 12)).sum().backward()
    run.close()


def test_a_forgotten_step_is_told() -> None:
    run, model, _ = made(2)
    with pytest.raises(UsageError, match=r"without SGD.step\(\).*step 0"):
        for x, _ in run.shard(data(), global_batch=8):
            model(x).sum().backward()
    run.close()


def test_the_fingerprint_is_that_of_the_weights_and_persistent_buffers() -> None:
    def trained(lr: float = 0.1) -> str:
        run, model, opt = made(2, build("cnn"))
        opt.param_groups[0]["lr"] = lr
        for batch in run.shard(data(16), global_batch=8):
            turn(model, opt, batch)
        before = run.fingerprint()
        run.close()
        assert run.fingerprint() == before
        next(model.buffers()).add_(1)
        assert run.fingerprint() != before
        return before

    assert trained() == trained() != trained(0.2)
    assert len(trained()) == 64


def test_gradient_accumulation_by_hand_is_answered_with_what_to_write_instead() -> None:
    run, model, opt = made(2)
    says = "Gradient accumulation needs no counting.*global_batch.*lanes.*run.steps"
    with pytest.raises(UsageError, match=says):
        for i, (x, y) in enumerate(run.shard(data(40), global_batch=8)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if (i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
    run.close()


@pytest.mark.parametrize(("samples", "lanes", "epochs"), [(40, 4, 2), (33, 4, 3), (3, 4, 1), (32, 1, 1)])
def test_len_is_the_number_of_iterations(samples: int, lanes: int, epochs: int) -> None:
    run, model, opt = made(lanes)
    shard = run.shard(data(samples), global_batch=16, epochs=epochs)
    expected, iterations = len(shard), 0
    for batch in shard:
        turn(model, opt, batch)
        iterations += 1
        assert len(shard) == expected
    assert iterations == expected == len(shard)
    run.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_size": 32}, r"run.shard has no argument batch_size=. global_batch is the number .* Pass global_batch=32, or"),
        ({"global_batch": 8, "shufle": True}, r"run.shard has no argument shufle=. Did you mean shuffle=\?"),
        ({"global_batch": 8, "zzz": 1}, "no argument zzz=. Its arguments are: global_batch, shuffle, "),
    ],
)
def test_arguments_that_run_shard_lacks_are_answered_with_those_it_has(arguments: dict[str, Any], says: str) -> None:
    run, _, _ = made(2)
    with pytest.raises(UsageError, match=says):
        run.shard(data(), **arguments)
    run.close()
    with pytest.raises(UsageError, match=r"lockstep.Run has no argument lane=. Did you mean lanes=\?"):
        made(lane=2)


def test_an_optimizer_that_run_does_not_know_does_not_count() -> None:
    run, model, _ = made(2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="on the optimizer that was passed to Run"):
        for x, _ in run.shard(data(), global_batch=8):
            model(x).sum().backward()
            other.step()
    run.close()


def test_a_turn_without_backward_is_told() -> None:
    run, _, opt = made(2)
    with pytest.raises(UsageError, match=r"SGD.step\(\) was called before backward\(\)"):
        for _ in run.shard(data(), global_batch=8):
            opt.step()
    with pytest.raises(UsageError, match=r"without backward\(\) in step 0"):
        for _ in run.shard(data(), global_batch=8):
            pass
    run.close()


def test_a_second_backward_in_a_turn_is_told() -> None:
    run, model, _ = made(2)
    with pytest.raises(UsageError, match="Add the losses"):
        for x, _ in run.shard(data(), global_batch=8):
            model(x).sum().backward()
            model(x).sum().backward()
    run.close()


def test_collective_calls_in_the_wrong_place_show_the_line_to_write() -> None:
    run, model, opt = made(2)
    with pytest.raises(UsageError, match=r"if run.every\(100\): result = run.evaluate"):
        for batch in run.shard(data(), global_batch=8):
            turn(model, opt, batch)
            run.evaluate(lambda b: {"n": 1}, data(), global_batch=8)
    run.close()


def test_nested_loops_are_told() -> None:
    run, model, opt = made(2)
    with pytest.raises(UsageError, match="inside another one"):
        for batch in run.shard(data(), global_batch=8):
            turn(model, opt, batch)
            for _ in run.shard(data(), global_batch=8):
                pass
    run.close()


def test_a_model_changed_after_run_is_told() -> None:
    run, model, _ = made(2)
    model.layers[4] = nn.Linear(17, 4)
    with pytest.raises(UsageError, match="changed after Run"):
        next(iter(run.shard(data(), global_batch=8)))
    run.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lanes": 0}, "lanes=0"),
        ({"lanes": 2.5}, "lanes=2.5"),
        ({"seed": "x"}, "seed='x'"),
        ({"threads": 0}, "threads=0"),
        ({"bucket_mb": 0}, "bucket_mb=0"),
        ({"reduce_dtype": torch.bfloat16}, "reduce_dtype=torch.bfloat16"),
        ({"comm": "smoke"}, "comm='smoke'"),
    ],
)
def test_arguments_that_make_no_sense_are_told(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(**arguments)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_run_cannot_take_is_told() -> None:
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="does not belong to the model"):
        lockstep.Run(model, torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(UsageError, match="does not belong to the model"):
        lockstep.Run(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(UsageError, match="Run needs the optimizers"):
        lockstep.Run(model)
    with pytest.raises(UsageError, match="Pass it too"):
        lockstep.Run(model, torch.optim.Adam(model.parameters()), torch.optim.lr_scheduler.StepLR(opt, 1))
    with pytest.raises(UsageError, match="has no step"):
        lockstep.Run(model, opt, DataLoader(data()))
    with pytest.raises(UsageError, match="Run takes one model"):
        lockstep.Run(model, opt, CNN())
    with pytest.raises(UsageError, match="Module first"):
        lockstep.Run(opt, model)
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        lockstep.Run(nn.SyncBatchNorm.convert_sync_batchnorm(CNN()), opt)
    run = lockstep.Run(model, opt)
    with pytest.raises(UsageError, match="averaged twice"):
        lockstep.Run(model, opt)
    run.close()
    lockstep.Run(model, opt).close()


def test_an_optimizer_that_needs_a_closure_may_stand_beside_the_one_that_steps() -> None:
    """Adam trains in the loop over run.shard; LBFGS is there for a loop over run.steps later."""
    weights = []
    for beside in (False, True):
        model = build("mlp")
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        lbfgs = [torch.optim.LBFGS(model.parameters(), max_iter=2)] if beside else []
        run = lockstep.Run(model, adam, *lbfgs, lanes=2)
        for batch in run.shard(data(16), global_batch=8):
            turn(model, adam, batch)
            if beside:
                with pytest.raises(UsageError, match=r"LBFGS needs a closure.*run\.steps"):
                    lbfgs[0].step()
        assert run.step == 2
        run.close()
        weights.append(digest(model))
    assert weights[0] == weights[1]


def test_a_closure_or_an_unknown_scaler_is_told() -> None:
    run, model, opt = made(2)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    with pytest.raises(UsageError, match="closure"):
        for x, _ in run.shard(data(), global_batch=8):
            model(x).sum().backward()
            opt.step(lambda: 0.0)
    with pytest.raises(UsageError, match="GradScaler that Run does not know"):
        for x, _ in run.shard(data(), global_batch=4):
            scaler.scale(model(x).sum()).backward()
            if model.layers[0].weight.grad is not None:
                scaler.step(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # left in mid-step, by the exception
        run.close()


def test_operators_that_cannot_repeat_themselves_are_named() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(4).put_(torch.tensor([0, 0]), self.a[:2])  # not deterministic without accumulate

    run, model, _ = made(2, Random())
    with pytest.raises(RuntimeError, match="put_") as caught:
        for x, _ in run.shard(data(), global_batch=8):
            model(x)
    assert "exact=False" in "".join(caught.value.__notes__)
    run.close()


def test_a_dataset_is_asked_for_what_it_is_worth() -> None:
    run, _, _ = made(4)
    with pytest.raises(UsageError, match="global_batch=2 is smaller than lanes=4"):
        run.shard(data(), global_batch=2)
    with pytest.raises(UsageError, match="DataLoader"):
        run.shard(DataLoader(data()), global_batch=8)
    with pytest.raises(UsageError, match="Shuffle in the dataset"):
        run.shard(Stream(), global_batch=8, shuffle=True)
    run.close()


class Recording(Dataset[Any]):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        return torch.full((12,), float(index))


def test_any_collate_function_and_any_sampler_give_the_global_order() -> None:
    samples = Recording()
    run, model, opt = made(2)
    sizes = []
    for batch in run.shard(samples, global_batch=4, sampler=range(11, -1, -1), collate_fn=lambda s: {"x": torch.stack(s)}):
        sizes.append(batch["x"].shape)
        model(batch["x"]).sum().backward()
        opt.step()
    assert samples.asked == list(range(11, -1, -1))
    assert set(sizes) == {(2, 12)}
    run.close()


# -- found by attack -------------------------------------------------------------------------


def test_a_loop_left_in_mid_step_leaves_no_trace_in_buffers_and_is_told() -> None:
    run, model, _ = made(4, build("cnn"))
    before = digest(model)
    for number, (x, _) in enumerate(run.shard(data(), global_batch=8)):
        model(x).sum().backward()
        if number == 2:
            break
    assert digest(model) == before
    with pytest.warns(UserWarning, match="left in the middle of step 0"):
        run.close()


def test_an_exception_in_the_body_ends_the_loop_and_another_may_begin() -> None:
    run, model, opt = made(2)
    with pytest.raises(ZeroDivisionError):
        for _ in run.shard(data(), global_batch=8):
            1 / 0  # noqa: B018
    for batch in run.shard(data(8), global_batch=8):
        turn(model, opt, batch)
    assert run.step == 1
    run.close()
    with pytest.raises(UsageError, match="closed"):
        next(iter(run.shard(data(), global_batch=8)))


def test_a_backward_that_raised_and_was_caught_is_told() -> None:
    run, model, _ = made(2)

    def refuse(grad: Tensor) -> None:
        raise RuntimeError("no")

    with pytest.raises(UsageError, match="half of lane 0 is missing"):
        for x, _ in run.shard(data(), global_batch=8):
            loss = model(x).sum()
            model.layers[0].bias.register_hook(refuse)
            try:
                loss.backward()
            except RuntimeError:
                continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # left in mid-step, by the exception
        run.close()


def test_a_scheduler_that_run_does_not_know_is_told() -> None:
    run, model, opt = made(2)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)
    with pytest.raises(UsageError, match="changed between two lanes of step 0"):
        for batch in run.shard(data(), global_batch=8):
            turn(model, opt, batch)
            sched.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # left in mid-step, by the exception
        run.close()


def test_a_rate_set_at_the_top_of_the_body_is_fine() -> None:
    run, model, opt = made(2)
    for batch in run.shard(data(16), global_batch=8):
        opt.param_groups[0]["lr"] = 0.1 / (1 + run.step)
        turn(model, opt, batch)
    run.close()


def test_a_parameter_group_added_later_must_be_the_models() -> None:
    run, _, opt = made(2)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UsageError, match=r"shape \[3\] that does not belong to the model"):
        next(iter(run.shard(data(), global_batch=8)))
    run.close()


def test_evaluate_leaves_buffers_alone_and_sums_in_wide_dtypes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x)

    run, model, _ = made(2, Counting())
    sums = run.evaluate(
        lambda b: {
            "true": torch.tensor(True),
            "byte": torch.tensor(100, dtype=torch.uint8),
            "half": torch.tensor(2048.0, dtype=torch.float16),
            "out": model(b[0]).sum(),
        },
        data(40),
        global_batch=2,
    )
    assert (int(sums["true"]), int(sums["byte"]), float(sums["half"])) == (40, 4000, 81920.0)
    assert model.calls == 0
    run.close()


def test_half_precision_gradients_of_many_lanes_do_not_overflow() -> None:
    model = nn.Linear(12, 1, bias=False).half()
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = lockstep.Run(model, opt, lanes=8)
    for _ in run.shard(data(8), global_batch=8):
        (model.weight * 9000.0).sum().backward()
        if run.averaged:
            assert torch.equal(model.weight.grad, torch.full((1, 12), 9000.0).half())
        opt.step()
    run.close()


def test_large_buffers_that_batch_norm_changes_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(12, 20000), nn.BatchNorm1d(20000), nn.Linear(20000, 4))
    run, _, opt = made(4, model)
    expected = torch.zeros(20000)
    with torch.no_grad():
        for k in range(4):
            expected += 0.1 * model[0](data(16).tensors[0][4 * k : 4 * k + 4]).mean(0) / 4
    for batch in run.shard(data(16), global_batch=16):
        turn(model, opt, batch)
    torch.testing.assert_close(model[1].running_mean, expected, rtol=1e-4, atol=1e-5)
    run.close()


def test_copies_of_gated_objects_are_nobodys() -> None:
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)
    run = lockstep.Run(model, opt, sched, lanes=2)
    before = sched.last_epoch
    other = copy.deepcopy(sched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the scheduler before the optimizer
        other.step()
    assert (sched.last_epoch, other.last_epoch) == (before, before + 1)
    run.close()


def test_determinism_lasts_from_the_first_run_to_the_end_of_the_last() -> None:
    first, second = made(2)[0], made(2)[0]
    first.close()
    assert torch.are_deterministic_algorithms_enabled()
    second.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    model = build("mlp")
    model.register_buffer("wide", torch.zeros(1).expand(5))
    with pytest.raises(UsageError, match="buffer wide is sparse or expanded"):
        made(2, model)


def test_the_gpu_of_the_model_is_the_current_one_before_anything_is_seeded_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.manual_seed and torch.cuda.synchronize mean the current device, which is cuda:0 unless the script has said so."""
    done: list[Any] = []

    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("the workers would connect now")

    monkeypatch.setattr(run_parts, "device_of", lambda params: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(run_parts, "join_workers", stop)
    with pytest.raises(RuntimeError, match="would connect"):
        made()
    assert done == [torch.device("cuda", 1)]


def test_a_model_on_the_cpu_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"{device} was made the current device"))
    made()[0].close()
