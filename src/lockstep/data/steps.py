"""Steps: what the user's loop over ``run.steps`` iterates over, one Step at a time; and Step, which iterates over its lanes.

They own the order of the events. Their drivers (training/loop.py, training/phases.py) own what happens at each event:

    enter_loop, loop_entered
      start_epoch                                               for each epoch, and again after each change of workers
        start_step                                              for each step
          start_phase                                           for each loop over the lanes of the step, and again if repeated
            start_micro_batch   <inner body>   end_micro_batch  for each micro-batch of this worker
          end_phase
        end_step
    loop_ended or steps_abandoned
    leave_loop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from lockstep.data.shard import LoopDriver
from lockstep.data.source import LoaderOptions, MicroBatch
from lockstep.data.step_loader import LoadedStep, StepLoader, StepPlan, StepRestarted
from lockstep.errors import UsageError

T = TypeVar("T")


class PhaseDriver(Protocol):
    """What Steps and Step call, beside the LoopDriver. Methods that talk to other workers may raise StepRestarted."""

    @property
    def generation(self) -> int:
        """The number of the current set of workers. Lanes are assigned again when it changes."""

    @property
    def lane(self) -> int:
        """The lane that the inner body works on."""

    def loop_entered(self) -> None:
        """The loop that was entered is a loop over steps."""

    def steps_abandoned(self) -> None:
        """The user left the loop over steps, by ``break`` or by an exception in its body."""

    def start_step(self, step: StepPlan) -> None:
        """A step begins: the body of the loop over steps is about to run."""

    def start_phase(self, counts: tuple[int, ...]) -> None:
        """A loop over the lanes of the step begins, possibly again. ``counts``: the samples of every lane of the run."""

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        """The inner body is about to run. ``is_last``: on this worker's last micro-batch of the phase."""

    def end_micro_batch(self) -> None:
        """The inner body has ended."""

    def end_phase(self) -> None:
        """The loop over the lanes has ended: average the gradients of all workers."""

    def end_step(self) -> None:
        """The body of the loop over steps has ended."""

    def gather_lanes(self, fn: Callable[[Any], Any], micro_batches: Callable[[], Iterator[MicroBatch]]) -> list[Any]:
        """Return what ``fn`` returns for the micro-batches of all workers, in the order of the lanes. Collective."""

    def means(self) -> dict[str, float]:
        """Return the averages of what was logged in the last phase. Collective."""


class Step:
    """One step of a loop over ``run.steps``: iterate over it to run a phase, which is one pass over this worker's lanes.

    When the loop over the lanes has ended, ``param.grad`` holds the averages over all lanes of all workers. A second loop over the
    same step runs another phase, with gradients of its own. If a worker is lost in a phase, the others run the phase again: the
    inner body must not collect values in lists of its own (use ``run.log`` and ``means``, or ``gather``).
    """

    def __init__(self, driver: PhaseDriver, steps: _LoadedSteps) -> None:
        self._driver, self._all_steps, self._number = driver, steps, steps.number

    def __len__(self) -> int:
        """How many micro-batches this worker has in the step."""
        return self._steps.count

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                self._driver.start_phase(self._steps.plan.counts)
                for micro_batch, is_last in self._steps.micro_batches():
                    self._driver.start_micro_batch(micro_batch.lane, is_last)
                    yield micro_batch.batch
                    self._driver.end_micro_batch()
                self._driver.end_phase()
                return
            except StepRestarted:
                continue

    @property
    def _steps(self) -> _LoadedSteps:
        if self._all_steps.number != self._number:
            raise UsageError(
                "a step was used after its iteration: its batches and gradients are gone. Use it in the body of the loop over "
                "run.steps(...) that it came from."
            )
        return self._all_steps

    @property
    def lane(self) -> int:
        """The lane that the inner body works on now: 0 to ``run.lanes`` - 1."""
        return self._driver.lane

    @property
    def means(self) -> dict[str, float]:
        """The averages over all lanes of what ``run.log`` was given in the last loop over this step. All workers must read it."""
        return self._driver.means()

    def gather(self, fn: Callable[[Any], T]) -> list[T]:
        """Call ``fn`` on the batch of each lane, without gradients, and return the results of all lanes, in the order of the lanes.

        All workers must call it, outside the loop over the lanes. Buffers (BatchNorm statistics) keep their values, and the model
        draws the random numbers (dropout) that it will draw in the next loop over the lanes.

        Args:
            fn: Called with each batch of this worker; returns a tensor, a number, or a list, tuple or dict of them.

        Returns:
            One result for each lane with samples, the same list on every worker.

        Example:
            >>> features = torch.cat(step.gather(lambda batch: model(batch[0])))
        """

        return self._driver.gather_lanes(fn, lambda: (micro_batch for micro_batch, _ in self._steps.micro_batches()))


class Steps:
    """The iterable that ``run.steps`` returns: one iteration per optimizer step, on every worker alike. ``len()`` counts them.

    Raises:
        UsageError: If the dataset cannot be loaded with these options.
    """

    def __init__(self, loop: LoopDriver, phases: PhaseDriver, dataset: Any, options: LoaderOptions) -> None:
        self._loop, self._phases = loop, phases
        self._loader = StepLoader(loop, dataset, options, needs_a_batch=False)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Step]:
        stage = self._loop.enter_loop(self._loader.settings)
        if stage is None:
            return
        self._phases.loop_entered()
        try:
            with self._loader.opened(stage):
                steps = _LoadedSteps(self._loop, self._phases, self._loader)
                while steps.advance():
                    self._phases.start_step(steps.plan)
                    yield Step(self._phases, steps)
                    self._phases.end_step()
                self._loop.loop_ended()
        except GeneratorExit:
            self._phases.steps_abandoned()
            raise
        finally:
            self._loop.leave_loop()


class _LoadedSteps:
    """The current step, with the micro-batches of this worker's lanes. It is loaded again if the workers have changed."""

    def __init__(self, loop: LoopDriver, phases: PhaseDriver, loader: StepLoader) -> None:
        self._loop, self._phases, self._loader = loop, phases, loader
        self.number = 0
        """How many steps were loaded: a new one for every iteration."""
        self._generation: int | None = None
        self._steps: Iterator[LoadedStep] = iter(())
        self._current: LoadedStep | None = None
        self._loaded: list[tuple[MicroBatch, bool]] = []

    def advance(self) -> bool:
        """Load the step at the driver's position. Returns False if the loop is complete."""
        self.number += 1
        while self._loader.is_incomplete:
            try:
                if self._generation != self._phases.generation:
                    self._reload()
                else:
                    self._load_next()
            except StepRestarted:
                continue
            if self._current is not None:
                return True
        return False

    @property
    def plan(self) -> StepPlan:
        return self._fresh().plan

    @property
    def count(self) -> int:
        """How many micro-batches this worker has in the step."""
        first, last = self._loop.lanes_here
        return sum(count > 0 for count in self.plan.counts[first:last]) or 1

    def micro_batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield (micro-batch, whether it is the last) of this worker's lanes: in every phase the same ones."""
        source, at = self._fresh().micro_batches, 0
        while True:
            if at == len(self._loaded):
                loaded = next(source, None)
                if loaded is None:
                    return
                self._loaded.append(loaded)
            yield self._loaded[at]
            at += 1

    def _fresh(self) -> LoadedStep:
        if self._generation != self._phases.generation:
            self._reload()
        assert self._current is not None
        return self._current

    def _reload(self) -> None:
        self._generation, self._current = self._phases.generation, None
        self._steps = self._loader.steps()
        self._load_next()

    def _load_next(self) -> None:
        if self._current is not None:
            for _ in self._current.micro_batches:  # the user has not looped over all lanes: the loader gives them in order
                pass
        self._current, self._loaded = next(self._steps, None), []
