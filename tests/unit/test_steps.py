"""The loop over run.steps in one process: it means what the plain loop means, and every misuse gets a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import UsageError
from tests.models import build, data, digest

pytestmark = pytest.mark.usefixtures("one_thread")


def made(lanes: int = 4, model: nn.Module | None = None) -> tuple[lockstep.Run, nn.Module, torch.optim.Optimizer]:
    model = model or build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lockstep.Run(model, opt, lanes=lanes), model, opt


def backward(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_loop_with_one_phase_gives_the_bits_of_the_loop_over_shards(lanes: int) -> None:
    ours, theirs = build("mlp"), build("mlp")
    run, _, opt = made(lanes, theirs)
    for batch in run.shard(data(43), global_batch=16, shuffle=True, epochs=2):
        backward(theirs, batch)
        opt.step()
        opt.zero_grad()
    run.close()
    run, _, opt = made(lanes, ours)
    steps = run.steps(data(43), global_batch=16, shuffle=True, epochs=2)
    assert len(steps) == 6
    for number, step in enumerate(steps):
        assert run.step == number
        for batch in step:
            backward(ours, batch)
        opt.step()
        opt.zero_grad()
    assert run.step == 6
    run.close()
    assert digest(ours) == digest(theirs)


def adversarial() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(2)
    generator, critic = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    return generator, critic, torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)


def test_two_models_and_two_backwards_per_batch_train_as_in_the_plain_loop() -> None:
    samples = TensorDataset(torch.randn(40, 5), torch.randn(40, 3))
    generator, critic, opt_g, opt_c = adversarial()
    for real, noise in DataLoader(samples, batch_size=8):
        opt_c.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(generator(noise).detach())).mean().backward()
        opt_c.step()
        opt_g.zero_grad()
        F.softplus(-critic(generator(noise))).mean().backward()
        opt_g.step()
    expected = digest(generator), digest(critic)
    generator, critic, opt_g, opt_c = adversarial()
    run = lockstep.Run([generator, critic], opt_g, opt_c, lanes=1)
    for step in run.steps(samples, global_batch=8):
        for real, noise in step:
            F.softplus(-critic(real)).mean().backward()
            F.softplus(critic(generator(noise).detach())).mean().backward()
        opt_c.step()
        for _, noise in step:
            F.softplus(-critic(generator(noise))).mean().backward()
        opt_g.step()
    run.close()
    assert (digest(generator), digest(critic)) == expected


def test_lbfgs_with_a_closure_over_the_lanes_trains_as_in_the_plain_loop() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    reference = build("mlp")
    opt = optimizer(reference)
    for batch in DataLoader(data(32), batch_size=16):

        def closure(batch: Any = batch) -> Tensor:
            opt.zero_grad()
            return backward(reference, batch)

        opt.step(closure)
    for lanes in (1, 4):
        model = by_lbfgs(lanes, optimizer)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def by_lbfgs(lanes: int, optimizer: Any) -> nn.Module:
    model = build("mlp")
    opt = optimizer(model)
    run = lockstep.Run(model, opt, lanes=lanes)
    for step in run.steps(data(32), global_batch=16):

        def closure(step: Any = step) -> float:
            for batch in step:
                run.log(loss=backward(model, batch))
            return float(step.means["loss"])

        opt.step(closure)
    with pytest.raises(UsageError, match=r"LBFGS needs a closure.*run\.steps"):
        for batch in run.shard(data(32), global_batch=16):
            backward(model, batch)
    run.close()
    return model


def test_a_break_after_some_steps_keeps_them() -> None:
    run, model, opt = made()
    for number, step in enumerate(run.steps(data(40), global_batch=8)):
        for batch in step:
            backward(model, batch)
        opt.step()
        if number == 2:
            break
    assert run.step == 3
    for step in run.steps(data(40), global_batch=8):  # another loop
        for batch in step:
            backward(model, batch)
        opt.step()
    assert run.step == 8
    run.close()


def test_lanes_without_backward_and_lanes_of_weight_0_count_for_nothing() -> None:
    """Of 4 lanes the first and the third count: their mean is the gradient."""
    x, y = data(16).tensors
    reference = build("mlp")
    backward(reference, (torch.cat([x[:4], x[8:12]]), torch.cat([y[:4], y[8:12]])))
    run, model, _ = made()
    for step in run.steps(data(16), global_batch=16):
        assert len(step) == 4
        for batch in step:
            if step.lane == 1:
                continue
            if step.lane == 3:
                run.weigh(0)
            backward(model, batch)
        assert run.averaged
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    run.close()


def test_a_step_whose_lanes_are_all_skipped_changes_nothing() -> None:
    run, model, opt = made(model=nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    before = digest(model)
    for batch in run.shard(data(16), global_batch=16):
        run.weigh(0)
        backward(model, batch)
        opt.step()
    assert (run.step, digest(model)) == (1, before)
    run.close()


class HoldingNothing:
    """A collate function that drops samples, and returns None if none is left."""

    def __call__(self, samples: list[Any]) -> Any:
        kept = [(x, y) for x, y in samples if y < 2]
        return (torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])) if kept else None


def test_batches_that_collate_as_none_are_skipped() -> None:
    x = torch.randn(48, 12)
    y = torch.tensor([0, 3] * 4 + [1, 0] * 4 + [3] * 8 + [1] * 8 + [2] * 8 + [0] * 8)  # lanes 2 and 4 of the steps have nothing
    run, model, opt = made(lanes=2)
    seen = []
    for batch in run.shard(TensorDataset(x, y), global_batch=16, collate_fn=HoldingNothing()):
        assert batch is not None
        seen.append(len(batch[0]))
        backward(model, batch)
        opt.step()
        opt.zero_grad()
    assert (run.step, seen) == (3, [4, 8, 8, 8])
    of_shards = digest(model)
    run.close()
    run, model, opt = made(lanes=2)
    for step in run.steps(TensorDataset(x, y), global_batch=16, collate_fn=HoldingNothing()):
        for batch in step:
            backward(model, batch)
        opt.step()
        opt.zero_grad()
    assert (run.step, digest(model)) == (3, of_shards)
    run.close()


def test_values_of_all_lanes_are_gathered_in_the_order_of_the_lanes() -> None:
    run, model, opt = made()
    for step in run.steps(data(32), global_batch=16):
        seen = step.gather(lambda batch: batch[1])
        assert torch.equal(torch.cat(seen), data(32).tensors[1][16 * run.step :][:16])
        for batch in step:
            run.log(loss=backward(model, batch), lane=step.lane)
        assert step.means["lane"] == 1.5
        opt.step()
        run.log(rate=0.1)
        assert run.committed
        assert run.every(2) == (run.step == 1)
    assert run.logged["rate"] == 0.1
    run.close()


def test_every_misuse_gets_a_sentence() -> None:
    def each(body: Any, match: str) -> None:
        run, model, opt = made()
        with pytest.raises(UsageError, match=match):
            for step in run.steps(data(32), global_batch=16):
                body(run, model, opt, step)
        run.close()

    def steps_inside(run: Any, model: Any, opt: Any, step: Any) -> None:
        for batch in step:
            backward(model, batch)
            opt.step()

    def leaves_lanes(run: Any, model: Any, opt: Any, step: Any) -> None:
        for batch in step:
            backward(model, batch)
            break

    def evaluates_inside(run: Any, model: Any, opt: Any, step: Any) -> None:
        for _ in step:
            run.evaluate(lambda b: {"n": 1}, data(8), global_batch=8)

    def reads_lane_outside(run: Any, model: Any, opt: Any, step: Any) -> None:
        _ = step.lane

    def uses_old_step(run: Any, model: Any, opt: Any, step: Any) -> None:
        kept.append(step)
        for batch in kept[0]:
            backward(model, batch)

    def goes_back_outside(run: Any, model: Any, opt: Any, step: Any) -> None:
        for batch in step:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward(retain_graph=True)
        loss.backward()

    kept: list[Any] = []
    each(uses_old_step, "a step was used after its iteration")
    each(goes_back_outside, r"backward\(\) was called behind the loop over the lanes")
    each(steps_inside, r"SGD.step\(\) was called inside the loop over the lanes of step 0")
    each(leaves_lanes, "the loop over the lanes of step 0 was left before its end")
    each(evaluates_inside, r"run.evaluate\(...\) must be called by all workers at once")
    each(reads_lane_outside, "step.lane was read outside")
