"""Operations in flight as generators, which give up where they would wait; whoever calls in lets them go on.

Knows nothing of how bytes travel. A comm is the ``Driver`` of its operations: it keeps those that
are under way, lets all of them go on whenever it is called, and knows how to wait for one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

from lockstep.errors import PeerError

Steps = Generator[Any, None, None]
"""What an operation does. Yields the torch work it waits for (a ``Last`` one, if so), or None where only another look can tell."""


class Last(NamedTuple):
    """A work after which nothing is left to do: nobody needs this thread to see its end but the one who waits."""

    work: Any


class Driver(Protocol):
    def await_(self, running: Operation, timeout_s: float | None) -> None:
        """Return when ``running`` is done. Lets everything else go on meanwhile; raises ``PeerError``."""

    def explain(self, running: Operation, error: RuntimeError) -> PeerError: ...


class Operation:
    """An operation in flight: the Pending of its ``steps``."""

    __slots__ = ("_done", "_driver", "_error", "_steps", "count", "waits_for", "what")

    def __init__(self, driver: Driver, steps: Steps, count: int, what: str) -> None:
        self._driver, self._steps, self.count, self.what = driver, steps, count, what
        self.waits_for: Any = None
        self._done = False
        self._error: RuntimeError | None = None

    def go_on(self) -> bool:
        """Run until it waits or ends; whether it has ended."""
        if not self._done:
            try:
                self.waits_for = next(self._steps)
            except StopIteration:
                self._done = True
            except RuntimeError as error:  # raised for the one who waits, not for whoever called in
                self._error, self._done = error, True
                self._driver.explain(self, error)
        return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._done:
            self._driver.await_(self, timeout_s)
        if self._error is not None:
            raise self._driver.explain(self, self._error) from self._error

    def done(self) -> bool:
        return self._done


class Done:
    """The Pending of work that was over when it was issued."""

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True


class InOrder:
    """Keeps operations in the order they were issued in, where they must meet others' in the same order."""

    def __init__(self) -> None:
        self._taken = self._now = 0

    def take(self) -> int:
        self._taken += 1
        return self._taken - 1

    def come(self, turn: int) -> Steps:
        """Wait until it is ``turn``'s turn; ``pass_on`` ends it."""
        while self._now != turn:
            yield

    def pass_on(self) -> None:
        self._now += 1


def until(works: Sequence[Any], last: bool = False) -> Steps:
    """Wait for torch works; raises their errors."""
    for work in works:
        while not work.is_completed():
            yield Last(work) if last else work
        work.wait()
