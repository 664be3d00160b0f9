"""How a variant is measured: turns of a few steps between two synchronisations, as many as there is time for, and peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.variants import Site

TURN_S = 0.15  # how long one variant runs at a time
LEAST_STEPS, MOST_STEPS = 2, 40  # in a turn
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
WARM_UP = 8  # steps: torch DDP rebuilds its buckets, Lockstep learns its order, convolutions are tuned, steps are captured
MEMORY_STEPS = 3
FINISHING, FINISHING_S = 3, 0.15  # the number of collectives and the pause before each, until memory is read


def steps_of_turn(step_s: float) -> int:
    """How many steps make a turn of about ``TURN_S``."""
    return max(LEAST_STEPS, min(MOST_STEPS, round(TURN_S / max(step_s, 1e-6))))


def has_time(rounds: int, now: float, round_s: float, until: float) -> bool:
    """Whether to measure another round. Never fewer than ``LEAST_ROUNDS``: a figure from fewer would be none."""
    return rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and now + round_s <= until)


def share_of(left_s: float, number: int, count: int) -> float:
    """The seconds for case ``number`` of ``count``, if ``left_s`` are left for it and those after it. They get what it leaves."""
    return left_s / (count - number)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The order of the variants in round ``by``: each comes first as often as the others."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def settle(site: Site) -> None:
    """Wait until all ranks are here and the device is idle."""
    if site.is_cuda:
        torch.cuda.synchronize()
    if site.size > 1:
        dist.barrier()
        if site.is_cuda:
            torch.cuda.synchronize()


def take_turn(loop: Iterator[None], steps: int, site: Site) -> tuple[float, float]:
    """Seconds per step: between two events on the device's stream, and by the clock on the wall. The same on a CPU."""
    settle(site)
    began = time.perf_counter()
    if not site.is_cuda:
        for _ in range(steps):
            next(loop)
        wall = time.perf_counter() - began
        return wall / steps, wall / steps
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(steps):
        next(loop)
    last.record()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    return first.elapsed_time(last) / 1e3 / steps, wall / steps


def summary(turns: Sequence[tuple[float, float]], steps: int) -> dict[str, float]:
    """Medians and quartiles in milliseconds."""
    device, wall = sorted(1e3 * d for d, _ in turns), [1e3 * w for _, w in turns]
    return {
        "ms": statistics.median(device),
        "p25_ms": quantile(device, 0.25),
        "p75_ms": quantile(device, 0.75),
        "wall_ms": statistics.median(wall),
        "turns": len(turns),
        "steps_per_turn": steps,
    }


def quantile(ordered: Sequence[float], q: float) -> float:
    """Between the two nearest values, in proportion."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class PeakMemory:
    """The memory that one variant needs, beside what lives already: its greatest allocation in a step, from its first tensor on.

    The memory pool of a CUDA graph belongs to the graph, in use or not. It counts as a whole.
    """

    def __init__(self, site: Site) -> None:
        self._is_cuda = site.is_cuda
        if self._is_cuda:
            gc.collect()
            _finish_collectives(site)
            torch.cuda.empty_cache()
            self._allocated, self._unused = torch.cuda.memory_allocated(), _unused_in_graph_pools()

    def measure(self, loop: Iterator[None], steps: int = MEMORY_STEPS) -> float | None:
        """Run so many steps. Returns MiB; None on a CPU."""
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            next(loop)
        if not self._is_cuda:
            return None
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - self._allocated
        return (grown + _unused_in_graph_pools() - self._unused) / 2**20


def _finish_collectives(site: Site) -> None:
    """Let torch's NCCL group release the tensors of earlier collectives: they are not memory that lives already.

    It keeps tensors of works that nobody has waited for, as those of torch DDP, until a thread of it has seen that they are
    complete and another collective begins. Bare loops have no collective.
    """
    for _ in range(FINISHING):
        torch.cuda.synchronize()
        time.sleep(FINISHING_S)  # that thread looks ten times a second
        dist.all_reduce(torch.zeros(1, device=site.device))
    torch.cuda.synchronize()


def _unused_in_graph_pools() -> int:
    """Bytes that graphs hold and no tensor uses now."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    graphs = [each for each in segments if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in graphs)
