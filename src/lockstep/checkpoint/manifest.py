"""Manifest: what a checkpoint holds, as JSON with a digest of itself. A checkpoint is whole where its manifest lies.

Everything that is read from it is checked before it is used: it may come from anybody.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.checkpoint.tensor_file import ITEM_BYTES, Damaged, count_bytes

NAME = "manifest.json"
INDEX = "model.safetensors.index.json"
FORMAT = "lockstep checkpoint 1"
_MOST_DIMENSIONS = 64
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class File:
    bytes: int
    head: int
    """How long its header is; the data begins there."""
    head_sha256: str


@dataclass(frozen=True)
class Stored:
    """One tensor: ``begin`` counts from the file's first byte."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    sum: str
    """checksum.py"""

    @property
    def bytes(self) -> int:
        return count_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    step: int
    made: str
    """When, in words."""
    workers: int
    torch: str
    settings: dict[str, Any]
    """What defines the arithmetic: lanes, seed, exact."""
    skeleton: Any
    """The run's state without its tensors (state.py); they are named by their numbers in ``tensors``."""
    model: dict[str, int]
    """The model's state dict: name -> number in ``tensors``."""
    aliases: dict[str, str]
    """Names of the state dict that are another name's tensor."""
    files: dict[str, File]
    tensors: tuple[Stored, ...]

    def to_json(self) -> bytes:
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """``Damaged`` where it is not as it was written."""
        try:
            body = json.loads(data)
            digest = body.pop("digest")
            if body.pop("format") != FORMAT:
                raise Damaged(f"{NAME} is of another format")
            if digest != _digest({"format": FORMAT, **body}):
                raise Damaged(f"{NAME} has another digest than it says")
            files = {str(name): File(**entry) for name, entry in body.pop("files").items()}
            tensors = tuple(Stored(**{**entry, "shape": tuple(entry["shape"])}) for entry in body.pop("tensors"))
            manifest = Manifest(files=files, tensors=tensors, **body)
            manifest._require_sense()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"{NAME} cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
        return manifest

    def _require_sense(self) -> None:
        """Every value is of its kind, and no number would allocate or seek beyond the files."""
        words = (self.made, self.torch, *self.model, *self.aliases, *self.aliases.values(), *(t.name for t in self.tensors))
        if not all(type(word) is str and word.isprintable() for word in words) or type(self.settings) is not dict:
            raise ValueError("something that must be text is not")
        for name, file in self.files.items():
            if not _FILE.fullmatch(name) or not _are_counts(file.bytes, file.head) or file.head > file.bytes:
                raise ValueError(f"file {name!r}")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES or len(tensor.shape) > _MOST_DIMENSIONS or not _are_counts(*tensor.shape):
                raise ValueError(f"tensor {tensor.name!r}")
            if math.prod(max(1, extent) for extent in tensor.shape) >= 1 << 60:
                raise ValueError(f"tensor {tensor.name!r} has too many elements")
            if not _are_counts(tensor.begin) or tensor.begin + tensor.bytes > self.files[tensor.file].bytes:
                raise ValueError(f"tensor {tensor.name!r} lies outside its file")
        if sum(tensor.bytes for tensor in self.tensors) > sum(file.bytes for file in self.files.values()):
            raise ValueError("its tensors have more bytes than its files")
        if not _are_counts(self.step, self.workers, *self.model.values()) or any(
            number >= len(self.tensors) for number in self.model.values()
        ):
            raise ValueError("a number")


def _are_counts(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
