"""Manifest: what a checkpoint holds, as JSON with a digest of itself. A folder with a manifest is a complete checkpoint.

Every value that is read from a manifest is checked before it is used, because anybody may have written the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.checkpoint.tensor_file import ITEM_BYTES, MAX_HEADER_BYTES, DamagedCheckpointError, count_bytes
from lockstep.errors import UsageError

NAME = "manifest.json"
INDEX = "model.safetensors.index.json"
FORMAT = "lockstep checkpoint 1"
MAX_BYTES = 64 << 20
"""A longer file is damage. It has about 500 bytes for each tensor."""
_MAX_DIMENSIONS = 64
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint. The data begins after the header, which has ``head`` bytes."""

    bytes: int
    head: int
    head_sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: ``begin`` counts from the first byte of the file, ``sum`` is its checksum (checksum.py)."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    sum: str

    @property
    def bytes(self) -> int:
        return count_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    """The fields are those of the file, ``manifest.json``."""

    step: int
    made: str
    """The date and time at which the checkpoint was written, for people."""
    workers: int
    torch: str
    settings: dict[str, Any]
    """The settings that determine the result of the run: lanes, seed, exact, reduce_dtype."""
    skeleton: Any
    """The state of the run without its tensors (comm/plain_state.py), which stand there as numbers in ``tensors``."""
    model: dict[str, int]
    """The model's state dict: name -> number in ``tensors``."""
    aliases: dict[str, str]
    """Names in the model's state dict whose tensor is stored under another name (tied weights): name -> the other name."""
    files: dict[str, StoredFile]
    tensors: tuple[StoredTensor, ...]
    run: str = ""
    """The id of the run: random, made when the run began, and kept when it is resumed."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """The hyperparameters in the script (hyperparameters.py) with which the run began, or was resumed with ``override``."""

    def to_json(self) -> bytes:
        body = {"format": FORMAT, **asdict(self)}
        data = json.dumps({**body, "digest": _digest(body)}, indent=1).encode()
        if len(data) > MAX_BYTES:
            raise UsageError(f"the state has too many parts: {NAME} would have {len(data)} bytes, and {MAX_BYTES} are the limit")
        return data

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Raises ``DamagedCheckpointError`` if ``data`` is not what was written, or its values cannot be true."""
        try:
            body = json.loads(data)
            digest = body.pop("digest")
            if body.pop("format") != FORMAT:
                raise DamagedCheckpointError(f"{NAME} has an unknown format")
            if digest != _digest({"format": FORMAT, **body}):
                raise DamagedCheckpointError(f"{NAME} does not match its digest")
            files = {str(name): StoredFile(**entry) for name, entry in body.pop("files").items()}
            tensors = tuple(StoredTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in body.pop("tensors"))
            manifest = Manifest(files=files, tensors=tensors, **body)
            manifest._validate()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{NAME} cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
        return manifest

    def _validate(self) -> None:
        """Check that every value has its type, and that no number allocates or reads beyond the files."""
        words = (
            self.made,
            self.torch,
            self.run,
            *self.model,
            *self.aliases,
            *self.aliases.values(),
            *(t.name for t in self.tensors),
        )
        if not all(type(word) is str and word.isprintable() for word in words) or not all(
            type(table) is dict for table in (self.settings, self.hyperparameters)
        ):
            raise ValueError("a name or a text is not printable text")
        for name, file in self.files.items():
            if not _FILE.fullmatch(name) or not _are_counts(file.bytes, file.head) or file.head > min(file.bytes, MAX_HEADER_BYTES):
                raise ValueError(f"file {name!r} has an impossible name or size")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES or len(tensor.shape) > _MAX_DIMENSIONS or not _are_counts(*tensor.shape):
                raise ValueError(f"tensor {tensor.name!r} has an impossible dtype or shape")
            if math.prod(max(1, extent) for extent in tensor.shape) >= 1 << 60:
                raise ValueError(f"tensor {tensor.name!r} has too many elements")
            if not _are_counts(tensor.begin) or tensor.begin + tensor.bytes > self.files[tensor.file].bytes:
                raise ValueError(f"tensor {tensor.name!r} is outside its file")
        if sum(tensor.bytes for tensor in self.tensors) > sum(file.bytes for file in self.files.values()):
            raise ValueError("the tensors have more bytes than the files")
        if not _are_counts(self.step, self.workers, *self.model.values()) or any(
            number >= len(self.tensors) for number in self.model.values()
        ):
            raise ValueError("the step, the number of workers or a tensor's number is impossible")


def _are_counts(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
