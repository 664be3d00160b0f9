"""The arguments both kinds of source share, checked. Knows nothing of how they are used."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lockstep.errors import UsageError


def check_arguments(dataset: Any, lanes: int, global_batch: int, epochs: int, num_workers: int) -> None:
    """Raise UsageError for what no source can work with."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "got a DataLoader where a dataset belongs: Lockstep deals the samples itself, by lane. "
            "Pass loader.dataset, and its num_workers, collate_fn and pin_memory if you need them."
        )
    if lanes < 1:
        raise UsageError(f"lanes={lanes}: there must be at least one. Pass lanes>=1.")
    if global_batch < 1:
        raise UsageError(f"global_batch={global_batch}: a step needs at least one sample. Pass global_batch>={lanes}.")
    if global_batch < lanes:
        raise UsageError(
            f"global_batch={global_batch} is smaller than lanes={lanes}: every lane needs at least one sample of a full batch. "
            f"Pass global_batch>={lanes} or fewer lanes."
        )
    if epochs < 1:
        raise UsageError(f"epochs={epochs}: there would be nothing to do. Pass epochs>=1.")
    if num_workers < 0:
        raise UsageError(f"num_workers={num_workers}: a number of processes cannot be negative. Pass 0 to load in this process.")
