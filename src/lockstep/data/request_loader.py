"""One torch DataLoader that answers requests in order, and can change its mind. Knows nothing of samples, lanes or steps.

The loader is never told that anything ends, so its processes live as long as the feed: past the
last request it is asked for nothing, again and again. Every request carries the number of the turn
in which it was made, and so does its answer:

    turn(A)  A0 A1 A2 ...prefetched... A5 A6 | turn(B)  B0 B1 ...
    next()   A0 A1                           |          (A2 ... A6 are dropped)  B0 B1

Loader processes see the current turn in shared memory and do not begin on a request of an earlier one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from multiprocessing import RawValue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import InvariantError

Request = Any
Fetch = Callable[[Request], Any]


class RequestLoader:
    """``fetch(request)`` for one request after the other, ahead of time in ``num_workers`` processes (0: right here).

    ``fetch`` is copied into each process. Answers are plain data: with ``pin_memory`` torch pins the
    tensors it finds in tuples, lists and mappings.
    """

    def __init__(self, fetch: Fetch, num_workers: int, pin_memory: bool | None, prefetch_factor: int | None = None) -> None:
        self.num_workers = num_workers
        self._requests = _Requests()
        self._loader: DataLoader[Any] = DataLoader(
            _Answers(fetch, self._requests.turn),
            batch_size=None,
            sampler=self._requests,  # type: ignore[arg-type]  # an endless iterable will do
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            generator=torch.Generator(),  # without one it would draw from the global generator
            worker_init_fn=_outlive_one_sigterm if num_workers else None,
        )
        self._answers: Any = None

    def turn(self, requests: Iterator[Request]) -> None:
        """From now on answer these; whatever is on its way is dropped."""
        self._requests.turn.value += 1
        self._requests.pending = requests

    def next(self) -> Any:
        """The answer to the next request of the current turn. Waits for ``fetch``. StopIteration when there is none."""
        if self._requests.pending is None:
            raise InvariantError("a feed was asked before its first turn, or after close()")
        if self._answers is None:
            self._answers = iter(self._loader)
        while True:
            turn, ended, answer = next(self._answers)
            if turn != self._requests.turn.value:
                continue
            if ended:
                raise StopIteration
            return answer

    def close(self) -> None:
        """End the processes and wait until they are gone."""
        answers, self._answers, self._requests.pending = self._answers, None, None
        # torch does this when the last reference goes, but a traceback somewhere may hold one.
        shutdown = getattr(answers, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class _Requests:
    """What torch takes for the sampler: tags each request with its turn, and never ends."""

    def __init__(self) -> None:
        self.turn: Any = RawValue("q", 0)
        self.pending: Iterator[Request] | None = None

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> tuple[int, bool, Request]:
        assert self.pending is not None
        for request in self.pending:
            return self.turn.value, False, request
        return self.turn.value, True, None


class _Answers(Dataset[Any]):
    """What torch takes for the dataset."""

    def __init__(self, fetch: Fetch, turn: Any) -> None:
        self._fetch = fetch
        self._turn = turn

    def __getitem__(self, asked: tuple[int, bool, Request]) -> tuple[int, bool, Any]:
        turn, ended, request = asked
        if ended or turn != self._turn.value:
            return turn, ended, None
        try:
            return turn, ended, self._fetch(request)
        except StopIteration as error:
            raise RuntimeError("the dataset raised StopIteration, which would pass for the end of the last epoch") from error


def _outlive_one_sigterm(number: int) -> None:
    """In a loader's process. A SIGTERM to the whole group is for its parent, which wants to finish the step, and save.

    The second one is heeded: at the end torch asks once, and multiprocessing again.
    """

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)


def _as_it_is(answer: Any) -> Any:
    return answer
