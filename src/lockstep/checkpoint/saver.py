"""Saver: the checkpoints of one run, as one worker sees them: when one is due, its part, and when all parts are there.

Workers agree by what they hear with every step (grads/control.py): nobody waits for a slow disk.

    due -> snapshot (all wait for the copy) -> each writes its part behind the training -> every WROTE was heard
        -> parts are gathered -> rank 0 publishes behind the training

One is in flight at most: where the next is due before, training waits. A change of workers gives it up, and a new one is due.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.checkpoint.background_write import Behind, Writing
from lockstep.checkpoint.manifest import File, Manifest, Stored
from lockstep.checkpoint.retention import Retention, new_folder
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.state_layout import Layout, lay_out_state
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import dtype_name
from lockstep.errors import LockstepError, UsageError
from lockstep.gradients.control_word import PUBLISHED, SAVE, STOP, WROTE
from lockstep.plan.interval import Interval
from lockstep.plan.step_end import StepEnd

_LOOK_S = 1.0
"""A worker that is through looks so often whether the others are: a long write must not look like a hang."""


class NotSaved(LockstepError, OSError):
    """A checkpoint that was asked for is not there. The message says why."""


class Whole(Protocol):
    """Whose state is saved."""

    settings: dict[str, Any]

    def capture(self) -> dict[str, Any]: ...

    def persistent(self) -> set[str]:
        """Names of the buffers in the model's state dict."""

    def aliases(self) -> dict[str, str]:
        """Names in the model's state dict that are another name's tensor."""


class Saver:
    """``comm()``: of the current generation. ``tell`` and, by another thread, ``published`` are called on rank 0."""

    def __init__(
        self,
        retention: Retention,
        cadence: Interval,
        whole: Whole,
        comm: Callable[[], Comm],
        tell: Callable[[str], None],
        published: Callable[[int, str], None],
    ) -> None:
        self._retention, self._cadence, self._whole, self._comm = retention, cadence, whole, comm
        self._tell, self._published = tell, published
        self._snapshot = Snapshot()
        self._writing: Writing | None = None
        self._given_up: Writing | None = None
        self._publishing: Behind | None = None
        self._preparing: Behind | None = None
        self._folder, self._step = "", -1
        self._layout: Layout | None = None
        self._began_at = time.monotonic()
        self._failed = ""
        self._owed = False
        self.last_step = -1
        """Of the newest checkpoint that was begun (or resumed from) and not given up."""
        self.agreed_at: Callable[[int], int] = lambda step: step
        """The last step, up to this one, at which replicas were known to be equal."""
        self._suspect: int | None = None
        self._suspects: int | None = None
        """Checkpoints after this step may hold wrong bits, and go when the next one is there; and the one in flight is that one."""
        self._unconfirmed = False
        """All parts are written, and nobody has heard yet that rank 0 has published them."""
        self.asked = False
        """The user asked for one, at the end of this turn."""

    # -- what the others hear ----------------------------------------------------------------

    def requests(self) -> int:
        told = 0
        if self._unconfirmed and self._publishing is not None and self._publishing.wait(0):
            told = PUBLISHED
        late = self._owed or (self._comm().rank == 0 and self._cadence.is_late(time.monotonic() - self._began_at))
        if self._writing is None:
            return told | (SAVE if late else 0)
        return told | (WROTE if self._writing.is_over else 0)

    @property
    def has_failed(self) -> bool:
        """Whether the last one that was begun is not there."""
        return bool(self._failed)

    # -- between two steps ---------------------------------------------------------------------

    def is_due(self, now: StepEnd) -> bool:
        """Whether there is something to do together; the same on every worker."""
        return self._all_wrote(now) or self._wants_save(now) or self._must_stop(now)

    def hear(self, now: StepEnd) -> None:
        """After every step."""
        if any(request & PUBLISHED for request in now.requests):
            self._unconfirmed = False

    def act(self, now: StepEnd) -> None:
        """Collective."""
        if self._all_wrote(now):
            self._conclude()
        if self._wants_save(now):
            self.begin(now.step)
        if self._must_stop(now):
            self.settle()

    def done(self) -> None:
        self.asked = False

    def _all_wrote(self, now: StepEnd) -> bool:
        return self._writing is not None and bool(now.requests) and all(request & WROTE for request in now.requests)

    def _must_stop(self, now: StepEnd) -> bool:
        return any(request & STOP for request in now.requests)

    def _wants_save(self, now: StepEnd) -> bool:
        if self.asked or self._cadence.is_due(now.step, now.epoch, ends_epoch=now.ends_epoch):
            return True
        return self.last_step != now.step and any(request & (SAVE | STOP) for request in now.requests)

    def prepare(self) -> None:
        """After the first step, when the state has its size: mistakes are told now, and memory is got behind the training."""
        if self._preparing is None:
            comm = self._comm()
            layout = lay_out_state(self._whole.capture(), self._whole.persistent(), comm.size)
            pinned = any(tensor.is_cuda for tensor in layout.tensors)
            nbytes = int(layout.bytes_of(comm.rank) * 1.01) + (1 << 16)
            self._preparing = Behind(lambda: self._snapshot.prepare(nbytes, pinned), "prepare")

    # -- one checkpoint ------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Copy this worker's part of the state, and start writing. Collective."""
        self.settle()
        if self._preparing is not None:
            self._preparing.wait()
        comm = self._comm()
        layout = lay_out_state(self._whole.capture(), self._whole.persistent(), comm.size)
        folder = self._agree(comm, layout, step)
        metadata = {"format": "pt"}
        self._snapshot.take(layout.tensors, layout.names, [(file, ns, metadata) for file, ns in layout.parts[comm.rank]])
        index = layout.index() if comm.rank == 0 else None
        self._folder, self._step, self._layout, self._failed = folder, step, layout, ""
        self._writing = Writing(self._retention.storage, folder, self._snapshot, index)
        self._began_at = time.monotonic()
        self.last_step, self._owed = step, False
        self._suspects, self._suspect = self._suspect, None

    def settle(self) -> None:
        """Wait until nothing is in flight any more. Collective."""
        if self._writing is not None:
            self._until_all(self._writing)
            self._conclude()
        self._until_all(self._given_up)
        self._until_all(self._publishing)
        self._unconfirmed = False

    def finish(self, step: int) -> None:
        """The run is over: wait for what is in flight. Collective where something is, which all know alike."""
        if self.asked:
            self.begin(step)
            self.done()
        if self._writing is not None:
            self.settle()
        elif self._publishing is not None:
            self._publishing.wait()

    def end(self, step: int) -> None:
        """A loop has come to its end: save, unless that was done with its last step. Collective."""
        texts = gather_bytes(self._comm(), str(self.last_step).encode(), "the last checkpoint")
        if int(texts[0]) != step:  # not each its own: a newcomer does not know
            self.begin(step)
        self.settle()

    def save(self, step: int) -> None:
        """One checkpoint, on the storage when this returns; ``NotSaved`` where it is not. Collective."""
        self.begin(step)
        self.settle()
        self.asked = False
        error = gather_bytes(self._comm(), self._failed.encode(), "whether the checkpoint is there")[0].decode()
        if error:
            raise NotSaved(error)

    def suspect(self, after: int) -> None:
        """A replica had parted since step ``after``, and is healed: a new checkpoint is due; when it is there, those since go."""
        self.give_up()
        self._suspect = after if self._suspect is None else min(after, self._suspect)
        self.asked = True

    def give_up(self) -> None:
        """Workers have changed: nobody will publish what is being written, and another one is due."""
        if self._writing is not None:
            self._writing.give_up()
            self._given_up = self._writing
        if self._writing is not None or self._unconfirmed:  # rank 0 may be gone before it has published
            self._writing, self._unconfirmed, self.last_step, self._owed = None, False, -1, True
            self._suspect_again()

    def _conclude(self) -> None:
        """All parts are written, or have failed: rank 0 publishes. Collective."""
        writing, comm = self._writing, self._comm()
        if writing is None:
            return
        parts = [json.loads(text) for text in gather_bytes(comm, json.dumps(writing.part()).encode(), "what each has written")]
        self._writing = None
        failures = [f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if part["error"]]
        if failures:
            self.last_step = -1
            self._suspect_again()
            self._fail(failures[0])
            if comm.rank == 0:
                self._publishing = Behind(lambda: self._retention.storage.remove(self._folder), "remove", outlives=True)
            return
        self._unconfirmed = True
        if comm.rank == 0:
            manifest = self._manifest(parts)
            self._publishing = Behind(lambda: self._publish(manifest, self._folder), "publish", outlives=True)

    def _publish(self, manifest: Manifest, folder: str) -> None:
        try:
            self._retention.storage.publish(folder, manifest.to_json())
        except Exception as error:  # noqa: BLE001 - whatever storage raises
            self._fail(f"rank 0: {type(error).__name__}: {error}")
            return
        self._published(manifest.step, f"{self._retention.storage.url}/{folder}")
        try:
            self._retention.tidy(folder, self.agreed_at(manifest.step), self._suspects)
        except Exception as error:  # noqa: BLE001
            self._tell(
                f"older checkpoints in {self._retention.storage.url} could not be removed ({error}); they are tried again later."
            )

    def _fail(self, why: str) -> None:
        storage = self._retention.storage.url
        self._failed = f"the checkpoint of step {self._step} in {storage} was not written: {why}"
        if self._comm().rank == 0:
            self._tell(f"{self._failed}. The checkpoint before it is as it was.")

    def _manifest(self, parts: list[dict[str, Any]]) -> Manifest:
        layout = self._layout
        assert layout is not None
        stored = {int(number): entry for part in parts for number, entry in part["tensors"].items()}
        return Manifest(
            step=self._step,
            made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            workers=len(parts),
            torch=torch.__version__,
            settings=self._whole.settings,
            skeleton=layout.skeleton,
            model=layout.model,
            aliases=self._whole.aliases(),
            files={name: File(**entry) for part in parts for name, entry in part["files"].items()},
            tensors=tuple(
                Stored(**{**stored[number], "shape": tuple(stored[number]["shape"])}) for number in range(len(layout.names))
            ),
        )

    def _agree(self, comm: Comm, layout: Layout, step: int) -> str:
        """The folder's name, from rank 0; all must be about to write parts of the same."""
        shown = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in zip(layout.names, layout.tensors, strict=True)]
        mine = {"folder": new_folder(step), "holds": hashlib.sha256(json.dumps([shown, layout.parts]).encode()).hexdigest()}
        texts = gather_bytes(comm, json.dumps(mine).encode(), f"the name of the checkpoint of step {step}")
        first, *others = map(json.loads, texts)
        for rank, other in enumerate(others, 1):
            if other["holds"] != first["holds"]:
                raise UsageError(
                    f"rank 0 and rank {rank} hold different state at step {step}: other tensors, or of other shapes. Register the "
                    "same objects on every worker, under the same names, whatever its rank."
                )
        return str(first["folder"])

    def _suspect_again(self) -> None:
        """The checkpoint that was to replace suspect ones is not there."""
        known = [step for step in (self._suspect, self._suspects) if step is not None]
        self._suspect = min(known, default=None)

    def _until_all(self, work: Writing | Behind | None) -> None:
        """Wait until everybody's is over; whoever is through looks now and then, so that a long write does not look like a hang."""
        while True:
            mine = b"1" if work is None or work.wait(_LOOK_S) else b"0"
            if all(text == b"1" for text in gather_bytes(self._comm(), mine, "whether all have written")):
                return
