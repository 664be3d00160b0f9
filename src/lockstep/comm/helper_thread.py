"""HelperThread: advances the operations of a comm while the main thread computes.

gloo adds on threads of its own, so it is faster than the main thread as long as cores are idle. This is the same for shared memory:

    main thread    backward .. start .......... start .......... end > take over, wait
    helper thread  asleep      [fold 0] poll    [fold 1] ...block]    asleep

One thread at a time advances the operations. The helper thread begins when the main thread calls ``wake``, and goes on until no
operation is in flight. The main thread calls ``take_over`` before it waits for an operation: a wait costs what it costs without a
helper, and never includes the wake-up of a thread. Knows nothing of folds or buckets.

The GIL is no obstacle: torch releases it for each addition, and autograd for the time between two hooks.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable

import torch

_POLL_S = 0.0001  # how often the thread looks whether the other workers have come
_LONGEST_POLL_S = 0.002


class HelperThread:
    """Calls ``advance`` in a thread of its own, from ``wake`` until ``take_over`` or until nothing is in flight.

    Args:
        advance: A method that advances the operations in flight without blocking, and returns whether any is still in flight. It
            must return soon when ``must_stop`` is true. The thread does not keep the object of the method alive.
        name: The name of the thread.
    """

    def __init__(self, advance: Callable[[], bool], name: str) -> None:
        self.is_on = False
        """Whether ``start`` was called."""
        self._advance = weakref.WeakMethod(advance)
        self._changed = threading.Condition()
        self._awake = self._busy = self._ended = False
        self._wakes = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def must_stop(self) -> bool:
        """Whether the helper thread is in ``advance`` and the main thread waits for the end of it."""
        return self._busy and not self._awake

    def start(self) -> None:
        """Called once. Before it, ``take_over`` and ``close`` do nothing."""
        self.is_on = True
        self._thread.start()

    def wake(self) -> None:
        """There is something to advance. Raises what ``advance`` has raised."""
        with self._changed:
            self._raise_error()
            self._awake = not self._ended
            self._wakes += 1
            self._changed.notify_all()

    def take_over(self) -> None:
        """Let the caller advance the operations itself until the next ``wake``. Waits for the block that is being added.

        Raises what ``advance`` has raised.
        """
        if not self.is_on:
            return
        with self._changed:
            self._awake = False
            while self._busy:
                self._changed.wait()
            self._raise_error()

    def end(self) -> None:
        """Let the thread end after the block that is being added. Does not wait for that. Any thread may call it, also twice."""
        with self._changed:
            self._ended, self._awake = True, False
            self._changed.notify_all()

    def close(self) -> None:
        """``end``, and wait until the thread has ended. Any thread may call it, also the helper thread itself."""
        self.end()
        if self.is_on and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        _use_one_core()
        poll_s = _POLL_S
        while True:
            with self._changed:
                while not (self._awake or self._ended):
                    self._changed.wait()
                if self._ended:
                    return
                wakes, self._busy = self._wakes, True
            in_flight = self._advance_once()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if wakes != self._wakes:
                    poll_s = _POLL_S
                elif in_flight and self._awake:
                    self._changed.wait(poll_s)
                    poll_s = min(2 * poll_s, _LONGEST_POLL_S)
                else:
                    self._awake, poll_s = False, _POLL_S

    def _advance_once(self) -> bool:
        advance = self._advance()
        try:
            return advance is not None and advance()
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            with self._changed:
                self._error, self._ended = error, True
            return False


def _use_one_core() -> None:
    """Let torch's operations in this thread use one core. ``torch.set_num_threads`` would slow down the main thread too."""
    torch.get_num_threads()  # gives this thread the number of the process, once
    openmp = ctypes.CDLL(torch._C.__file__)
    if hasattr(openmp, "omp_set_num_threads"):  # which counts for the calling thread alone
        openmp.omp_set_num_threads(1)
