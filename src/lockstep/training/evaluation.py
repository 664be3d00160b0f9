"""Evaluations: sums over a dataset, each sample exactly once, with the same bits on any number of workers.

Each lane adds up what the function returns for its batches, in order. The sums of the lanes are added along the tree
(plan/tree.py), after one exchange at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes, require_equal
from lockstep.comm.plain_state import from_bytes, to_bytes
from lockstep.data.map_source import MapSource
from lockstep.data.open_source import open_source
from lockstep.data.seeding import preserved_randomness, seed_everything
from lockstep.data.source import LoaderOptions, MicroBatch
from lockstep.data.stream_source import StreamSource
from lockstep.errors import UsageError
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.plan.samples import EVALUATION, MODEL, lane_seed
from lockstep.plan.tree import halves

Sums = dict[str, Any]


class Evaluations:
    """The evaluations of one run."""

    def __init__(self, model: nn.Module, engine: LaneEngine, lanes: int, seed: int) -> None:
        self._model, self._engine, self._lanes, self._seed = model, engine, lanes, seed

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        *,
        step: int,
        global_batch: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Sums:
        """Evaluate ``fn`` on this worker's lanes and add the results of all lanes. All workers must call it."""
        comm = self._engine.comm
        options = LoaderOptions(
            lanes=self._lanes,
            global_batch=global_batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed=self._seed,
            pin_memory=any(param.is_cuda for param in self._engine.params),
        )
        source = open_source(dataset, options)
        require_equal(
            comm,
            [["argument", "global_batch", str(global_batch)], ["dataset", "length", str(getattr(source, "length", None))]],
            "call run.evaluate with different arguments",
            "Pass the same dataset and global_batch on every worker.",
        )
        training = [module for module in self._model.modules() if module.training]
        try:
            self._model.eval()
            with preserved_randomness(), self._engine.untouched_buffers(), torch.no_grad():
                mine = sum_here(fn, source, self._engine.my_lanes, lane_seed(self._seed, step, 0, MODEL))
        finally:
            source.close()
            for module in training:
                module.training = True
        return sum_everywhere(comm, mine, self._lanes)


def sum_here(
    fn: Callable[[Any], Mapping[str, Any]], source: MapSource | StreamSource, lanes: tuple[int, int], seed: int
) -> dict[int, Sums]:
    """Return the sums of each of this worker's lanes [first, last) that has samples."""
    found: dict[int, Sums] = {}
    source.seek(0, 0, lanes)
    for micro in _micro_batches(source, lanes):
        if micro.count:
            seed_everything(lane_seed(seed, micro.step, micro.lane, EVALUATION))
            _add(found.setdefault(micro.lane, {}), fn(micro.batch))
    return found


def sum_everywhere(comm: Comm, mine: dict[int, Sums], lanes: int) -> Sums:
    """Return the sums over all lanes, as numbers and tensors on the host. All workers must call it."""
    everyone = dict(mine)
    if comm.size > 1:
        skeleton, sums = to_bytes(mine, "what evaluate sums")
        skeletons = gather_bytes(comm, skeleton.encode(), "the names of what is summed")
        contents = gather_bytes(comm, sums, "the sums")
        for text, content in zip(skeletons, contents, strict=True):
            everyone.update(from_bytes(text.decode(), content))
    names = {tuple(sorted(sums)) for sums in everyone.values()}
    if len(names) > 1:
        raise UsageError(
            f"the function given to run.evaluate returned the names {' for some batches and '.join(map(str, names))} for others. "
            "Return the same names for every batch."
        )
    return _tree((0, lanes), everyone) or {}


def _micro_batches(source: MapSource | StreamSource, lanes: tuple[int, int]) -> Iterator[MicroBatch]:
    while True:
        if isinstance(source, MapSource):
            try:
                yield source.take()
            except StopIteration:
                return
        else:
            step = [source.take() for _ in range(*lanes)]
            if not any(micro.count for micro in step):
                return
            yield from step


def _tree(node: tuple[int, int], lanes: Mapping[int, Sums]) -> Sums | None:
    """Return the sums of a node of the tree, or None if no lane below it has a sample."""
    if node[1] - node[0] == 1:
        sums = lanes.get(node[0])
        return None if sums is None else {k: v.cpu() if isinstance(v, Tensor) else v for k, v in sums.items()}
    left, right = (_tree(half, lanes) for half in halves(node))
    if left is None or right is None:
        return right if left is None else left
    return {name: left[name] + right[name] for name in left}


def _wide(value: Tensor) -> Tensor:
    """Convert to a dtype in which many values can be summed."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.int64)


def _add(sums: Sums, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise UsageError(
            f"the function given to run.evaluate returned a {type(values).__name__}. Return a dict of numbers or tensors."
        )
    for name, value in values.items():
        if not isinstance(value, (Tensor, int, float)):
            raise UsageError(f"run.evaluate cannot sum {name!r}: it is a {type(value).__name__}. Return numbers or tensors.")
        value = _wide(value.detach()) if isinstance(value, Tensor) else value
        if name in sums:
            sums[name] = sums[name] + value
        else:
            sums[name] = value.clone() if isinstance(value, Tensor) else value
    if len(sums) != len(values):
        missing = sorted(set(sums) ^ set(values))
        raise UsageError(
            f"the function given to run.evaluate returned {missing[0]!r} for some batches only. "
            f"Return the same names for every batch."
        )
