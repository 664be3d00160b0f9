"""ResumedCheckpoint: the checkpoint that a run was resumed from: tells whether the live state is still that of the checkpoint.

Between ``Run(...)`` and the place in the script at which the checkpoint was made, the script runs again what it ran before: it
steps schedulers, changes weights, clears optimizer state. No worker needs another one to find that out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint.checksum import checksums
from lockstep.checkpoint.reader import FoundCheckpoint, read_state
from lockstep.checkpoint.tensor_file import DamagedCheckpointError
from lockstep.comm.plain_state import Stateful, pack
from lockstep.errors import UsageError


class ResumedCheckpoint:
    """Remembers the plain values and the checksums of the checkpoint, not its tensors."""

    def __init__(self, found: FoundCheckpoint) -> None:
        """``found.state`` is what is loaded into the live objects: the checkpoint's state, with the values that were overridden."""
        self._retention, self._folder, self.manifest = found.retention, found.folder, found.manifest
        skeleton, _, _ = pack(found.state, "the state of the checkpoint")
        self._expected = dict(skeleton["dict"])
        self._sums = [tensor.sum for tensor in found.manifest.tensors]

    @property
    def folder(self) -> str:
        return self._folder.name

    def read(self, live: Stateful) -> dict[str, Any]:
        """Read the checkpoint's state again. Raises ``UsageError`` if it is damaged meanwhile."""
        try:
            return read_state(self._retention, self._folder, live.weights(), live.settings).state
        except DamagedCheckpointError as damage:
            raise UsageError(
                f"the checkpoint {self._retention.storage.url}/{self.folder}, from which this run was resumed, cannot be read "
                f"again: {damage}. Start the run again, and let nothing remove its checkpoints meanwhile."
            ) from None

    def differs_from(self, live: Stateful) -> bool:
        """Return whether the live state differs from that of the checkpoint. Costs one pass over the live tensors."""
        state = {**live.replicated(), "trainable": live.capture().get("trainable")}
        state = {key: value for key, value in state.items() if key in self._expected}
        skeleton, tensors, _ = pack(state, "the state of the run")
        expected = {"dict": [[key, self._expected[key]] for key in state]}
        if _describe(skeleton, None) != _describe(expected, None):
            return True
        return _describe(skeleton, checksums(tensors)) != _describe(expected, self._sums)


def _describe(packed: Any, sums: Sequence[str] | None) -> str:
    """Return a text that is equal for equal states, even if the numbers and devices of tensors, or the order of keys, differ."""
    return json.dumps(_canonical(packed, sums))


def _canonical(packed: Any, sums: Sequence[str] | None) -> Any:
    if not isinstance(packed, Mapping):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        number, dtype, shape, _ = content
        return {kind: [dtype, shape, sums[number] if sums is not None else ""]}
    if kind == "float":
        return packed
    if kind in ("dict", "counter"):
        items = ([json.dumps(_canonical(key, sums)), _canonical(value, sums)] for key, value in content)
        return {kind: sorted(items, key=lambda item: str(item[0]))}
    return {kind: [_canonical(item, sums) for item in content]}
