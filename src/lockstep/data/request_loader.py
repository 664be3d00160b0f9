"""RequestLoader: one torch DataLoader that fetches a series of requests, and can switch to another series at any time.

Knows nothing of samples, lanes or steps.

A plain DataLoader would have to be restarted, with all its processes, whenever the requests change. This one never ends:
after the last request it is given empty requests. Every request carries the number of its series, and so does its result:

    start_series(A)   A0 A1 A2 ...prefetched... A5 A6 | start_series(B)  B0 B1 ...
    next()            A0 A1                           |                  B0 B1 ...   (A2 to A6 are dropped)

Loader processes read the number of the current series from shared memory, and skip requests of an earlier series.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import RawValue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.errors import InvariantError
from lockstep.launcher.linux import die_with_parent

Request = Any


class RequestLoader:
    """Calls ``fetch(request)`` for each request in order, ahead of time in ``num_workers`` processes (0: in this process).

    ``fetch`` is copied into each process. With ``pin_memory`` torch pins the tensors that it finds in tuples, lists and mappings.
    """

    def __init__(self, fetch: Callable[[Request], Any], num_workers: int, pin_memory: bool, prefetch_factor: int | None) -> None:
        self.num_workers = num_workers
        self._requests = _RequestSampler()
        self._dataset = _RequestDataset(fetch, self._requests.series)
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._requests,  # type: ignore[arg-type]  # torch accepts any iterable
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            generator=torch.Generator(),  # without one, the loader would draw from the global generator
            worker_init_fn=_begin_loader_process if num_workers else None,
        )
        self._results: Any = None

    def start_series(self, requests: Iterator[Request]) -> None:
        """Fetch these requests from now on. Results of earlier requests that are still on their way are dropped."""
        self._requests.series.value += 1
        self._requests.pending = requests

    def next(self) -> Any:
        """Return the result of the next request of the current series. Waits for ``fetch``.

        Raises:
            StopIteration: After the last request of the series.
        """
        if self._requests.pending is None:
            raise InvariantError("a source was asked for a batch before its first seek(), or after close()")
        if self._results is None:
            self._dataset.from_main_thread = threading.current_thread() is threading.main_thread()
            self._results = iter(self._loader)
        while True:
            series, ended, result = next(self._results)
            if series != self._requests.series.value:
                continue
            if ended:
                raise StopIteration
            return result

    def close(self) -> None:
        """End the loader processes and wait for their end. May be called twice."""
        results, self._results, self._requests.pending = self._results, None, None
        # torch does this when the last reference to the iterator goes, but a traceback may keep a reference.
        shutdown = getattr(results, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class _RequestSampler:
    """Passed to torch as the sampler: an endless iterable of (series, has the series ended, request)."""

    def __init__(self) -> None:
        self.series: Any = RawValue("q", 0)
        self.pending: Iterator[Request] | None = None

    def __iter__(self) -> _RequestSampler:
        return self

    def __next__(self) -> tuple[int, bool, Request]:
        assert self.pending is not None
        for request in self.pending:
            return self.series.value, False, request
        return self.series.value, True, None


class _RequestDataset(Dataset[Any]):
    """Passed to torch as the dataset: indexing it with what the sampler gives fetches the request."""

    def __init__(self, fetch: Callable[[Request], Any], current_series: Any) -> None:
        self._fetch = fetch
        self._current_series = current_series
        self.from_main_thread = True
        """Whether the loader processes were started by the main thread."""

    def __getitem__(self, item: tuple[int, bool, Request]) -> tuple[int, bool, Any]:
        series, ended, request = item
        if ended or series != self._current_series.value:
            return series, ended, None
        try:
            return series, ended, self._fetch(request)
        except StopIteration as error:
            raise RuntimeError(
                "the dataset raised StopIteration, which would look like the end of the last epoch. "
                "Raise another exception from the dataset."
            ) from error


def _begin_loader_process(worker_id: int) -> None:
    """Make this loader process end with the training process, and ignore one SIGTERM.

    torch's own check of the parent waits for the end of ``__getitem__``, which may take long.
    A SIGTERM to the whole process group asks the training process to finish its step and save, which needs the loader. The second
    SIGTERM ends the loader process: at the end torch sends the first one and multiprocessing the second.
    """

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    parent, info = multiprocessing.parent_process(), get_worker_info()
    is_child = parent is not None and parent.pid == os.getppid()  # with another start method, a server may have forked this process
    # The kernel takes the thread that forked this process for the parent, not the whole process.
    if is_child and info is not None and getattr(info.dataset, "from_main_thread", False):
        die_with_parent(os.getppid())


def _unchanged(result: Any) -> Any:
    return result
