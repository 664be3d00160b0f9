"""Run on several workers: what must be equal is compared, and what differs is named on every one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from tests.models import CNN, MLP, digest
from tests.workers import Outcome, run_workers


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(samples, 12, generator=generator), torch.randint(0, 4, (samples,), generator=generator))


def made(lanes: int | None = 4, **kwargs: Any) -> tuple[lockstep.Run, nn.Module, torch.optim.Optimizer]:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lockstep.Run(model, opt, lanes=lanes, timeout_s=5, **kwargs), model, opt


def errors(outcomes: list[Outcome], kind: str = "UsageError") -> str:
    """The one message that every rank got."""
    messages = {outcome.error for outcome in outcomes}
    assert len(messages) == 1, messages
    (found,) = messages
    assert found is not None
    assert found[0] == kind, found
    return found[1]


def other_length(rank: int, size: int) -> None:
    run, model, opt = made()
    for x, y in run.shard(data(32 + rank), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()


def test_datasets_of_different_length_raise_on_every_worker() -> None:
    message = errors(run_workers(other_length, 2, check=False))
    assert "rank 0 has argument length (32), rank 1 has argument length (33)" in message


def other_rate(rank: int, size: int) -> None:
    run, model, opt = made()
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if run.step == 2:
            opt.param_groups[0]["lr"] = 0.1 / (1 + rank)


def test_learning_rates_that_differ_raise_before_the_step() -> None:
    message = errors(run_workers(other_rate, 2, check=False))
    assert "step differently in step 2" in message
    assert "('lr', 0.05)" in message


def too_many(rank: int, size: int) -> None:
    made(lanes=2)


def test_more_workers_than_lanes_raise() -> None:
    assert "3 workers cannot share 2 lanes" in errors(run_workers(too_many, 3, check=False))


def other_order(rank: int, size: int) -> None:
    run, model, opt = made()
    for x, y in run.shard(data(), global_batch=8, sampler=range(32) if rank else range(31, -1, -1)):
        F.cross_entropy(model(x), y).backward()
        opt.step()


def test_samplers_that_disagree_raise() -> None:
    assert "have samplers that disagree" in errors(run_workers(other_order, 2, check=False))


def half_weighed(rank: int, size: int) -> None:
    run, model, opt = made()
    for x, y in run.shard(data(), global_batch=8):
        if rank:
            run.weigh(3)
        F.cross_entropy(model(x), y).backward()
        opt.step()


def test_weights_on_some_workers_only_raise() -> None:
    assert "for some lanes of step 0 and not for others" in errors(run_workers(half_weighed, 2, check=False))


def other_lanes(rank: int, size: int) -> None:
    made(lanes=4 + rank)


def test_different_arguments_to_run_raise() -> None:
    assert "setting lanes (4)" in errors(run_workers(other_lanes, 2, check=False))


def other_model(rank: int, size: int) -> None:
    model = nn.Linear(12, 4 + rank)
    lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=4, timeout_s=5)


def test_different_models_are_named_before_training() -> None:
    message = errors(run_workers(other_model, 2, check=False))
    assert "different models: rank 0 has parameter weight (shape [4, 12]" in message
    assert "rank 1 has parameter weight (shape [5, 12]" in message


def freezes_another(rank: int, size: int) -> None:
    run, model, opt = made()
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if run.committed and run.step == 2:
            model.layers[2 * rank].weight.requires_grad_(False)


def test_workers_that_freeze_different_parameters_raise() -> None:
    assert "train different parameters" in errors(run_workers(freezes_another, 2, check=False))


def changes_a_buffer(rank: int, size: int) -> None:
    model = CNN()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lockstep.Run(model, opt, lanes=4, timeout_s=5, log_every=1)
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        run.log(loss=1.0)
        if run.committed and run.step == 2:
            model.body[1].running_mean.detach().add_(rank)


def test_buffers_that_differ_between_workers_raise() -> None:
    assert "with different buffers" in errors(run_workers(changes_a_buffer, 2, check=False))


def leaves_early(rank: int, size: int) -> int:
    run, model, opt = made()
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if rank and run.every(2):
            break
    run.close()
    return run.step


def test_a_worker_that_leaves_the_loop_early_is_named_and_nobody_hangs() -> None:
    outcomes = run_workers(leaves_early, 2, check=False, deadline_s=30)
    for outcome in outcomes:  # rank 1 closes its Run, and rank 0 is still in the loop
        assert outcome.error is not None
        assert outcome.error[0] == "UsageError"
        assert "rank 0 is in bucket 0 of step 2" in outcome.error[1]
        assert "rank 1 is in what was logged" in outcome.error[1]
        assert "behind an `if`, a `break`" in outcome.error[1]


def resumed(rank: int, size: int) -> bytes:
    """Rank 0 alone has loaded a state: it goes to all."""
    torch.manual_seed(rank)
    model = MLP()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3)
    if rank == 0:
        for x, y in (data()[:8], data()[8:16]):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            sched.step()
            opt.zero_grad()
    run = lockstep.Run(model, opt, sched, lanes=4)
    for x, y in run.shard(data(), global_batch=8, epochs=2):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        sched.step()
    assert sched.last_epoch == 10
    run.close()
    return digest(model)


def test_the_state_of_optimizers_and_schedulers_comes_from_rank_0() -> None:
    assert len({*run_workers(resumed, 1), *run_workers(resumed, 3)}) == 1


def default_lanes(rank: int, size: int) -> tuple[int, tuple[int, int]]:
    run, _, _ = made(None)
    run.close()
    return run.lanes, run.lanes_here


def test_lanes_are_as_many_as_workers_by_default() -> None:
    assert run_workers(default_lanes, 3) == [(3, (0, 1)), (3, (1, 2)), (3, (2, 3))]


def exchanges_values(rank: int, size: int) -> list[object]:
    run, model, opt = made()
    seen: list[object] = [run.gather([rank, "x" * rank]), run.broadcast(torch.full((2,), rank), source=2).tolist()]
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if run.every(3):
            seen += [
                run.mean(rank),
                run.mean(0.1),
                run.mean(torch.tensor([rank, 0.1])).tolist(),
                run.mean(torch.tensor(rank)).item(),
            ]
    run.close()
    return seen


def test_values_of_all_workers_are_gathered_averaged_and_broadcast() -> None:
    (seen,) = {repr(each) for each in run_workers(exchanges_values, 3)}
    tenth = torch.tensor(0.1).item()
    assert seen == repr([[[0, ""], [1, "x"], [2, "xx"]], [2, 2], 1.0, 0.1, [1.0, tenth], 1.0])


def logs_at_step_level(rank: int, size: int) -> dict[str, float]:
    """3 lanes on 2 workers: one worker logs more often than the other before it logs for the step."""
    run, model, opt = made(3)
    for step in run.steps(data(), global_batch=8):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            run.log(size=float(len(x)))
        opt.step()
        opt.zero_grad()
        run.log(norm=5.0)
        norm = torch.tensor(7.0)
        run.log(norm=norm)
        norm.zero_()
    run.close()
    return run.epoch_means


def test_a_value_logged_for_the_step_counts_once_and_not_once_per_worker() -> None:
    sizes = (2 * 2 + 3 * 3 + 3 * 3) / 8
    assert run_workers(logs_at_step_level, 2) == [{"size": sizes, "norm": 6.0}] * 2


def averages_different_shapes(rank: int, size: int) -> None:
    run, _, _ = made()
    run.mean(torch.zeros(rank + 1))


def test_values_of_different_shapes_are_not_averaged() -> None:
    found = errors(run_workers(averages_different_shapes, 2, check=False))
    assert "cannot average a tensor of torch.float32 [1] of rank 0 and a tensor of torch.float32 [2] of rank 1" in found


def sets_the_state_on_one_rank(rank: int, size: int) -> None:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lockstep.Run(model, opt, lanes=4, timeout_s=5, verify_every=1)
    run.state["best"] = rank
    for x, y in run.shard(data(), global_batch=8):
        F.cross_entropy(model(x), y).backward()
        opt.step()


def test_a_state_that_differs_between_workers_is_named() -> None:
    outcomes = run_workers(sets_the_state_on_one_rank, 2, check=False)
    assert all("first in run.state['best']" in outcome.error[1] for outcome in outcomes)
