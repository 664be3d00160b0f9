"""Resume: the newest whole checkpoint of a storage is read, by every worker alike. A damaged one is named and passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import read_tensors
from lockstep.checkpoint.retention import Retention, Slot, slot_of
from lockstep.checkpoint.tensor_file import Damaged
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import unflatten
from lockstep.errors import UsageError


def find_and_read(
    retention: Retention, comm: Comm, into: Mapping[str, Tensor], settings: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[Manifest, dict[str, Any]] | None:
    """(manifest, state) of the newest whole checkpoint; None where there is none yet. Collective; every worker reads for itself.

    ``into``: the model's parameters and buffers, which the state must fit (``UsageError``); parameters on the host are read into.
    """
    mine = json.dumps([slot.folder for slot in retention.whole()]).encode() if comm.rank == 0 else b""
    folders = json.loads(gather_bytes(comm, mine, "which checkpoints there are")[0])
    damages: list[str] = []
    for folder in folders:
        slot = slot_of(folder)
        assert slot is not None
        found, problem = None, ""
        try:
            found = _read(retention, slot, into, settings)
        except Damaged as damage:
            problem = str(damage)
        problems = gather_bytes(comm, problem.encode(errors="backslashreplace"), "whether the checkpoint is whole")
        bad = next((f"{text.decode()} (seen by rank {rank})" for rank, text in enumerate(problems) if text), None)
        if bad is None:
            assert found is not None
            return found
        damages.append(f"{folder} is damaged: {bad}")
        if comm.rank == 0:
            tell(f"the checkpoint {retention.storage.url}/{damages[-1]}. The one before it is used.")
    if damages:
        raise UsageError(
            f"no checkpoint in {retention.storage.url} is whole: {damages[0]}. "
            "Restore one of them, or name another place to begin anew."
        )
    return None


def _read(
    retention: Retention, slot: Slot, into: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Manifest, dict[str, Any]]:
    manifest = retention.manifest(slot)
    require_fit(manifest, into, settings, f"{retention.storage.url}/{slot.folder}")
    targets = {
        number: into[name]
        for name, number in manifest.model.items()
        if name in into and not into[name].is_cuda and into[name].is_contiguous() and into[name].numel()
    }
    with torch.no_grad():
        tensors = read_tensors(retention.storage, slot.folder, manifest, targets)
    try:
        state = unflatten(json.dumps(manifest.skeleton), [tensors[number] for number in range(len(manifest.tensors))])
        if not isinstance(state, dict):
            raise TypeError("the state is no dict")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as error:
        raise Damaged(f"its skeleton cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
    return manifest, state


def require_fit(manifest: Manifest, model: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> None:
    """``UsageError`` that names the first thing in which the checkpoint is another run's."""
    held = {name: manifest.tensors[number] for name, number in manifest.model.items()}
    for name, tensor in model.items():
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name not in held:
            raise UsageError(
                f"the checkpoint {where} is of another model: it has no {name}, which this one has (shape {shape}). "
                "Build the model that was saved, or name another storage."
            )
        if list(held[name].shape) != shape or held[name].dtype != dtype:
            raise UsageError(
                f"the checkpoint {where} is of another model: its {name} has shape {list(held[name].shape)} and dtype "
                f"{held[name].dtype}, this one's {shape} and {dtype}. Build the model that was saved, or name another storage."
            )
    more = [name for name in held if name not in model]
    if more:
        raise UsageError(
            f"the checkpoint {where} is of another model: this one has no {more[0]}. Build the model that was saved, or name "
            "another storage."
        )
    for name, value in settings.items():
        if manifest.settings.get(name) != value:
            raise UsageError(
                f"the checkpoint {where} was made with {name}={manifest.settings.get(name)!r}, this run has {name}={value!r}: the "
                f"result would be neither's. Pass {name}={manifest.settings.get(name)!r}, or name another storage."
            )
