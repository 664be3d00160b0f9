"""The channel between workers of one machine: a segment with a slot per worker, through which any bytes travel in chunks.

    | written 0..N-1 | read 0..N-1 | aborted 0..N-1 | tags | slot of rank 0 | slot of rank 1 | ...

A worker fills its slot when all workers have read the chunk before, and reads all slots when all workers have filled theirs.
Operations use the channel one at a time, in the order in which they were issued. The tags detect ranks at different operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.blame import DifferentCalls
from lockstep.comm.counters import PlainCounters
from lockstep.comm.operation import OpGenerator, tag_of
from lockstep.comm.segment import Segment, SegmentError
from lockstep.comm.shared_bucket import PAGE_BYTES, round_up

SLOT_BYTES = 1 << 20


class Channel:
    """All ranks must construct it. If one rank cannot share memory, every rank raises the same ``SegmentError``."""

    def __init__(self, store: dist.Store, rank: int, size: int, counters: type[PlainCounters]) -> None:
        head = counters.nbytes(size)
        start = round_up(3 * head + 8 * size, PAGE_BYTES)
        segment = _share_segment(store, rank, size, start + size * SLOT_BYTES)
        is_first = rank == 0
        self._rank = rank
        self._written, self._read, self.aborted = (counters(segment.memory, k * head, size, is_first) for k in range(3))
        self.slots = [
            torch.frombuffer(segment.memory, dtype=torch.uint8, count=SLOT_BYTES, offset=start + r * SLOT_BYTES)
            for r in range(size)
        ]
        self._tags = memoryview(segment.memory).cast("q")[3 * head // 8 : 3 * head // 8 + size]
        self._chunk = 0
        if is_first:
            store.set("channel/ready", "1")  # the counters are initialised
        store.wait(["channel/ready"])

    def exchange(
        self,
        what: str,
        nbytes: int,
        write: Callable[[int, Tensor], None],
        read: Callable[[int, int], None],
        chunk_bytes: int = SLOT_BYTES,
    ) -> OpGenerator:
        """For each chunk, ``write(offset, slot)`` fills this rank's slot, then ``read(offset, length)`` may read all slots.

        Raises ``DifferentCalls`` if ``what`` (kind and name of the operation) or ``nbytes`` differ between the ranks, before
        anything is read.
        """
        tag = tag_of(what, nbytes)
        for offset in range(0, max(1, nbytes), chunk_bytes):
            self._chunk += 1
            chunk = self._chunk
            while not self._read.reached(chunk - 1):
                yield
            length = min(chunk_bytes, nbytes - offset)
            write(offset, self.slots[self._rank][:length])
            self._tags[self._rank] = tag
            self._written.publish(self._rank, chunk)
            while not self._written.reached(chunk):
                yield
            if any(other != tag for other in self._tags.tolist()):
                raise DifferentCalls("the ranks called different operations, or passed tensors of different sizes")
            read(offset, length)
            self._read.publish(self._rank, chunk)


def _share_segment(store: dist.Store, rank: int, size: int, nbytes: int) -> Segment:
    """Map the first segment of this machine, found through the store. If one rank cannot, every rank raises ``SegmentError``."""
    segment, answer = None, "ok"
    try:
        if rank == 0:
            segment = Segment.create(nbytes)
            store.set("channel/address", segment.address)
        else:
            address = store.get("channel/address").decode()
            if not address:
                raise SegmentError("rank 0 could not create it")
            segment = Segment.open(address, nbytes)
    except SegmentError as error:
        answer = error.reason
        if rank == 0:
            store.set("channel/address", "")
    store.set(f"channel/answer/{rank}", answer)
    answers = [store.get(f"channel/answer/{r}").decode() for r in range(size)]
    failures = [a for a in answers if a != "ok"]
    if failures or segment is None:
        raise SegmentError(failures[0])
    segment.close_descriptor()
    return segment
