"""How many workers each agent of a run on Ray has, and what Ray reserves for it. Pure: Ray is not asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.errors import UsageError

Resources = dict[str, float]


def workers_per_agent(workers: int, per_node: int | None, each: Resources, nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """Returns the number of workers of each agent.

    Args:
        workers: How many workers the run has.
        per_node: How many an agent has at most. None: as few nodes as possible are used, with almost equal numbers of workers.
        each: What one worker needs.
        nodes: What each node of the cluster has. It is not used if ``per_node`` is given: Ray may add nodes.

    Raises:
        UsageError: The nodes have no room for the workers.
    """
    if per_node is not None:
        full, rest = divmod(workers, per_node)
        return [per_node] * full + [rest] * bool(rest)
    rooms = sorted((room(node, each) for node in nodes), reverse=True)
    if sum(rooms) < workers:
        shown = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
        raise UsageError(
            f"the {len(nodes)} nodes of the Ray cluster have room for {sum(rooms)} workers with {shown} each, and -n is {workers}. "
            "Add nodes, or ask for fewer or smaller workers; --workers-per-node K waits until Ray's autoscaler has added nodes."
        )
    used = next(count for count in range(1, len(rooms) + 1) if sum(rooms[:count]) >= workers)
    counts = [0] * used
    for _ in range(workers):
        least = min((index for index in range(used) if counts[index] < rooms[index]), key=lambda index: counts[index])
        counts[least] += 1
    return counts


def room(node: Mapping[str, float], each: Resources) -> int:
    """Returns how many workers a node can have."""
    return min(math.floor(node.get(name, 0.0) / amount + 1e-9) for name, amount in each.items())


def needs_of_worker(cpus: float, gpus: float) -> Resources:
    """Returns what one worker needs, as Ray names it. Raises UsageError if that is nothing."""
    needs = {name: amount for name, amount in (("CPU", float(cpus)), ("GPU", float(gpus))) if amount > 0}
    if not needs:
        raise UsageError("a worker needs a CPU or a GPU: without either, Ray would start all workers on one node.")
    return needs


def bundle(workers: int, each: Resources) -> Resources:
    """Returns what Ray reserves for an agent. Raises UsageError if Ray cannot reserve that."""
    total = {name: workers * amount for name, amount in each.items()}
    gpus = total.get("GPU", 0.0)
    if gpus > 1 and gpus != int(gpus):
        raise UsageError(
            f"{workers} workers of one node need {gpus:g} GPUs together, and Ray gives out whole GPUs only. Choose another "
            "--workers-per-node or --gpus-per-worker."
        )
    return total
