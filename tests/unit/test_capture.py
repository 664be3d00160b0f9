"""run.capture in one process, with a recorder that works on the host: bits, what is recorded when, and a line for what is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.gradients.cuda_graph import CannotRecord
from lockstep.training.captured_update import describe_host_work, describe_replaced, host_state, state_tensors
from tests.capture_jobs import JOBS, job
from tests.fake_graphs import FakeGraphs, capture_on_host
from tests.models import CNN, UnusedBranch, build, data, digest

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop:
    """A run of a small model with one lane, whose backward and update can be captured."""

    def __init__(
        self, model: nn.Module | None = None, *, lanes: int = 1, opt: Any = None, scheduler: Any = None, shapes: int = 4
    ) -> None:
        torch.manual_seed(3)
        self.model = model if model is not None else build("mlp")
        self.opt = opt(self.model.parameters()) if opt else torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = scheduler(self.opt) if scheduler else None
        objects = [self.opt, self.scheduler] if scheduler else [self.opt]
        self.run = lockstep.Run(self.model, *objects, lanes=lanes, seed=1)
        self.recorder: FakeGraphs = capture_on_host(self.run)
        self.forward_backward = self.run.capture(self._forward_backward, shapes=shapes)
        self.update = self.run.capture(self._update)

    def _forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def _update(self) -> None:
        self.opt.step()

    def train(self, steps: int, each: Callable[[int], None] = lambda step: None, samples: TensorDataset | None = None) -> str:
        """Train for a number of steps of 8 samples. ``each(step)`` is called before each step. Returns the digest of the model."""
        for x, y in self.run.shard(samples or data(8 * steps), global_batch=8):
            each(self.run.step)
            self.forward_backward(x, y)
            self.update()
            self.opt.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        self.run.close()
        return digest(self.model).hex()


def without_capture(**options: Any) -> Callable[..., str]:
    """The same training, in which nothing is recorded."""
    loop = Loop(**options)
    loop.run._parts.captures.recorder = None
    return loop.train


def quiet(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


# -- the bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", JOBS)
def test_a_captured_loop_has_the_bits_of_the_loop(name: str, lanes: int) -> None:
    plain, captured = job(0, 1, name, "cpu", lanes, capture_on_host)
    assert captured.digest == plain.digest
    assert captured.replays["forward_backward"] > 0
    assert captured.replays["update"] > 0 or name == "accumulated"  # there the learning rate is a number on this device


def test_both_functions_are_replayed_after_a_few_steps(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    assert loop.train(20) == without_capture()(20)
    assert (loop.forward_backward.replays, loop.update.replays) == (17, 15)
    assert (loop.forward_backward.recordings, loop.update.recordings) == (0, 0)  # closed
    assert len(loop.recorder.recorded) == 2
    assert all(each.is_closed for each in loop.recorder.recorded)
    assert quiet(capfd) == ""


def test_a_returned_loss_does_not_change_with_the_next_call() -> None:
    loop, losses, values = Loop(), [], []
    for x, y in loop.run.shard(data(80), global_batch=8):
        losses.append(loop.forward_backward(x, y))
        values.append(losses[-1].item())
        assert not losses[-1].requires_grad
        loop.opt.step()
        loop.opt.zero_grad()
    loop.run.close()
    assert [loss.item() for loss in losses] == values


def test_several_tensors_and_plain_values_are_returned_as_the_function_returns_them() -> None:
    loop = Loop()

    @loop.run.capture
    def forward_backward(batch: dict[str, Tensor], factor: float) -> dict[str, Any]:
        logits = loop.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"]) * factor
        loss.backward()
        return {"loss": loss, "more": [logits.sum(), (3, None, "text")]}

    for x, y in loop.run.shard(data(80), global_batch=8):
        found = forward_backward({"x": x, "y": y}, factor=0.5)
        assert list(found) == ["loss", "more"]
        assert found["more"][1] == (3, None, "text")
        assert torch.isfinite(found["more"][0])
        loop.opt.step()
        loop.opt.zero_grad()
    assert forward_backward.replays == 7
    loop.run.close()


def test_statistics_and_random_numbers_are_left_as_they_were_by_a_recording() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(CNN(), nn.Dropout(0.3))

    loop = Loop(model(), lanes=2)
    assert loop.train(10) == without_capture(model=model(), lanes=2)(10)
    assert loop.forward_backward.replays == 16


def test_two_backwards_of_one_captured_function_in_one_lane_add_up() -> None:
    def train(capture: bool) -> tuple[str, int]:
        loop = Loop(lanes=2)
        if not capture:
            loop.run._parts.captures.recorder = None
        for step in loop.run.steps(data(80), global_batch=8):
            for x, y in step:
                loop.forward_backward(x, y)
                loop.forward_backward(x * 2, y)
                F.cross_entropy(loop.model(x * 3), y).backward()  # not captured
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
            loop.update()
            loop.opt.zero_grad()
        loop.run.close()
        return digest(loop.model).hex(), loop.forward_backward.replays

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == 32


def test_a_generator_and_a_critic_are_captured_each_with_its_own_gradients() -> None:
    def train(capture: bool) -> tuple[str, list[int]]:
        torch.manual_seed(2)
        generator, critic = nn.Linear(3, 12), nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
        opt_g, opt_c = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
        run = lockstep.Run([generator, critic], opt_g, opt_c, lanes=2)
        if capture:
            capture_on_host(run)

        @run.capture
        def critic_backward(real: Tensor) -> Tensor:
            fake = generator(torch.randn(len(real), 3)).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            loss.backward()
            return loss

        @run.capture
        def generator_backward(real: Tensor) -> Tensor:
            loss = F.softplus(-critic(generator(torch.randn(len(real), 3)))).mean()
            loss.backward()
            return loss

        for step in run.steps(data(80), global_batch=8):
            opt_c.zero_grad()
            for real, _ in step:
                critic_backward(real)
            opt_c.step()
            opt_g.zero_grad()
            critic.requires_grad_(False)
            for real, _ in step:
                generator_backward(real)
            critic.requires_grad_(True)
            opt_g.step()
        result = digest(run.model).hex()
        run.close()
        return result, [critic_backward.replays, generator_backward.replays]

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == [16, 16]


def test_parameters_without_a_gradient_stay_without_one() -> None:
    loop = Loop(UnusedBranch(), opt=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1))
    unused = loop.model.unused.weight.detach().clone()

    def each(step: int) -> None:
        assert loop.model.unused.weight.grad is None

    loop.train(10, each)
    assert loop.forward_backward.replays == 7
    assert torch.equal(loop.model.unused.weight, unused)


# -- gradients belong to the step, not to a call ----------------------------------------------------


def _replace_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "clips": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "reads": lambda model: sum(param.grad.norm() for param in model.parameters() if param.grad is not None),
    "replaces": _replace_gradients,
    "writes unseen": lambda model: torch.autograd.graph.increment_version([param.grad for param in model.parameters()]),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_function_that_touches_gradients_after_its_backward_runs_as_it_is(touch: str, capfd: pytest.CaptureFixture[str]) -> None:
    def train(capture: bool) -> str:
        loop = Loop(lanes=2)
        if not capture:
            loop.run._parts.captures.recorder = None

        @loop.run.capture
        def forward_backward(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(loop.model(x), y).backward()
            if next(loop.model.parameters()).grad is not None:  # that of the last lane, in an eager step
                TOUCHES[touch](loop.model)

        loop.forward_backward = forward_backward
        result = loop.train(10)
        assert forward_backward.replays == 0
        return result

    assert train(True) == train(False)
    (line,) = quiet(capfd).splitlines()
    assert "forward_backward is not captured: it reads or changes param.grad after backward()" in line


def test_two_backwards_in_one_captured_function_add_up() -> None:
    def train(capture: bool) -> tuple[str, int]:
        loop = Loop(lanes=2)
        if not capture:
            loop.run._parts.captures.recorder = None

        @loop.run.capture
        def forward_backward(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(loop.model(x), y).backward()
            F.cross_entropy(loop.model(x * 2), y).backward()

        for step in loop.run.steps(data(80), global_batch=8):
            for x, y in step:
                forward_backward(x, y)
            loop.update()
            loop.opt.zero_grad()
        loop.run.close()
        return digest(loop.model).hex(), forward_backward.replays

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == 16


def test_gradients_are_kept_when_a_recording_that_shares_their_memory_is_replayed_in_the_same_lane() -> None:
    def train(capture: bool) -> tuple[str, int, int]:
        loop = Loop(lanes=2)
        if not capture:
            loop.run._parts.captures.recorder = None
        for step in loop.run.steps(data(80), global_batch=8):
            for x, y in step:
                calls = [(x[:3].clone(), y[:3].clone()), (x, y)]  # the shorter one is recorded first
                for batch in calls if loop.run.step < 5 else reversed(calls):
                    loop.forward_backward(*batch)
            loop.update()
            loop.opt.zero_grad()
        loop.run.close()
        return digest(loop.model).hex(), loop.forward_backward.replays, loop.update.replays

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == 32
    assert captured[2] >= 5, "the gradients are at the same place in each step, so the update is replayed"


def test_gradients_that_the_user_takes_out_of_a_lane_are_not_overwritten_by_the_next_replay() -> None:
    def train(capture: bool) -> str:
        loop = Loop(lanes=2)
        if not capture:
            loop.run._parts.captures.recorder = None
        params = list(loop.model.parameters())
        for step in loop.run.steps(data(80), global_batch=8):
            for x, y in step:
                loop.forward_backward(x, y)
                first = [param.grad for param in params]
                loop.model.zero_grad()
                loop.forward_backward(x * 2, y)
                for param, grad in zip(params, first, strict=True):
                    param.grad = param.grad * grad.sign()
            loop.update()
            loop.opt.zero_grad()
        loop.run.close()
        return digest(loop.model).hex()

    assert train(True) == train(False)


# -- memory that a recording reads ------------------------------------------------------------------


def test_memory_that_a_recording_reads_through_an_attribute_is_not_used_again_before_the_recording_is_closed() -> None:
    loop = Loop()
    criterion = nn.CrossEntropyLoss(weight=torch.rand(4))
    before = StorageWeakRef(criterion.weight.untyped_storage())

    @loop.run.capture
    def forward_backward(x: Tensor, y: Tensor) -> None:
        criterion(loop.model(x), y).backward()

    loop.forward_backward = forward_backward

    def replace(step: int) -> None:
        if step == 6:
            criterion.weight = torch.rand(4)
        assert not before.expired()

    loop.train(10, replace)
    assert forward_backward.replays == 7
    assert before.expired()


def test_memory_whose_address_is_part_of_the_key_is_free_when_the_user_has_replaced_it() -> None:
    loop, shift = Loop(), torch.ones(12)
    before = StorageWeakRef(shift.untyped_storage())

    @loop.run.capture
    def forward_backward(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(loop.model(x + shift), y).backward()

    for x, y in loop.run.shard(data(80), global_batch=8):
        if loop.run.step == 6:
            shift = torch.zeros(12)
            assert before.expired()
        forward_backward(x, y)
        loop.opt.step()
        loop.opt.zero_grad()
    assert forward_backward.recordings == 2
    loop.run.close()


# -- what is recorded, and when --------------------------------------------------------------------


def test_a_last_batch_that_is_shorter_is_not_recorded() -> None:
    loop = Loop()
    assert loop.train(11, samples=data(83)) == without_capture()(11, samples=data(83))
    assert loop.forward_backward.replays == 7
    assert len(loop.recorder.recorded) == 2


def test_a_parameter_that_is_frozen_and_a_mode_that_changes_are_recorded_anew() -> None:
    def each(loop: Loop) -> Callable[[int], None]:
        def change(step: int) -> None:
            if step == 8:
                loop.model[0].body[0].weight.requires_grad_(False)
            if step == 16:
                loop.model[0].body[1].eval()

        return change

    def made() -> Loop:
        torch.manual_seed(1)
        return Loop(nn.Sequential(CNN()))

    loop, plain = made(), made()
    plain.run._parts.captures.recorder = None
    assert loop.train(24, each(loop)) == plain.train(24, each(plain))
    assert loop.forward_backward.replays == 24 - 3 - 2 - 2


def test_buffers_that_are_replaced_are_recorded_anew() -> None:
    loop = Loop(nn.Sequential(CNN()))

    def replace(step: int) -> None:
        if step == 6:
            norm = loop.model[0].body[1]
            norm.running_mean = norm.running_mean.clone()

    loop.train(12, replace)
    assert len([each for each in loop.recorder.recorded if len(each._body.__code__.co_freevars)]) >= 3


def test_numbers_and_tensors_that_the_function_reads_by_name_may_change() -> None:
    def train(capture: bool) -> tuple[str, int]:
        loop = Loop()
        if not capture:
            loop.run._parts.captures.recorder = None
        factor, shift = 1.0, torch.zeros(12)

        @loop.run.capture
        def forward_backward(x: Tensor, y: Tensor) -> None:
            (F.cross_entropy(loop.model(x + shift), y) * factor).backward()

        for x, y in loop.run.shard(data(160), global_batch=8):
            if loop.run.step == 6:
                factor = 0.5
            if loop.run.step == 12:
                shift = torch.ones(12)
            forward_backward(x, y)
            loop.opt.step()
            loop.opt.zero_grad()
        loop.run.close()
        return digest(loop.model).hex(), forward_backward.replays

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == 20 - 3 - 2 - 2


FACTOR = 1.0


def scaled_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * FACTOR


def _decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Loss:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def method(self, x: Tensor, y: Tensor) -> None:
        (scaled_loss(self.function, x, y)).backward()

    __call__ = method


WRAPPED: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "a decorator": lambda model: _decorate(lambda x, y: (F.cross_entropy(model(x), y) * FACTOR).backward()),
    "autocast": lambda model: torch.autocast("cpu", enabled=False)(lambda x, y: (F.cross_entropy(model(x), y) * FACTOR).backward()),
    "partial": lambda model: functools.partial(lambda factor, x, y: (F.cross_entropy(model(x), y) * FACTOR).backward(), 1),
    "a method": lambda model: Loss(model).method,
    "an object": lambda model: Loss(model),
    "a global function": lambda model: lambda x, y: scaled_loss(model, x, y).backward(),
    "a function of an enclosing one": lambda model: (lambda loss: lambda x, y: loss(model, x, y).backward())(scaled_loss),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_numbers_that_a_wrapped_function_reads_may_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(capture: bool) -> tuple[str, int]:
        loop = Loop()
        if not capture:
            loop.run._parts.captures.recorder = None
        loop.forward_backward = loop.run.capture(WRAPPED[kind](loop.model))
        result = loop.train(12, lambda step: monkeypatch.setitem(globals(), "FACTOR", 1.0 if step < 6 else 0.5))
        return result, len(loop.recorder.recorded)

    plain, captured = train(False), train(True)
    assert captured[0] == plain[0]
    assert captured[1] == 4, "forward and backward twice, and the update for the gradients of each"


def test_the_least_recently_used_capture_is_dropped_and_a_line_says_that_there_are_more(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop(shapes=2)
    lengths = [1, 2, 3] * 12
    for x, y in loop.run.shard(data(8 * len(lengths)), global_batch=8):
        length = lengths[loop.run.step]
        loop.forward_backward(x[:length].clone(), y[:length].clone())
        assert loop.forward_backward.recordings <= 2
        loop.opt.step()
        loop.opt.zero_grad()
    made = len(loop.recorder.recorded)
    loop.run.close()
    assert 3 <= made <= 6, "each capture that is dropped makes the next one wait longer"
    assert sum(each.is_closed for each in loop.recorder.recorded) == made
    assert quiet(capfd).count("more than the 2 shapes") == 1


def test_shapes_that_never_come_twice_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    for x, y in loop.run.shard(data(8 * 40), global_batch=8):
        loop.forward_backward(x.repeat(1 + loop.run.step, 1), y.repeat(1 + loop.run.step))
        loop.opt.step()
        loop.opt.zero_grad()
    loop.run.close()
    assert loop.forward_backward.replays == 0
    assert quiet(capfd).splitlines() == [
        "lockstep: _forward_backward is not captured so far: its arguments have other shapes or values in each call. Pad batches "
        "to a few shapes, pass numbers as tensors."
    ]


def test_batches_that_are_read_as_variables_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()

    @loop.run.capture
    def forward_backward() -> None:
        F.cross_entropy(loop.model(x), y).backward()

    kept = []
    for x, y in loop.run.shard(data(8 * 40), global_batch=8):
        kept.append((x, y))  # so each is at another address
        forward_backward()
        loop.opt.step()
        loop.opt.zero_grad()
    loop.run.close()
    assert forward_backward.replays == 0
    assert "it reads `x`, which is another one in each call. Pass x as an argument" in quiet(capfd)


# -- the update ------------------------------------------------------------------------------------


def test_a_learning_rate_that_changes_at_times_is_recorded_anew() -> None:
    options = {"scheduler": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)}
    loop = Loop(**options)
    assert loop.train(40) == without_capture(**options)(40)
    assert loop.update.replays == 40 - 5 - 3 * 2


def test_a_learning_rate_that_changes_in_each_step_is_named_and_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"scheduler": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)}
    loop = Loop(**options)
    assert loop.train(40) == without_capture(**options)(40)
    assert (loop.forward_backward.replays, loop.update.replays) == (37, 0)
    (line,) = quiet(capfd).splitlines()
    assert "SGD's lr is a number on the host, and it changes in every step" in line
    assert 'lr=torch.tensor(..., device="cuda")' in line


def test_the_update_does_nothing_before_the_last_lane_and_commits_once() -> None:
    loop, commits = Loop(lanes=4), 0
    for number, (x, y) in enumerate(loop.run.shard(data(8 * 12), global_batch=8)):
        loop.forward_backward(x, y)
        loop.update()
        assert loop.run.committed == (number % 4 == 3)
        commits += loop.run.committed
    assert commits == loop.run.step == 12
    assert loop.update.replays > 5
    loop.run.close()


def test_an_optimizer_that_counts_on_the_host_is_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            self.param_groups[0]["lr"] = 0.1 / self.count
            return super().step()

    options = {"opt": lambda params: Counting(params, lr=0.1)}
    loop = Loop(**options)
    assert loop.train(10) == without_capture(**options)(10)
    assert loop.update.replays == 0
    assert loop.forward_backward.replays == 7
    assert "_update is not captured: Counting counts on the host" in quiet(capfd)


class Nesting(torch.optim.SGD):
    """Keeps a list of tensors in its state."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for param, state in self.state.items():
            state.setdefault("history", [torch.zeros_like(param)])[0].add_(param)


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_that_the_user_replaces_is_recorded_anew(nested: bool) -> None:
    def zero(loop: Loop) -> Callable[[int], None]:
        def change(step: int) -> None:
            if step == 10:
                state = loop.opt.state[next(loop.model.parameters())]
                entries, key = (state["history"], 0) if nested else (state, "momentum_buffer")
                entries[key] = torch.zeros_like(entries[key])

        return change

    loop, plain = (Loop(opt=lambda params: Nesting(params, lr=0.1, momentum=0.9)) for _ in range(2))
    plain.run._parts.captures.recorder = None
    assert loop.train(20, zero(loop)) == plain.train(20, zero(plain))
    assert loop.update.replays == 20 - 5 - 2


class Replacing(torch.optim.SGD):
    """Puts new tensors into its state in each step, except while ``rarely`` is set."""

    rarely = False

    def step(self, closure: Any = None) -> Any:
        super().step()
        for state in self.state.values():
            if not self.rarely:
                state["momentum_buffer"] = state["momentum_buffer"] * 0.5


def test_an_optimizer_that_replaces_its_state_in_each_step_is_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"opt": lambda params: Replacing(params, lr=0.1, momentum=0.9)}
    loop = Loop(**options)
    assert loop.train(10) == without_capture(**options)(10)
    assert (loop.update.replays, loop.forward_backward.replays) == (0, 7)
    (line,) = quiet(capfd).splitlines()
    assert "_update is not captured: Replacing puts another tensor into its state for `momentum_buffer` in a step" in line


def test_of_two_optimizers_of_one_class_neither_hides_what_the_other_does() -> None:
    first, second = (Replacing([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in range(2))
    for optimizer in (first, second):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones(2)
        optimizer.step()
    optimizers: list[torch.optim.Optimizer] = [first, second]
    tensors, numbers = state_tensors(optimizers), host_state(optimizers)
    first.step()
    assert describe_replaced(tensors, state_tensors(optimizers)) is not None
    assert describe_host_work(numbers, host_state(optimizers)) is None
    first.steps = 1
    before = host_state(optimizers)
    first.steps = 2
    assert describe_host_work(before, host_state(optimizers)) is not None


def test_a_state_that_is_replaced_only_in_the_recorded_step_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"opt": lambda params: Replacing(params, lr=0.1, momentum=0.9)}

    def train(capture: bool) -> str:
        loop = Loop(**options)
        loop.opt.rarely = True
        if not capture:
            loop.run._parts.captures.recorder = None

        def update() -> None:
            loop.opt.rarely = not (capture and loop.run._parts.gate._is_recording)
            loop.opt.step()

        loop.update = loop.run.capture(update)
        return loop.train(10)

    assert train(True) == train(False)
    assert "update is not captured: Replacing puts another tensor" in quiet(capfd)


def test_a_scheduler_in_the_update_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"scheduler": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)}

    def train(capture: bool) -> str:
        loop = Loop(**options)
        if not capture:
            loop.run._parts.captures.recorder = None
        scheduler, loop.scheduler = loop.scheduler, None

        def update() -> None:
            loop.opt.step()
            scheduler.step()

        loop.update = loop.run.capture(update)
        return loop.train(20)

    assert train(True) == train(False)
    assert "update is not captured: it calls StepLR.step(), which works on the host" in quiet(capfd)


def test_a_scaler_that_is_not_enabled_is_captured() -> None:
    model = build("mlp")
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    run = lockstep.Run(model, opt, scaler, lanes=1)
    capture_on_host(run)

    @run.capture
    def forward_backward(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y)).backward()

    @run.capture
    def update() -> None:
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    for x, y in run.shard(data(80), global_batch=8):
        forward_backward(x, y)
        update()
        opt.zero_grad()
    run.close()
    assert (forward_backward.replays, update.replays) == (7, 5)


def test_a_scaler_that_is_used_in_part_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    model = build("mlp")
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=4.0)
    run = lockstep.Run(model, opt, scaler, lanes=1)
    capture_on_host(run)

    @run.capture
    def forward_backward(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y)).backward()

    @run.capture
    def update() -> None:
        scaler.unscale_(opt)
        scaler.step(opt)

    for x, y in run.shard(data(80), global_batch=8):
        forward_backward(x, y)
        update()
        scaler.update()
        opt.zero_grad()
    run.close()
    assert update.replays == 0
    assert "scaler.update() is not called in it: call it in update() too" in quiet(capfd)


def test_backward_and_update_in_one_function_run_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()

    @loop.run.capture
    def whole_step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(loop.model(x), y).backward()
        loop.opt.step()
        loop.opt.zero_grad()

    for x, y in loop.run.shard(data(80), global_batch=8):
        whole_step(x, y)
    assert loop.run.step == 10
    loop.run.close()
    assert "Capture two functions" in quiet(capfd)


SETTINGS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: torch.set_float32_matmul_precision("high"),
    "tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "the newer way": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.fixture
def settings_restored() -> Iterator[None]:
    flash, benchmark, tf32 = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_of_torch_that_chooses_kernels_is_recorded_anew(name: str) -> None:
    loop = Loop()
    loop.train(16, lambda step: SETTINGS[name]() if step == 8 else None)
    assert loop.forward_backward.replays == 16 - 3 - 2


def test_another_growth_interval_of_a_scaler_is_recorded_anew() -> None:
    def train(capture: bool) -> tuple[float, int]:
        model = build("mlp")
        opt, scaler = torch.optim.SGD(model.parameters(), 0.1, fused=True), torch.amp.GradScaler("cpu", 4.0, growth_interval=1000)
        run = lockstep.Run(model, opt, scaler, lanes=1)
        if capture:
            capture_on_host(run)

        @run.capture
        def forward_backward(x: Tensor, y: Tensor) -> None:
            scaler.scale(F.cross_entropy(model(x), y)).backward()

        @run.capture
        def update() -> None:
            scaler.step(opt)
            scaler.update()

        for x, y in run.shard(data(8 * 20), global_batch=8):
            if run.step == 10:
                scaler.set_growth_interval(2)
            forward_backward(x, y)
            update()
            opt.zero_grad()
        run.close()
        return scaler.get_scale(), update.replays

    plain, captured = train(False), train(True)
    assert captured == (plain[0], 20 - 5 - 2)


# -- what cannot be captured -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CannotRecord("RuntimeError: no (train.py:3: `x.item()`)"), "RuntimeError: no (train.py:3: `x.item()`)"),
        (RuntimeError("an assertion\nof torch"), "recording it failed (RuntimeError: an assertion)"),
        (OSError(), "recording it failed (OSError)"),
    ],
)
def test_a_recording_that_fails_costs_nothing_but_a_line(error: Exception, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(CNN(), nn.Dropout(0.2))

    loop = Loop(model(), lanes=2)
    loop.recorder.fail = error
    assert loop.train(8) == without_capture(model=model(), lanes=2)(8)
    assert loop.forward_backward.replays == 0
    assert f"_forward_backward is not captured: {reason}.\n" in quiet(capfd)


def test_a_rehearsal_that_fails_by_itself_does_not_prevent_the_recording() -> None:
    loop = Loop()
    loop.recorder.fail_rehearsals = CannotRecord("torch's mode cannot do this")
    assert loop.train(8) == without_capture()(8)
    assert loop.forward_backward.replays == 8 - 3


def test_recordings_of_another_random_generator_are_not_replayed() -> None:
    loop = Loop()

    def replace(step: int) -> None:
        if step == 8:
            loop.recorder.generator += 1

    assert loop.train(16, replace) == without_capture()(16)
    assert loop.forward_backward.replays == 16 - 3 - 2


def test_a_wait_that_is_seen_prevents_the_recording(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.recorder.waits = [" (train.py:3: `loss.item()`)"]
    loop.train(8)
    assert loop.recorder.recorded == []
    assert "the host waits for the GPU in it (train.py:3: `loss.item()`)" in quiet(capfd)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (object(), "an argument[0][1] is a object"),
        (torch.zeros(3, requires_grad=True), "an argument[0][1] requires a gradient of its own"),
        (torch.zeros(3, requires_grad=True) * 2, "an argument[0][1] requires a gradient for the function that computed it"),
    ],
)
def test_arguments_that_cannot_be_copied_are_named(argument: Any, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()

    @loop.run.capture
    def forward_backward(x: Tensor, _: Any) -> None:
        loop.model(x).sum().backward()

    for x, _ in loop.run.shard(data(40), global_batch=8):
        forward_backward(x, argument)
        loop.opt.step()
    loop.run.close()
    assert words in quiet(capfd)


def test_sparse_gradients_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(19, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed((x.abs() * 7).long() % 19).mean(1)

    loop = Loop(Sparse(), opt=lambda params: torch.optim.SGD(params, lr=0.1))
    loop.train(8)
    assert loop.forward_backward.replays == 0
    assert "the gradient of embed.weight is sparse" in quiet(capfd)


def test_an_argument_that_is_changed_in_place_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()

    @loop.run.capture
    def forward_backward(x: Tensor) -> None:
        loop.model(x.mul_(2)).sum().backward()

    for x, _ in loop.run.shard(data(64), global_batch=8):
        forward_backward(x)
        loop.opt.step()
    loop.run.close()
    assert "it changes one of its arguments in place" in quiet(capfd)


@pytest.mark.parametrize("call", ["log", "weigh"])
def test_calls_that_a_replay_would_not_make_are_errors(call: str) -> None:
    loop = Loop()

    @loop.run.capture
    def forward_backward(x: Tensor, y: Tensor) -> None:
        if call == "log":
            loop.run.log(loss=1.0)
        loop.run.weigh(3)

    with pytest.raises(UsageError, match=rf"run\.{call}\(\) was called in the captured function forward_backward"):
        for x, y in loop.run.shard(data(8), global_batch=8):
            forward_backward(x, y)
    loop.run.close()


def test_outside_the_loop_the_function_runs_as_it_is() -> None:
    loop = Loop()

    @loop.run.capture
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(loop.model(x), y)

    x, y = data(8).tensors
    assert loss_of(x, y).requires_grad
    for x, y in loop.run.shard(data(64), global_batch=8):
        loop.forward_backward(x, y)
        loop.opt.step()
        if loop.run.every(4):
            loop.run.evaluate(lambda batch: {"loss": loss_of(*batch) * len(batch[0])}, data(16), global_batch=8)
    loop.run.close()
    assert loss_of.__name__ == "loss_of"
    assert loss_of(x, y).requires_grad, "after close too"


@pytest.mark.parametrize(("argument", "words"), [(nn.Linear(1, 1), "got a Linear"), (3, "got a int")])
def test_something_else_than_a_function_is_an_error(argument: Any, words: str) -> None:
    loop = Loop()
    with pytest.raises(UsageError, match=words):
        loop.run.capture(argument)
    with pytest.raises(UsageError, match="shapes=0"):
        loop.run.capture(print, shapes=0)
    loop.run.close()
