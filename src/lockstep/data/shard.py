"""Shard: what the user's loop over ``run.shard`` iterates over, one micro-batch at a time.

A Shard owns the order of the events in a loop. Its Driver (training/loop.py) owns what happens at each event:

    enter_loop
      start_epoch                                              for each epoch, and again after each change of workers
        start_step                                             for each step
          start_micro_batch   <loop body>   end_micro_batch    for each micro-batch of this worker
    loop_ended or loop_abandoned
    leave_loop
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lockstep.data.source import LoaderOptions
from lockstep.data.step_loader import LoaderDriver, StepLoader, StepPlan, StepRestarted


class LoopDriver(LoaderDriver, Protocol):
    """What every loop over the data calls."""

    def enter_loop(self, settings: Mapping[str, Any]) -> int | None:
        """A loop over the data begins. ``settings``: what must be equal on every worker.

        Returns the loop's stage (the number of loops over the data that the script has begun before), or None if the run has
        completed this loop already: before this worker joined, or before the run was resumed.
        """

    def loop_ended(self) -> None:
        """All epochs are complete, on every worker."""

    def loop_abandoned(self) -> None:
        """The user left the loop, by ``break`` or by an exception in the loop body."""

    def leave_loop(self) -> None:
        """Called last, however the loop ended."""


class ShardDriver(LoopDriver, Protocol):
    """What a Shard calls at each event of a loop. Every method may raise StepRestarted if it talks to other workers."""

    @property
    def next_loop_position(self) -> tuple[int, int] | None:
        """The position at which the next loop of the script begins. None if the run has completed that loop already."""

    def start_step(self, step: StepPlan) -> None:
        """A step begins. The first of its micro-batches is loaded already."""

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        """The loop body is about to run. ``is_last``: on this worker's last micro-batch of the step."""

    def end_micro_batch(self) -> None:
        """The loop body has ended."""


class Shard:
    """The iterable that ``run.shard`` returns: iterate over it as over a DataLoader.

    One iteration is one micro-batch. ``len(shard)`` is the number of iterations on this worker: one for each of its lanes that has
    samples, in each step. It changes if the workers change. In a resumed run it is the number that remains. A second loop over the
    same shard has a new order.

    Raises:
        UsageError: If the dataset cannot be loaded with these options.
    """

    def __init__(self, driver: ShardDriver, dataset: Any, options: LoaderOptions) -> None:
        self._driver = driver
        self._loader = StepLoader(driver, dataset, options, needs_a_batch=True)
        self._yielded = 0
        self._length: int | None = None
        """The number of iterations of the current loop; None if this shard is in no loop."""

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        return self._loader.micro_batches_from(self._driver.next_loop_position)

    def __iter__(self) -> Iterator[Any]:
        stage = self._driver.enter_loop(self._loader.settings)
        if stage is None:
            return
        try:
            with self._loader.opened(stage):
                while self._loader.is_incomplete:
                    try:
                        if self._loader.has_length:
                            self._length = self._yielded + self._loader.micro_batches_from(self._driver.position)
                        for step in self._loader.steps():
                            self._driver.start_step(step.plan)
                            for micro_batch, is_last in step.micro_batches:
                                self._driver.start_micro_batch(micro_batch.lane, is_last)
                                self._yielded += 1
                                yield micro_batch.batch
                                self._driver.end_micro_batch()
                    except StepRestarted:
                        continue
                self._driver.loop_ended()
        except GeneratorExit:
            self._driver.loop_abandoned()
            raise
        finally:
            self._yielded, self._length = 0, None
            self._driver.leave_loop()
