"""A Source over a dataset that can only be read from its beginning. Knows nothing of other workers, nor when all have ended.

How a stream is split, by position:

    no shard():  one tape for all lanes. Element j is in step j // global_batch, and there in the lane
                 that plan/lanes.py cuts it into: just as for a map-style dataset without shuffling.
    shard():     one tape for each lane, ``dataset.shard(num_shards=lanes, index=lane)``, from which the
                 lane takes its share of a full batch in every step.

Before each element the generators are seeded from its tape and its number, so elements are the same
on any number of workers and loader processes, even if they are drawn at random (a shuffle buffer).
Tapes cannot be wound back: an earlier position is reached by reading anew from the beginning. One tape
for all lanes is read whole by every worker and every loader process: only shard() divides that work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.checks import check_arguments
from lockstep.data.request_loader import RequestLoader
from lockstep.data.seeding import seed_everything
from lockstep.data.source import MicroBatch
from lockstep.errors import InvariantError, UsageError
from lockstep.plan.samples import COLLATE, STREAM, lane_seed, sample_seed

STAND_IN = 2
"""Samples in a stand-in, where there are so many: batch normalisation does not take a single one."""


class StreamSource:
    """Deals a dataset that has ``__iter__`` alone. All workers must build it with equal arguments.

    ``take()`` gives one MicroBatch for every lane of the worker in every step, also for lanes that have
    ended, on and on: only the caller, who hears of all workers, knows when an epoch is over, and seeks
    the next one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        lanes: int,
        global_batch: int,
        epochs: int,
        seed: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        check_arguments(dataset, lanes, global_batch, epochs, num_workers)
        if _is_read_once(dataset):
            raise UsageError(
                f"a {type(dataset).__name__} can be read only once, but each epoch, and each step that failed, reads from the "
                "beginning. Pass an object whose __iter__ starts anew each time."
            )
        self._epochs, self._num_workers = epochs, num_workers
        self._fetch = _Fetch(dataset, collate_fn, lanes, global_batch, seed)
        self._loading = (pin_memory, prefetch_factor)
        self._feed: RequestLoader | None = None
        self._last: Any = None

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        processes = _processes(self._num_workers, lanes[1] - lanes[0])
        if self._feed is None or self._feed.num_workers != processes:
            self.close()
            self._feed = RequestLoader(self._fetch, processes, *self._loading)
        self._feed.turn(self._requests(epoch, step, lanes))

    def take(self) -> MicroBatch:
        if self._feed is None:
            raise InvariantError("a source was asked before its first seek(), or after close()")
        (epoch, step, lane, count), batch = self._feed.next()
        if batch is None:
            batch = self._last
        self._last = batch
        return MicroBatch(epoch, step, lane, count, batch)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _requests(self, epoch: int, first_step: int, lanes: tuple[int, int]) -> Iterator[_Request]:
        for step in count(first_step) if epoch < self._epochs else ():
            for lane in range(*lanes):
                yield _Request(epoch, step, lane, lanes)


class _Request(NamedTuple):
    """One pass, asked of a loader process. ``lanes``: those of the worker, whose tapes are worth keeping."""

    epoch: int
    step: int
    lane: int
    lanes: tuple[int, int]


class _Fetch:
    """Reads tapes and collates what is on them. Lives in each loader process, with tapes of its own.

    It may be asked for any position at any time, and reads on where a tape stands at or before it. That
    torch deals requests in turn, and a worker's lanes are a multiple of its processes, merely
    makes each process meet the same lanes again in every step.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, lanes: int, global_batch: int, seed: int
    ) -> None:
        self._dataset, self._lanes, self._global_batch, self._seed = dataset, lanes, global_batch, seed
        self._collate_fn = collate_fn
        self._sharded = _can_shard(dataset, lanes)
        self._epoch = -1
        self._tapes: dict[int, _Tape] = {}
        self._seen: deque[Any] = deque(maxlen=STAND_IN)

    def __call__(self, request: _Request) -> tuple[tuple[int, int, int, int], Any]:
        epoch, step, lane, lanes = request
        _hide_loader_process()
        if epoch != self._epoch:
            self._tapes.clear()
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            self._epoch = epoch
        for other in [other for other in self._tapes if self._sharded and not lanes[0] <= other < lanes[1]]:
            del self._tapes[other]
        samples = self._read(lane, *self._positions(step, lane))
        return (epoch, step, lane, len(samples)), self._collate(samples or list(self._seen), request)

    def _positions(self, step: int, lane: int) -> tuple[int, int]:
        """Where on its tape the lane's samples of a step lie: [start, stop)."""
        first, last = (self._global_batch * i // self._lanes for i in (lane, lane + 1))
        if self._sharded:
            return step * (last - first), (step + 1) * (last - first)
        return step * self._global_batch + first, step * self._global_batch + last

    def _read(self, lane: int, start: int, stop: int) -> list[Any]:
        name = lane if self._sharded else 0
        tape = self._tapes.pop(name, None)
        if tape is None or tape.at > start:
            tape = self._open(name)
        samples = tape.read(start, stop, self._seen)
        self._tapes[name] = tape  # not after an exception: what is left of a generator then looks like its end
        return samples

    def _open(self, name: int) -> _Tape:
        seed = lane_seed(self._seed, self._epoch, name, STREAM)
        seed_everything(seed)
        return _Tape(self._dataset.shard(num_shards=self._lanes, index=name) if self._sharded else self._dataset, seed)

    def _collate(self, samples: list[Any], request: _Request) -> Any:
        if not samples:
            return None
        if self._collate_fn is None:
            return default_collate(samples)
        seed_everything(lane_seed(lane_seed(self._seed, request.epoch, request.step), request.lane, 0, COLLATE))
        return self._collate_fn(samples)


class _Tape:
    """A stream that is read forward, and how far: the next element is number ``at``."""

    def __init__(self, stream: Iterable[Any], seed: int) -> None:
        self._elements = iter(stream)
        self._seed = seed
        self._ended = False
        self.at = 0

    def read(self, start: int, stop: int, seen: deque[Any]) -> list[Any]:
        """Elements [start, stop), as far as there are any. Those before are read too, for their effect on the stream."""
        found: list[Any] = []
        while self.at < stop and not self._ended:
            seed_everything(sample_seed(self._seed, 0, self.at))
            try:
                element = next(self._elements)
            except StopIteration:
                self._ended = True
                break
            seen.append(element)
            if self.at >= start:
                found.append(element)
            self.at += 1
        return found


def _processes(num_workers: int, lanes: int) -> int:
    """The most loader processes that share a worker's lanes evenly."""
    return max((p for p in range(1, num_workers + 1) if lanes % p == 0), default=0)


def _is_read_once(dataset: Any) -> bool:
    """Generators, open files and Python's own iterators. A class of somebody's own may well start anew in ``__iter__``."""
    own = type(dataset).__module__ not in ("builtins", "itertools", "_io")
    return isinstance(dataset, Generator) or (isinstance(dataset, Iterator) and not own)


def _can_shard(dataset: Any, lanes: int) -> bool:
    """Whether the dataset splits itself, into so many parts. One of few files says so in ``num_shards``."""
    parts = getattr(dataset, "num_shards", None)
    return callable(getattr(dataset, "shard", None)) and not (isinstance(parts, int) and parts < lanes)


def _hide_loader_process() -> None:
    """Make the dataset believe that it is read in the main process.

    Many a stream looks at ``get_worker_info()`` and gives each loader process another part. Here a
    process reads whole tapes, and lanes decide who gets what: a part of that would lose samples.
    """
    if get_worker_info() is not None:
        torch_worker._worker_info = None
        if get_worker_info() is not None:
            raise InvariantError("get_worker_info() cannot be overridden in this version of torch")
