"""MapSource: loads a map-style dataset, whose samples have an index. Knows nothing of commits or messages.

The samples of a lane in a step are a function of (seed, epoch, step, lanes) and the dataset's length. So is everything random
that happens to the samples: the generators are seeded before each sample from its index, and before the collate function from
the index of the first sample. A batch therefore does not depend on the number of workers or loader processes, nor on what was
loaded before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset, default_collate

from lockstep.data.request_loader import RequestLoader
from lockstep.data.seeding import preserved_randomness, seed_everything
from lockstep.data.source import PLACEHOLDER_SAMPLES, LoaderOptions, MicroBatch
from lockstep.errors import UsageError
from lockstep.plan.lanes import MicroBatchPlan, cut, plan_micro_batches
from lockstep.plan.samples import COLLATE, SAMPLER, Order, Permutation, batch_positions, sample_seed, steps_per_epoch


class MapSource:
    """The Source of a dataset that has ``__getitem__`` and ``__len__``. All workers must construct it with equal arguments.

    Raises:
        UsageError: If the sampler cannot be used, or an epoch would have no step.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        _check_sampler(options)
        self._options = options
        self._sampler_orders: dict[int, Order] = {}
        self.length = len(dataset) if options.sampler is None else _length(options.sampler) or len(self._sampler_order(0))
        """The number of samples in an epoch."""
        if self.length < 1:
            empty = "the dataset is empty: len(dataset) is 0" if options.sampler is None else "the sampler gives no samples"
            raise UsageError(f"{empty}. Pass one that has at least one sample.")
        self.steps_in_epoch = steps_per_epoch(self.length, options.global_batch, options.drop_last)
        if not self.steps_in_epoch:
            raise UsageError(
                f"{self.length} samples do not fill one batch of global_batch={options.global_batch}, and drop_last=True drops "
                f"them all. Pass global_batch<={self.length}, or drop_last=False."
            )
        self.steps = self.steps_in_epoch * options.epochs
        """The number of steps in all epochs."""
        fetch = _MapFetcher(dataset, options.collate_fn, options.seed)
        self._loader = RequestLoader(fetch, options.num_workers, options.pin_memory, options.prefetch_factor)

    def samples_in_step(self, step: int) -> int:
        """Return the size of a step's global batch; ``step`` is counted within an epoch or over all epochs."""
        start, stop = self._positions(step % self.steps_in_epoch)
        return stop - start

    def micro_batches_from(self, epoch: int, step: int, lanes: tuple[int, int]) -> int:
        """Return how many micro-batches a worker with lanes [first, last) has, from that step of that epoch to the last epoch."""
        last = len(plan_micro_batches(lanes, cut(self.samples_in_step(self.steps_in_epoch - 1), self._options.lanes)))
        full = lanes[1] - lanes[0]  # every lane has samples in a full batch
        epochs = self._options.epochs - epoch
        return epochs * ((self.steps_in_epoch - 1) * full + last) - step * full if epochs > 0 else 0

    def order_fingerprint(self, epoch: int) -> int:
        """Return a fingerprint of the user's sampler in this epoch, or 0 without one: Lockstep's own orders need no comparison."""
        return 0 if self._options.sampler is None else self._sampler_order(epoch).fingerprint()

    def sample_indices(self, epoch: int, step: int, micro_batch: MicroBatchPlan) -> list[int]:
        """Return the dataset indices of the samples in one micro-batch."""
        start, _ = self._positions(step)
        return self._order(epoch).window(start + micro_batch.start, start + micro_batch.stop)

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        self._loader.start_series(self._requests(epoch, step, lanes))

    def take(self) -> MicroBatch:
        (epoch, step, lane, count), batch = self._loader.next()
        return MicroBatch(epoch, step, lane, count, batch)

    def close(self) -> None:
        self._loader.close()

    def _requests(self, first_epoch: int, step: int, lanes: tuple[int, int]) -> Iterator[_MapRequest]:
        for epoch in range(first_epoch, self._options.epochs):
            order = self._order(epoch)
            while step < self.steps_in_epoch:
                start, stop = self._positions(step)
                for plan in plan_micro_batches(lanes, cut(stop - start, self._options.lanes)):
                    count = plan.stop - plan.start
                    if count:
                        indices = order.window(start + plan.start, start + plan.stop)
                    else:  # a placeholder batch: the first samples of the step, which another worker trains on
                        indices = order.window(start, min(start + PLACEHOLDER_SAMPLES, stop))
                    yield _MapRequest((epoch, step, plan.lane, count), indices)
                step += 1
            step = 0

    def _positions(self, step: int) -> tuple[int, int]:
        return batch_positions(self.length, self._options.global_batch, step, self._options.drop_last)

    def _order(self, epoch: int) -> Order:
        if self._options.sampler is None:
            return Order(Permutation(self._options.seed, epoch, self.length) if self._options.shuffle else range(self.length))
        order = self._sampler_order(epoch)
        if len(order) != self.length:
            raise UsageError(
                f"the sampler gives {len(order)} samples in epoch {epoch}, and {self.length} were expected: a sampler must give "
                "the same number in every epoch, and as many as its len() if it has one. Make it give a fixed number."
            )
        return order

    def _sampler_order(self, epoch: int) -> Order:
        """Run the user's sampler for one epoch. Keeps two epochs, because prefetching and seeking back cross the border of one."""
        if epoch not in self._sampler_orders:
            with preserved_randomness():
                self._sampler_orders[epoch] = Order(_run_sampler(self._options.sampler, epoch, self._options.seed))
            self._sampler_orders = {kept: self._sampler_orders[kept] for kept in list(self._sampler_orders)[-2:]}
        return self._sampler_orders[epoch]


class _MapRequest(NamedTuple):
    """One micro-batch that a loader process is asked to load."""

    tag: tuple[int, int, int, int]
    """(epoch, step, lane, count), returned with the batch."""
    indices: list[int]


class _MapFetcher:
    """Loads and collates the samples of a request. Each loader process has a copy."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._getitems = getattr(dataset, "__getitems__", None)

    def __call__(self, request: _MapRequest) -> tuple[tuple[int, ...], Any]:
        (epoch, _, _, _), indices = request
        if type(self._dataset) is TensorDataset and self._collate_fn is None:
            # The same bits as default_collate of the samples, without taking them one by one.
            selected = torch.tensor(indices)
            return request.tag, [tensor[selected] for tensor in self._dataset.tensors]
        samples = self._samples(epoch, indices)
        if self._collate_fn is None:
            return request.tag, default_collate(samples)
        seed_everything(sample_seed(self._seed, epoch, indices[0], COLLATE))
        return request.tag, self._collate_fn(samples)

    def _samples(self, epoch: int, indices: list[int]) -> list[Any]:
        if type(self._dataset) is TensorDataset:
            return [self._dataset[index] for index in indices]
        if self._getitems is not None:
            seed_everything(sample_seed(self._seed, epoch, indices[0]))
            samples: list[Any] = self._getitems(indices)
            return samples
        samples = []
        for index in indices:
            seed_everything(sample_seed(self._seed, epoch, index))
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"This was sample {index} in epoch {epoch}.")
                raise
        return samples


def _check_sampler(options: LoaderOptions) -> None:
    sampler = options.sampler
    if sampler is None:
        return
    if options.shuffle:
        raise UsageError("shuffle=True together with a sampler: each of them decides the order. Pass one of them.")
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"the sampler is a {type(sampler).__name__}, which can be read only once, but every epoch reads it. "
            "Pass an object whose __iter__ starts again each time."
        )
    if isinstance(sampler, BatchSampler):
        raise UsageError(
            f"{type(sampler).__name__} gives batches, but Lockstep makes the batches, by lane. "
            "Pass the sampler inside it (batch_sampler.sampler), and global_batch=."
        )
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"{type(sampler).__name__} gives one worker's share of the samples, but Lockstep divides the samples itself. "
            "Leave it out, and pass shuffle=True if it shuffled."
        )


def _length(sampler: Any) -> int:
    return len(sampler) if hasattr(sampler, "__len__") else 0


def _run_sampler(sampler: Any, epoch: int, seed: int) -> array[int]:
    """Return one epoch's indices. A sampler may draw from the global generators or from its own ``generator``: both are seeded.

    The seed of the epoch depends on the seed that the user has given to ``generator``, whose state is the same afterwards.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator):
        seed_everything(sample_seed(seed, epoch, 0, SAMPLER))
        return _read_indices(sampler)
    seed = sample_seed(seed, epoch, generator.initial_seed(), SAMPLER)
    state = generator.get_state()
    seed_everything(seed)
    generator.manual_seed(seed)
    try:
        return _read_indices(sampler)
    finally:
        generator.set_state(state)


def _read_indices(sampler: Any) -> array[int]:
    indices = array("q")
    for index in sampler:
        try:
            indices.append(index)
        except TypeError as error:
            raise UsageError(
                f"the sampler gives {type(index).__name__}s, not the index of a sample: {index!r:.60} at position {len(indices)}. "
                "Pass an iterable of integers; Lockstep makes the batches."
            ) from error
    return indices
