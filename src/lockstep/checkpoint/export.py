"""Export: a checkpoint's weights as one safetensors file, laid out as the format's own library does for a whole model."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import read_tensors
from lockstep.checkpoint.snapshot import memory_of, sheet_of
from lockstep.checkpoint.storage import Storage
from lockstep.comm.base import bits


def write_model(storage: Storage, folder: str, manifest: Manifest, target: Path) -> int:
    """Returns its bytes. Tied weights are there once; the other names stand in the metadata, as ``safetensors`` has it."""
    numbers = sorted(manifest.model.values())
    tensors = read_tensors(storage, folder, manifest, only=numbers)
    names = {number: name for name, number in manifest.model.items()}
    metadata = {"format": "pt", **manifest.aliases}
    file_plan = sheet_of(target.name, range(len(numbers)), [names[n] for n in numbers], [tensors[n] for n in numbers], metadata, 0)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with aside.open("xb") as file:
            file.write(file_plan.head)
            for at in file_plan.numbers:
                file.write(memory_of(bits(tensors[numbers[at]])))
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return len(file_plan.head) + file_plan.bytes
