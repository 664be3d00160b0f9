"""Recordings: which recordings of a captured function are kept, and when another one is worth making. No torch, no clock.

A recording costs as much time as several calls, and memory. So a signature is recorded when it comes in a third step, and a last
batch that is shorter than the others is not recorded in its first epochs. If more signatures come in turn than are kept, each that
is dropped doubles the number of steps that are waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

EAGER_STEPS = 2
"""In how many steps a signature comes before it is recorded."""
_REMEMBERED = 64
"""How many signatures that are not recorded are remembered."""
_NEVER_TWICE = 16
"""After so many signatures in a row of which none had come before, a line says so."""


class Closable(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=Closable)


class Recordings(Generic[R]):
    """At most ``keep`` recordings by signature; the least recently used one is dropped."""

    def __init__(self, keep: int) -> None:
        self._keep, self._wait = keep, EAGER_STEPS
        self._kept: OrderedDict[Hashable, R] = OrderedDict()
        self._seen: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # signature -> (in how many steps, the last of them)
        self._new_in_a_row = 0
        self._last_two: tuple[Hashable, Hashable] = (None, None)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> R | None:
        """Return the recording for a signature, if there is one."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self._new_in_a_row = 0
        return found

    def is_due(self, key: Hashable, step: int) -> bool:
        """Note that a signature without a recording has come in this step. Return whether to record it now."""
        steps, last = self._seen.pop(key, (0, -1))
        self._new_in_a_row = 0 if steps else self._new_in_a_row + 1
        self._last_two = self._last_two[1], key
        self._seen[key] = (steps + (step != last), step)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return self._seen[key][0] > self._wait

    def times_seen(self, key: Hashable) -> int:
        """Return in how many steps a signature without a recording has come."""
        return self._seen.get(key, (0, -1))[0]

    def differing(self) -> tuple[Hashable, Hashable] | None:
        """Return the last two signatures if so many have come in a row, none of them twice, that it must be said. Once."""
        return self._last_two if self._new_in_a_row == _NEVER_TWICE else None

    def add(self, key: Hashable, recording: R) -> None:
        """Keep a new recording."""
        self._seen.pop(key, None)
        self._kept[key] = recording
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)[1].close()
            self.dropped += 1
            self._wait *= 2

    def clear(self) -> None:
        """Drop all recordings."""
        while self._kept:
            self._kept.popitem()[1].close()
