"""Who writes which tensor of a checkpoint: sizes x writers -> parts of about equal bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def spread(sizes: Sequence[int], writers: int) -> tuple[tuple[int, ...], ...]:
    """For each writer the indices of its tensors, ascending; the largest go first, each to whoever has least."""
    held = [0] * writers
    parts: list[list[int]] = [[] for _ in range(writers)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writer = held.index(min(held))
        held[writer] += sizes[index]
        parts[writer].append(index)
    return tuple(tuple(sorted(part)) for part in parts)
