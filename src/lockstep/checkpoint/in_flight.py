"""CheckpointInFlight: one checkpoint, as one worker sees it, from the copy of the state to the manifest.

Does not know when a checkpoint is due, or what happens to the ones before it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.manifest import Manifest, StoredFile, StoredTensor
from lockstep.checkpoint.ownership import RunIdentity
from lockstep.checkpoint.part_writer import PartWriter
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.state_layout import StateLayout, lay_out_state
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import Stateful, dtype_name
from lockstep.errors import UsageError
from lockstep.observe.notice import print_notice


class CheckpointInFlight:
    """All workers must construct it after the same step. Returns when the state is copied, and writes it in the background."""

    def __init__(
        self, step: int, identity: RunIdentity, state: Stateful, comm: Comm, snapshot: Snapshot, retention: Retention
    ) -> None:
        """Raises ``UsageError`` if the state cannot be written, or if the workers hold different tensors."""
        self.step = step
        self.error = ""
        """Why the checkpoint was not written. Failed publications are known to rank 0 alone, other failures to every rank."""
        self._identity, self._state, self._comm, self._storage = identity, state, comm, retention.storage
        self._layout = lay_out_state(state.capture(), state.persistent(), comm.size)
        self.folder = _agree_on_folder(comm, self._layout, step, retention.new_folder(step) if comm.rank == 0 else "")
        retention.begun(self.folder, identity.run)
        snapshot.copy(self._layout, comm.rank)
        self._writer = PartWriter(retention.storage, self.folder, snapshot, self._layout.index() if comm.rank == 0 else None)
        self._publication: BackgroundTask | None = None

    @property
    def is_written(self) -> bool:
        """Whether this worker's part is written, or has failed."""
        return self._writer.wait(0)

    @property
    def has_publication_ended(self) -> bool:
        """Whether rank 0 has published the checkpoint, or has failed to. Always False on the other ranks."""
        return self._publication is not None and self._publication.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the background work of this worker. Returns whether it has ended, so that the snapshot may be used again."""
        return self._writer.wait(timeout_s) and (self._publication is None or self._publication.wait(timeout_s))

    @property
    def is_publishing(self) -> bool:
        """On rank 0, whether the publication is under way."""
        return self._publication is not None and not self._publication.wait(0)

    def wait_for_publication(self) -> None:
        """Only rank 0 has something to wait for."""
        if self._publication is not None:
            self._publication.wait()

    def cancel(self) -> None:
        """The workers have changed: stop writing. Does not wait; a publication is not stopped."""
        self._writer.cancel()

    def conclude(self, publish: Callable[[Manifest], None]) -> bool:
        """Gather what each worker has written. All workers must call it, once all parts are written or have failed.

        Rank 0 calls ``publish`` in the background, or removes the folder if a part has failed. Returns whether none has.
        """
        mine = json.dumps(self._writer.result()).encode()
        parts = [json.loads(text) for text in gather_bytes(self._comm, mine, "what each worker has written")]
        failures = [f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if part["error"]]
        if failures:
            self.fail(failures[0])
        if self._comm.rank == 0:
            action = partial(self._storage.remove, self.folder) if failures else partial(publish, self._manifest(parts))
            self._publication = BackgroundTask(action, "publish", finish_at_exit=True)
        return not failures

    def fail(self, why: str) -> None:
        """Remember why this checkpoint was not written. Rank 0 tells the user."""
        self.error = f"the checkpoint of step {self.step} in {self._storage.url} was not written: {why}"
        if self._comm.rank == 0:
            print_notice(f"{self.error}. The checkpoint before it is unchanged.")

    def _manifest(self, parts: list[dict[str, Any]]) -> Manifest:
        tensors = {int(number): entry for part in parts for number, entry in part["tensors"].items()}
        return Manifest(
            run=self._identity.run,
            hyperparameters=self._identity.hyperparameters,
            step=self.step,
            made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            workers=len(parts),
            torch=torch.__version__,
            settings=self._state.settings,
            skeleton=self._layout.skeleton,
            model=self._layout.model,
            aliases=self._state.aliases(),
            files={name: StoredFile(**entry) for part in parts for name, entry in part["files"].items()},
            tensors=tuple(
                StoredTensor(**{**tensors[number], "shape": tuple(tensors[number]["shape"])}) for number in range(len(tensors))
            ),
        )


def _agree_on_folder(comm: Comm, layout: StateLayout, step: int, proposed: str) -> str:
    """Return the folder's name, which rank 0 proposes. All must call it. Raises ``UsageError`` if a worker holds other tensors."""
    tensors = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in zip(layout.names, layout.tensors, strict=True)]
    fingerprint = hashlib.sha256(json.dumps([tensors, layout.parts]).encode()).hexdigest()
    mine = json.dumps({"folder": proposed, "fingerprint": fingerprint}).encode()
    first, *others = map(json.loads, gather_bytes(comm, mine, f"the name of the checkpoint of step {step}"))
    for rank, other in enumerate(others, 1):
        if other["fingerprint"] != first["fingerprint"]:
            raise UsageError(
                f"rank 0 and rank {rank} hold different state at step {step}: the names, dtypes or shapes of their tensors differ. "
                "Register the same objects under the same names on every worker."
            )
    return str(first["folder"])
