"""Whether all machines of a run see the same storage: each writes a small file and reads those of the others. Collective."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from lockstep.checkpoint.storage import Storage
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError
from lockstep.world import machine_label, machine_name

_MAX_BYTES = 64


def require_common_place(storage: Storage, comm: Comm) -> None:
    """Raise ``UsageError`` on every worker if a machine does not see what another one has written. All workers must call it.

    One worker of each machine takes part. A run on one machine needs no check. A machine that cannot write at all is told to the
    user when a checkpoint is written; the run trains until then.
    """
    mine = json.dumps([machine_label(), machine_name(), os.urandom(8).hex()]).encode()
    everyone = [json.loads(each) for each in gather_bytes(comm, mine, "the machine of each worker")]
    first_ranks = {(label, name): rank for rank, (label, name, _) in reversed(list(enumerate(everyone)))}
    writers = {rank: label for (label, _), rank in first_ranks.items()}
    if len(writers) < 2:
        return
    folder = f"probe-{everyone[0][2]}"
    error = _write(storage, folder, comm.rank) if comm.rank in writers else ""
    errors = [each.decode() for each in gather_bytes(comm, error.encode(), "whether each machine has written a probe")]
    missing = (
        _find_missing(storage, folder, comm.rank, [rank for rank in writers if not errors[rank]]) if comm.rank in writers else []
    )
    found = [json.loads(each) for each in gather_bytes(comm, json.dumps(missing).encode(), "which probes each machine sees")]
    if comm.rank == 0:
        _remove(storage, folder)
    for reader, unseen in enumerate(found):
        if unseen:
            raise UsageError(
                f"checkpoint={storage.url!r} is not one place for all machines: machine {writers[reader]} (rank {reader}) does "
                f"not see what machine {writers[unseen[0]]} (rank {unseen[0]}) has written there. Name a folder that all machines "
                "share, or a URL such as s3://bucket/run."
            )


def _write(storage: Storage, folder: str, rank: int) -> str:
    """Returns why it was not possible, or an empty text."""
    try:
        storage.make_folder(folder)
        storage.write(folder, f"rank-{rank}", [str(rank).encode()])
    except Exception as error:  # noqa: BLE001 - a storage may raise anything
        return f"{type(error).__name__}: {error}"[:200] or "unknown"
    return ""


def _find_missing(storage: Storage, folder: str, rank: int, writers: list[int]) -> list[int]:
    missing = []
    for writer in writers:
        try:
            is_there = storage.read(folder, f"rank-{writer}", _MAX_BYTES) == str(writer).encode()
        except Exception:  # noqa: BLE001 - a storage may raise anything
            is_there = False
        if not is_there:
            missing.append(writer)
    return missing


def _remove(storage: Storage, folder: str) -> None:
    with suppress(Exception):  # a storage may raise anything, and a folder without a manifest is no checkpoint
        storage.remove(folder)
