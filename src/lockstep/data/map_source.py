"""A Source over a dataset with numbered samples: (epoch, step, lane) -> micro-batch. Knows nothing of commits or messages.

Which samples a lane has in a step is a function of (seed, epoch, step, lanes) and the dataset's
length, and so is everything random that happens to them on the way: the generators are seeded before
each sample from its index and before a collate function from the first one. Neither the number of
workers, nor that of loader processes, nor what was loaded before can be seen in a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset, default_collate

from lockstep.data.checks import check_arguments
from lockstep.data.request_loader import RequestLoader
from lockstep.data.seeding import preserved_randomness, seed_everything
from lockstep.data.source import MicroBatch
from lockstep.errors import UsageError
from lockstep.plan.lanes import MicroBatchPlan, cut, plan_micro_batches
from lockstep.plan.samples import COLLATE, SAMPLER, Order, Permutation, batch_of, sample_seed, steps_per_epoch

STAND_IN = 2
"""Samples in a stand-in: batch normalisation does not take a single one."""


class MapSource:
    """Deals a dataset that has ``__getitem__`` and ``__len__``. All workers must build it with equal arguments."""

    def __init__(
        self,
        dataset: Any,
        *,
        lanes: int,
        global_batch: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        check_arguments(dataset, lanes, global_batch, epochs, num_workers)
        _check_sampler(sampler, shuffle)
        self._lanes, self._global_batch, self._epochs = lanes, global_batch, epochs
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._sampler = sampler
        self._sampled: dict[int, Order] = {}
        self.length = len(dataset) if sampler is None else _length(sampler) or len(self._listed(0))
        if self.length < 1:
            empty = "the dataset is empty: len(dataset) is 0" if sampler is None else "the sampler gives no samples"
            raise UsageError(f"{empty}. Pass one that has at least one sample.")
        self.steps_in_epoch = steps_per_epoch(self.length, global_batch, drop_last)
        if not self.steps_in_epoch:
            raise UsageError(
                f"{self.length} samples do not fill one batch of global_batch={global_batch}, and drop_last=True drops them all. "
                f"Pass global_batch<={self.length}, or drop_last=False."
            )
        self.steps = self.steps_in_epoch * epochs
        self._feed = RequestLoader(_Fetch(dataset, collate_fn, seed), num_workers, pin_memory, prefetch_factor)

    def samples(self, step: int) -> int:
        """Samples in a step's global batch; ``step`` counts within the epoch or over all of them."""
        start, stop = batch_of(self.length, self._global_batch, step % self.steps_in_epoch, self._drop_last)
        return stop - start

    def fingerprint(self, epoch: int) -> int:
        """Of the order a sampler of the user's gives; 0 where the order is ours, and equal by construction."""
        return 0 if self._sampler is None else self._listed(epoch).fingerprint()

    def indices(self, epoch: int, step: int, turn: MicroBatchPlan) -> list[int]:
        """The samples of one turn, by their numbers in the dataset."""
        start, _ = batch_of(self.length, self._global_batch, step, self._drop_last)
        return self._order(epoch).window(start + turn.start, start + turn.stop)

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        self._feed.turn(self._requests(epoch, step, lanes))

    def take(self) -> MicroBatch:
        (epoch, step, lane, count), batch = self._feed.next()
        return MicroBatch(epoch, step, lane, count, batch)

    def close(self) -> None:
        self._feed.close()

    def _requests(self, first_epoch: int, step: int, lanes: tuple[int, int]) -> Iterator[_Request]:
        for epoch in range(first_epoch, self._epochs):
            order = self._order(epoch)
            while step < self.steps_in_epoch:
                start, stop = batch_of(self.length, self._global_batch, step, self._drop_last)
                for turn in plan_micro_batches(lanes, cut(stop - start, self._lanes)):
                    count = turn.stop - turn.start
                    first, last = (start + turn.start, start + turn.stop) if count else (start, min(start + STAND_IN, stop))
                    yield _Request((epoch, step, turn.lane, count), order.window(first, last))
                step += 1
            step = 0

    def _order(self, epoch: int) -> Order:
        if self._sampler is None:
            return Order(Permutation(self._seed, epoch, self.length) if self._shuffle else range(self.length))
        order = self._listed(epoch)
        if len(order) != self.length:
            raise UsageError(
                f"the sampler gives {len(order)} samples in epoch {epoch}, and {self.length} were expected: every epoch must "
                "have as many, and as many as len(sampler) says if it has a length. Make it give a fixed number."
            )
        return order

    def _listed(self, epoch: int) -> Order:
        """The user's sampler, run for one epoch. The last two are kept: prefetching, and seeking back, straddle a border."""
        assert self._sampler is not None
        if epoch not in self._sampled:
            with preserved_randomness():
                self._sampled[epoch] = Order(_run_sampler(self._sampler, epoch, sample_seed(self._seed, epoch, 0, SAMPLER)))
            self._sampled = {kept: self._sampled[kept] for kept in list(self._sampled)[-2:]}
        return self._sampled[epoch]


class _Request(NamedTuple):
    """One pass, asked of a loader process."""

    tag: tuple[int, int, int, int]
    """epoch, step, lane, count"""
    indices: list[int]


class _Fetch:
    """Samples of a request -> batch. Lives in each loader process."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._whole = getattr(dataset, "__getitems__", None)

    def __call__(self, request: _Request) -> tuple[tuple[int, ...], Any]:
        (epoch, _, _, _), indices = request
        if type(self._dataset) is TensorDataset and self._collate_fn is None:
            # What default_collate makes of the samples, bit for bit, without taking them one by one.
            at = torch.tensor(indices)
            return request.tag, [tensor[at] for tensor in self._dataset.tensors]
        samples = self._samples(epoch, indices)
        if self._collate_fn is None:
            return request.tag, default_collate(samples)
        seed_everything(sample_seed(self._seed, epoch, indices[0], COLLATE))
        return request.tag, self._collate_fn(samples)

    def _samples(self, epoch: int, indices: list[int]) -> list[Any]:
        if type(self._dataset) is TensorDataset:
            return [self._dataset[index] for index in indices]
        if self._whole is not None:
            seed_everything(sample_seed(self._seed, epoch, indices[0]))
            samples: list[Any] = self._whole(indices)
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


def _check_sampler(sampler: Any, shuffle: bool) -> None:
    if sampler is None:
        return
    if shuffle:
        raise UsageError("shuffle=True together with a sampler: the sampler is the order. Pass one of them.")
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"the sampler is a {type(sampler).__name__}, which can be read only once, and every epoch reads it. "
            "Pass an object whose __iter__ starts anew each time."
        )
    if isinstance(sampler, BatchSampler):
        raise UsageError(
            f"{type(sampler).__name__} gives batches, but Lockstep makes them, by lane. "
            "Pass the sampler inside it (batch_sampler.sampler), and global_batch=."
        )
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"{type(sampler).__name__} gives one worker's share of the samples, but Lockstep deals them itself. "
            "Leave it out, and pass shuffle=True if it shuffled."
        )


def _length(sampler: Any) -> int:
    return len(sampler) if hasattr(sampler, "__len__") else 0


def _run_sampler(sampler: Any, epoch: int, seed: int) -> array[int]:
    """One epoch's indices. A sampler may draw from the global generators or from its own ``generator``: both are seeded."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    seed_everything(seed)
    indices = array("q")
    for index in sampler:
        try:
            indices.append(index)
        except TypeError as error:
            raise UsageError(
                f"the sampler gives {type(index).__name__}s, not the index of a sample: {index!r:.60} at position {len(indices)}. "
                "Pass an iterable of integers; batches are made by Lockstep."
            ) from error
    return indices
