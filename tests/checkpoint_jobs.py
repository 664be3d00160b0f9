"""What the tests of checkpoints save and load: a small model in training, and faults in the file operations of local storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lockstep
from lockstep.checkpoint import atomic_file, storage
from lockstep.checkpoint.checkpoints import SaveError
from lockstep.comm.plain_state import digest, flatten
from tests.models import build

COUNTED = ("open", "write", "fsync", "close", "rename", "unlink", "rmdir", "mkdir", "makedirs", "listdir", "scandir", "stat")


class FaultyOs:
    """``os``, but ``fault(name)`` is called before file operation number ``at``, from 0. ``calls`` are those that were made."""

    def __init__(self, at: int, fault: Any) -> None:
        self._at, self._fault = at, fault
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def counted(*args: Any, **kwargs: Any) -> Any:
            number, self._count = self._count, self._count + 1
            if number == self._at:
                self._fault(name)
            result = real(*args, **kwargs)
            folder = next((kwargs[key] for key in ("dir_fd", "dst_dir_fd") if key in kwargs), None)
            if folder is not None:  # record paths, not names relative to a descriptor
                args = tuple(os.path.join(os.readlink(f"/proc/self/fd/{folder}"), a) if isinstance(a, str) else a for a in args)
            self.calls.append((name, args, result))
            return result

        return counted


@contextmanager
def faulty(at: int, fault: Any) -> Iterator[FaultyOs]:
    """Let the file operations of local storage fail at operation ``at``."""
    faulty_os = FaultyOs(at, fault)
    storage.os = atomic_file.os = faulty_os  # type: ignore[assignment]
    try:
        yield faulty_os
    finally:
        storage.os = atomic_file.os = os


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(40, 12, generator=generator), torch.randint(0, 4, (40,), generator=generator)


class Job:
    """A run whose steps are made one by one. ``state()`` is a digest of its model and its optimizer."""

    def __init__(self, folder: Path | str, keep: int = 1) -> None:
        torch.manual_seed(1)
        self.model = build("mlp")
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run = lockstep.Run(self.model, self.opt, lanes=1, checkpoint=folder, every="1000h", keep=keep)
        data = torch.utils.data.TensorDataset(*batch())
        self._loop = iter(self.run.shard(data, global_batch=8, epochs=100))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            x, y = next(self._loop)
            F.cross_entropy(self.model(x), y).backward()
            self.opt.step()
            self.opt.zero_grad()

    def save(self) -> None:
        """Save now, between two steps. A failure is printed, not raised."""
        checkpoints = self.run._checkpoints
        assert checkpoints is not None
        with suppress(SaveError):
            checkpoints.save(self.run.step)

    def state(self) -> str:
        state = {"model": self.model.state_dict(), "opt": self.opt.state_dict()}
        return f"{self.run.step} {digest(*flatten(state, 'state')).hex()}"

    def close(self) -> None:
        del self._loop
        self.run.close()
