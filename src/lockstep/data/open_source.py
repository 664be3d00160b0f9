"""Which Source a dataset gets. Knows nothing of how they work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.map_source import MapSource
from lockstep.data.stream_source import StreamSource
from lockstep.errors import UsageError


def open_source(
    dataset: Any,
    *,
    lanes: int,
    global_batch: int,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = False,
    drop_last: bool = False,
    sampler: Iterable[int] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
) -> MapSource | StreamSource:
    """A MapSource where samples can be asked for by number, a StreamSource where they can only be read in turn."""
    if not is_stream(dataset):
        return MapSource(
            dataset,
            lanes=lanes,
            global_batch=global_batch,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
        )
    kind = type(dataset).__name__
    if shuffle:
        raise UsageError(f"shuffle=True, but {kind} can only be read in turn. Shuffle in the dataset, or use a map-style one.")
    if sampler is not None:
        raise UsageError(f"a sampler, but {kind} can only be read in turn. Choose in the dataset, or use a map-style one.")
    if drop_last:
        raise UsageError(f"drop_last=True, but where {kind} ends is not known before it does. Pass drop_last=False.")
    return StreamSource(
        dataset,
        lanes=lanes,
        global_batch=global_batch,
        epochs=epochs,
        seed=seed,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
    )


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read in turn. UsageError for what is no dataset at all."""
    # torch's IterableDataset inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, DataLoader) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise UsageError(
        f"{type(dataset).__name__} is not a dataset: it has neither __getitem__ and __len__, nor __iter__. "
        "Pass a map-style dataset, or one to iterate over."
    )
