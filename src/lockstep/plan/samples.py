"""Decides the order of the samples in an epoch, the samples of each step, and the seeds of everything random.

Pure. Knows nothing of datasets or workers.

The order of an epoch is a permutation of range(n) that can be read at any position without a list of the epoch: an epoch of
twenty million samples starts in milliseconds, also in its middle. Step s of an epoch has the positions
[s * global_batch, (s + 1) * global_batch) of the order; ``plan/lanes.py`` cuts them into lanes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt

from lockstep.errors import InvariantError, UsageError

SAMPLE, COLLATE, SAMPLER, STREAM, MODEL, EVALUATION, PHASE = range(7)
"""Salts: what a seed is used for. Equal numbers with different salts give unrelated seeds."""

SMALL = 1 << 12
"""An order of up to SMALL samples is stored as a list: exactly uniform, and no larger than the tables would be."""

LARGE = 1 << 30
"""For LARGE samples and more, the round functions are computed instead of looked up: tables would be slow to fill."""

ROUNDS = 8
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(n) with random access. It depends only on (seed, epoch, n).

    It is a Feistel network, written by hand because torch.randperm would list the whole epoch. A position is a pair
    (left, right) in an a x b grid with a * b >= n. Each round shifts one half by a random function of the other half. Shifting
    back undoes a round, so every round is a bijection of the grid, whatever the functions are. A result of n or more is put
    through the network again until it is below n; fewer than a results are.
    """

    seed: int
    epoch: int
    n: int
    _sides: tuple[int, int] = field(init=False, repr=False, compare=False)
    _tables: Sequence[Sequence[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvariantError(f"a permutation of {self.n} samples was asked for; it needs at least 1")
        name = f"{self.seed}/{self.epoch}/{self.n}"
        a = isqrt(self.n - 1) + 1
        b = -(-self.n // a)
        tables: list[Sequence[int]]
        if self.n <= SMALL:
            tables = [sorted(range(self.n), key=_random_numbers(name, self.n).__getitem__)]
        else:
            tables = [_round_function(f"{name}/{number}", self.n, *((b, a) if number % 2 else (a, b))) for number in range(ROUNDS)]
        object.__setattr__(self, "_sides", (a, b))
        object.__setattr__(self, "_tables", tuple(tables))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} is outside an order of {self.n} samples")
        return self.window(position, position + 1)[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self.window(0, self.n))

    def window(self, start: int, stop: int) -> list[int]:
        """Return the sample indices at positions [start, stop), clipped to the order. Takes about a microsecond for each."""
        start, stop = max(0, start), min(stop, self.n)
        if self.n <= SMALL:
            return list(self._tables[0][start:stop])
        n, (a, b) = self.n, self._sides
        t0, t1, t2, t3, t4, t5, t6, t7 = self._tables
        found = []
        for value in range(start, stop):
            while True:
                left, right = divmod(value, b)
                left = (left + t0[right]) % a
                right = (right + t1[left]) % b
                left = (left + t2[right]) % a
                right = (right + t3[left]) % b
                left = (left + t4[right]) % a
                right = (right + t5[left]) % b
                left = (left + t6[right]) % a
                right = (right + t7[left]) % b
                value = left * b + right
                if value < n:
                    break
            found.append(value)
        return found


@dataclass(frozen=True)
class Order:
    """The order of one epoch: shuffled (a Permutation), unshuffled (a range), or given by a sampler (an array)."""

    positions: Permutation | range | array[int]

    def __len__(self) -> int:
        return len(self.positions)

    def window(self, start: int, stop: int) -> list[int]:
        """Return the sample indices at positions [start, stop)."""
        if isinstance(self.positions, Permutation):
            return self.positions.window(start, stop)
        return list(self.positions[start:stop])

    def fingerprint(self) -> int:
        """Return a number that is equal for equal orders of a sampler, and never 0."""
        assert isinstance(self.positions, array)
        return 1 + int.from_bytes(hashlib.sha256(self.positions.tobytes()).digest()[:7], "big")


def steps_per_epoch(n: int, global_batch: int, drop_last: bool) -> int:
    """Return the number of steps in an epoch of n samples."""
    if n < 1 or global_batch < 1:
        raise UsageError(f"{n} samples in batches of {global_batch} make no step. Pass at least one sample and global_batch>=1.")
    return n // global_batch if drop_last else -(-n // global_batch)


def batch_positions(n: int, global_batch: int, step: int, drop_last: bool) -> tuple[int, int]:
    """Return the positions [start, stop) of a step's global batch in the epoch's order. The last batch may be smaller."""
    if not 0 <= step < steps_per_epoch(n, global_batch, drop_last):
        raise InvariantError(f"an epoch of {n} samples in batches of {global_batch} has no step {step}")
    return step * global_batch, min((step + 1) * global_batch, n)


def sample_seed(seed: int, epoch: int, index: int, salt: int = SAMPLE) -> int:
    """Return a seed of 63 bits for what happens to one sample in one epoch."""
    return _mix(seed, salt, epoch, index)


def lane_seed(seed: int, step: int, lane: int, salt: int = MODEL) -> int:
    """Return a seed of 63 bits for what happens in one lane of one step."""
    return _mix(seed, salt, step, lane)


def _mix(seed: int, salt: int, major: int, minor: int) -> int:
    """Mix four numbers: one multiplication for each, then the last steps of splitmix64. Each input bit affects every output bit."""
    z = (seed + salt * 0xD1342543DE82EF95) & MASK
    z = ((z ^ (z >> 32)) * 0x9E3779B97F4A7C15 + major) & MASK
    z = ((z ^ (z >> 29)) * 0xD6E8FEB86659FD93 + minor) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) >> 1


def _round_function(name: str, n: int, half: int, other: int) -> Sequence[int]:
    """Return the shift, below ``half``, of one half of a position for each value, below ``other``, of the other half."""
    if n < LARGE:
        return [number % half for number in _random_numbers(name, other)]
    return _ComputedFunction(_random_numbers(name, 1)[0], half, other)


class _ComputedFunction(Sequence[int]):
    """A round function that is too large for a table."""

    def __init__(self, key: int, half: int, other: int) -> None:
        self._key, self._half, self._other = key, half, other

    def __len__(self) -> int:
        return self._other

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        z = ((self._key ^ at) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 32)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 29)) % self._half


def _random_numbers(name: str, count: int) -> array[int]:
    """Return ``count`` 64-bit numbers that depend only on ``name``, the same on every machine."""
    numbers = array("Q", hashlib.shake_256(f"lockstep order {name}".encode()).digest(8 * count))
    if array("H", [1]).tobytes()[0] == 0:
        numbers.byteswap()
    return numbers
