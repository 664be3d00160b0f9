"""Chooses the Source for a dataset: MapSource or StreamSource. Knows nothing of how they load."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.map_source import MapSource
from lockstep.data.source import LoaderOptions
from lockstep.data.stream_source import StreamSource
from lockstep.errors import UsageError


def open_source(dataset: Any, options: LoaderOptions) -> MapSource | StreamSource:
    """Return a MapSource for a map-style dataset and a StreamSource for an iterable one.

    All workers must call this with equal arguments. It starts no process.

    Raises:
        UsageError: If ``dataset`` is not a dataset, or cannot be loaded with these options.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "got a DataLoader instead of a dataset: Lockstep splits the samples into lanes itself. "
            "Pass loader.dataset, and its num_workers, collate_fn and pin_memory if you need them."
        )
    if not _is_stream(dataset):
        return MapSource(dataset, options)
    kind = type(dataset).__name__
    if options.shuffle:
        raise UsageError(
            f"shuffle=True, but {kind} can only be read from its beginning. Shuffle in the dataset, or use a map-style one."
        )
    if options.sampler is not None:
        raise UsageError(
            f"sampler=..., but {kind} can only be read from its beginning. Select in the dataset, or use a map-style one."
        )
    if options.drop_last:
        raise UsageError(f"drop_last=True, but the length of {kind} is not known before its end. Pass drop_last=False.")
    return StreamSource(dataset, options)


def _is_stream(dataset: Any) -> bool:
    """Whether samples can only be read one after the other, instead of by index."""
    if isinstance(dataset, IterableDataset):  # first, because it inherits a __getitem__ that only raises
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise UsageError(
        f"{type(dataset).__name__} is not a dataset: it has neither __getitem__ and __len__, nor __iter__. "
        "Pass a map-style dataset or an iterable dataset."
    )
