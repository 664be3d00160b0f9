"""StreamSource: loads an iterable dataset, which can only be read from its beginning.

Knows nothing of other workers, nor of when all lanes of all workers have ended.

How the elements of a stream are divided:

    dataset without shard():  all lanes share one reader. Element j is in step j // global_batch, and there in the lane that
                              plan/lanes.py assigns it to, as for a map-style dataset without shuffling.
    dataset with shard():     each lane has a reader of its own, of ``dataset.shard(num_shards=lanes, index=lane)``. The lane
                              takes its share of a full batch from it in every step.

Before each element the generators are seeded from its reader and its number, so elements are the same on any number of workers
and loader processes, even if the dataset draws them at random (a shuffle buffer). A reader cannot go back: to reach an earlier
position, the stream is read again from its beginning. A shared reader reads the whole stream on every worker and in every
loader process: only a dataset with shard() divides that work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.request_loader import RequestLoader
from lockstep.data.seeding import seed_everything
from lockstep.data.source import PLACEHOLDER_SAMPLES, LoaderOptions, MicroBatch
from lockstep.errors import InvariantError, UsageError
from lockstep.plan.samples import COLLATE, STREAM, lane_seed, sample_seed


class StreamSource:
    """The Source of a dataset that has only ``__iter__``. All workers must construct it with equal arguments.

    ``take()`` returns one MicroBatch for every lane of the worker in every step, without end: a lane whose elements have ended
    gets placeholder batches. Only the caller, which gathers the counts of all workers, knows when an epoch is over. It then calls
    ``seek`` for the next epoch.

    Raises:
        UsageError: If the dataset can be read only once.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        if _is_read_once(dataset):
            raise UsageError(
                f"a {type(dataset).__name__} can be read only once, but each epoch, and each step that is repeated after a "
                "failure, reads from the beginning. Pass an object whose __iter__ starts again each time."
            )
        self._options = options
        self._fetch = _StreamFetcher(dataset, options)
        self._loader: RequestLoader | None = None
        self._last_batch: Any = None

    def seek(self, epoch: int, step: int, lanes: tuple[int, int]) -> None:
        processes = _loader_processes(self._options.num_workers, lanes[1] - lanes[0])
        if self._loader is None or self._loader.num_workers != processes:
            self.close()
            self._loader = RequestLoader(self._fetch, processes, self._options.pin_memory, self._options.prefetch_factor)
        self._loader.start_series(self._requests(epoch, step, lanes))

    def take(self) -> MicroBatch:
        if self._loader is None:
            raise InvariantError("a source was asked for a batch before its first seek(), or after close()")
        (epoch, step, lane, count), batch = self._loader.next()
        if batch is None and not count:
            batch = self._last_batch
        self._last_batch = self._last_batch if batch is None else batch
        return MicroBatch(epoch, step, lane, count, batch)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _requests(self, epoch: int, first_step: int, lanes: tuple[int, int]) -> Iterator[_StreamRequest]:
        for step in count(first_step) if epoch < self._options.epochs else ():
            for lane in range(*lanes):
                yield _StreamRequest(epoch, step, lane, lanes)


class _StreamRequest(NamedTuple):
    """One micro-batch that a loader process is asked to load."""

    epoch: int
    step: int
    lane: int
    lanes: tuple[int, int]
    """All lanes of the worker: the loader process keeps only their readers."""


class _StreamFetcher:
    """Reads and collates the elements of a request. Each loader process has a copy, with readers of its own.

    Any position may be requested at any time: a reader that is at or before the position continues, otherwise a new reader
    starts. torch gives requests to its processes in rotation, and the number of a worker's lanes is a multiple of the number of
    processes, so each process reads the same lanes in every step. That saves work, but nothing depends on it.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, options.collate_fn, options.seed
        self._lanes, self._global_batch = options.lanes, options.global_batch
        self._is_sharded = _can_shard(dataset, options.lanes)
        self._epoch = -1
        self._readers: dict[int, _StreamReader] = {}
        self._recent: deque[Any] = deque(maxlen=PLACEHOLDER_SAMPLES)

    def __call__(self, request: _StreamRequest) -> tuple[tuple[int, int, int, int], Any]:
        epoch, step, lane, lanes = request
        _hide_loader_process()
        if epoch != self._epoch:
            self._readers.clear()
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            self._epoch = epoch
        for other in [other for other in self._readers if self._is_sharded and not lanes[0] <= other < lanes[1]]:
            del self._readers[other]
        samples = self._read(lane, *self._positions(step, lane))
        return (epoch, step, lane, len(samples)), self._collate(samples or list(self._recent), request)

    def _positions(self, step: int, lane: int) -> tuple[int, int]:
        """Return the positions [start, stop) of the lane's samples of a step in its stream."""
        first, last = (self._global_batch * i // self._lanes for i in (lane, lane + 1))
        if self._is_sharded:
            return step * (last - first), (step + 1) * (last - first)
        return step * self._global_batch + first, step * self._global_batch + last

    def _read(self, lane: int, start: int, stop: int) -> list[Any]:
        shard = lane if self._is_sharded else 0
        reader = self._readers.pop(shard, None)
        if reader is None or reader.position > start:
            reader = self._open_reader(shard)
        samples = reader.read(start, stop, self._recent)
        self._readers[shard] = reader  # not after an exception: a generator that raised looks as if it had ended
        return samples

    def _open_reader(self, shard: int) -> _StreamReader:
        seed = lane_seed(self._seed, self._epoch, shard, STREAM)
        seed_everything(seed)
        stream = self._dataset.shard(num_shards=self._lanes, index=shard) if self._is_sharded else self._dataset
        return _StreamReader(stream, seed)

    def _collate(self, samples: list[Any], request: _StreamRequest) -> Any:
        if not samples:
            return None
        if self._collate_fn is None:
            return default_collate(samples)
        seed_everything(lane_seed(lane_seed(self._seed, request.epoch, request.step), request.lane, 0, COLLATE))
        return self._collate_fn(samples)


class _StreamReader:
    """Reads one stream forward. ``position`` is the number of the next element."""

    def __init__(self, stream: Iterable[Any], seed: int) -> None:
        self._elements = iter(stream)
        self._seed = seed
        self._ended = False
        self.position = 0

    def read(self, start: int, stop: int, recent: deque[Any]) -> list[Any]:
        """Return the elements [start, stop), or fewer if the stream ends. Every element that is read is appended to ``recent``.

        Elements before ``start`` are read too: reading them may change the state of the stream.
        """
        found: list[Any] = []
        while self.position < stop and not self._ended:
            seed_everything(sample_seed(self._seed, 0, self.position))
            try:
                element = next(self._elements)
            except StopIteration:
                self._ended = True
                break
            recent.append(element)
            if self.position >= start:
                found.append(element)
            self.position += 1
        return found


def _loader_processes(num_workers: int, lanes: int) -> int:
    """Return the greatest number of loader processes, up to ``num_workers``, that divides the worker's lanes evenly."""
    return max((p for p in range(1, num_workers + 1) if lanes % p == 0), default=0)


def _is_read_once(dataset: Any) -> bool:
    """Whether this is a generator, an open file or one of Python's own iterators. A user's iterator class may start again."""
    is_users_class = type(dataset).__module__ not in ("builtins", "itertools", "_io")
    return isinstance(dataset, Generator) or (isinstance(dataset, Iterator) and not is_users_class)


def _can_shard(dataset: Any, lanes: int) -> bool:
    """Whether the dataset can split itself into one shard per lane. A dataset of few files gives their number in ``num_shards``."""
    shards = getattr(dataset, "num_shards", None)
    return callable(getattr(dataset, "shard", None)) and not (isinstance(shards, int) and shards < lanes)


def _hide_loader_process() -> None:
    """Make ``get_worker_info()`` return None, as in the main process.

    Many streams give each loader process another part, by ``get_worker_info()``. Here the lanes divide the elements and a loader
    process reads whole streams, so a part of a stream would lose samples.
    """
    if get_worker_info() is not None:
        torch_worker._worker_info = None
        if get_worker_info() is not None:
            raise InvariantError("get_worker_info() cannot be overridden in this version of torch")
