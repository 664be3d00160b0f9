"""TensorBoard: event files, written with the record format and the messages of the package tensorboard, without torch."""

from __future__ import annotations

import functools
import io
import itertools
import os
import struct
import time
from pathlib import Path
from typing import Any

from lockstep.observe.tracker_files import claim

_HEADER_BYTES = 12  # the length of the record (8 bytes) and its checksum
_FOOTER_BYTES = 4  # the checksum of the record
_CHECKED_BYTES = 1 << 21
"""Of the end of a file: there all checksums are computed, by the package tensorboard, in Python."""


class TensorBoard:
    """Writes logged values as scalars to an event file. TensorBoard's scalars have 32 bits.

    One event has all values of a step, and one file has all events of a run: a worker that becomes rank 0 continues the file.

    Args:
        folder: The folder of the event file, below the one that ``tensorboard --logdir`` gets. Default: ``tensorboard`` in the
            folder of the run's curves.

    Example:
        >>> run = lockstep.Run(model, opt, track=[lockstep.track.TensorBoard("runs/small")])
    """

    name = "tensorboard"
    is_local = True
    packages = ("tensorboard",)

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._given = None if folder is None else Path(folder).absolute()
        self._file = self._claim = -1
        self._last = 0
        self._pending = io.BytesIO()

    @property
    def place(self) -> str | None:
        """Where it writes, to compare trackers. None: the default."""
        return None if self._given is None else os.path.realpath(self._given)

    def open(self, run_id: str, folder: Path) -> None:
        self.close()
        target = self._given or folder / "tensorboard"
        self._claim = claim(target / ".lockstep.run", run_id, lambda: _put_aside(target, run_id), target.name)
        found = _events(target)
        path = found[-1] if found else target / f"events.out.tfevents.{time.time():010.0f}.lockstep"
        self._pending, self._last = io.BytesIO(), 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._repair(path.read_bytes())

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=_to_float32(value)) for name, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        data = self._pending.getvalue()
        self._pending = io.BytesIO()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        for file in (self._file, self._claim):
            if file >= 0:
                os.close(file)
        self._file = self._claim = -1

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._pending).write(event.SerializeToString())

    def _repair(self, content: bytes) -> None:
        """Find the last step, and cut off all from the first damaged record on. An empty file gets the version of the format.

        The last record was written in part if a worker was killed. If a machine has lost power, the end may be filled with zeros.
        TensorBoard reads up to the first damaged record.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        records = _whole_records(content)
        end = records[-1][0] if records else 0
        self._last = max((Event.FromString(record).step for _, record in records), default=0)
        if end < len(content):
            os.ftruncate(self._file, end)
        if end == 0:
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.flush()


def _events(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*.lockstep"))


def _put_aside(folder: Path, run_id: str) -> None:
    """Move the event files of an earlier run, and nothing else, to ``earlier-1``: TensorBoard shows it as a run of its own."""
    before = folder.with_name(f".{folder.name}.run")  # where earlier versions have put the owner
    if not _events(folder) or (before.is_file() and before.read_text() == run_id):
        return
    names = (folder / f"earlier-{number}" for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for path in _events(folder):
        path.rename(aside / path.name)


def _whole_records(content: bytes) -> list[tuple[int, bytes]]:
    """Return the records before the first damaged one, and where each ends. Pure.

    A header with a wrong length is found anywhere. The checksum of a record takes long, so it is computed near the end alone: the
    file grows there.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    checksum_of_length = functools.lru_cache(masked_crc32c)  # most records have the length of others
    found, begin = [], 0
    while begin + _HEADER_BYTES <= len(content):
        length, length_checksum = struct.unpack_from("<QI", content, begin)
        end = begin + _HEADER_BYTES + length + _FOOTER_BYTES
        if end > len(content) or checksum_of_length(content[begin : begin + 8]) != length_checksum:
            break
        record = content[begin + _HEADER_BYTES : end - _FOOTER_BYTES]
        (checksum,) = struct.unpack_from("<I", content, end - _FOOTER_BYTES)
        if end > len(content) - _CHECKED_BYTES and masked_crc32c(record) != checksum:
            break
        found.append((end, record))
        begin = end
    return found


def _to_float32(value: float) -> float:
    """Return ``value``, or an infinity if it is too large for 32 bits: protobuf would raise an error."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return float(rounded)
