"""A Comm for workers of one machine: their buckets lie in memory that all of them map.

A bucket of N workers is one segment with a counter line per worker and phase, and every worker's
copy of the buffer:

    | deposited 0..N-1 | reduced 0..N-1 | buffer of rank 0 | buffer of rank 1 | ...
                                          [s0|s1|s2|...]     [s0|s1|s2|...]

Depositing a gradient into one's own buffer is the only copy in. When all have deposited, rank r
adds slice r of all buffers (in rank order, so the sum never depends on timing) and writes it back
to all of them, in blocks that fit the cache. Per worker that reads and writes the bucket once. A
rank touches another's buffer only between that one's "deposited" and its own "reduced", so the
next deposit needs no further barrier.

Nothing blocks in a hook: an operation is a generator that gives up where it would wait, and every
later call into the comm lets all of them go on. Tensors that do not lie in a shared bucket travel
through a *channel* (comm/channel.py), chunk by chunk. A fold works on a bucket of several rows: rank
r runs the tree on slice r of all of them, in place, and writes the total to all first rows.

Death is seen from the process descriptors of the others within milliseconds; who stands still is
found by timeout (comm/watch.py). A generation's segments are its own: a worker that wakes up after
the others left has nothing of theirs mapped.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending, bits, real
from lockstep.comm.channel import SLOT_BYTES, Channel
from lockstep.comm.counters import PlainCounters, counters_for
from lockstep.comm.fold import BLOCK_BYTES, check_fold, fold_here, rows_of, values_of
from lockstep.comm.operation import Operation, Steps
from lockstep.comm.peer_health import PeerHealth
from lockstep.comm.peers import Peers
from lockstep.comm.segment import Segment, SegmentError
from lockstep.comm.shared_bucket import SharedBucket, combine, sum_into
from lockstep.comm.store import await_ranks
from lockstep.errors import PeerError
from lockstep.plan.tree import Fold


class Shm:
    """Workers that share this machine's memory. All ranks must construct it; see ``TorchGroup`` for the arguments.

    Raises ``SegmentError`` on every rank alike where they cannot share memory, or where buckets of
    ``need_bytes`` per rank would not fit. ``guard``: the health of a larger comm this one is part of.
    """

    name = "shm"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float = 600.0,
        need_bytes: int = 0,
        counters: type[PlainCounters] | None = None,
        guard: PeerHealth | None = None,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._counters = counters or counters_for()
        self._rooms: dict[int, SharedBucket] = {}
        self._running: list[Operation] = []
        self._queue: deque[Operation] = deque()  # operations that use the channel: one at a time, in order
        self._crowded = size > len(os.sched_getaffinity(0))
        self._warned = False
        await_ranks(store, rank, size, timeout_s)
        self._channel = Channel(store, rank, size, self._counters)
        self._peers = Peers(store, rank, size)
        aborted = self._channel.aborted  # the guard's thread must not keep this comm alive
        self.flag_abort: Callable[[], None] = lambda: aborted.publish(rank, 1)
        self._guard = guard or PeerHealth(store, rank, size, self.flag_abort)
        self._finalizer = weakref.finalize(self, _shut, self._guard, self._peers)
        if need_bytes and size > 1:
            try:
                self._new_segment(size * need_bytes)  # found out now, not in mid-training; given back at once
            except SegmentError:
                self.close()
                raise

    # -- the protocol ------------------------------------------------------------------------

    def averages(self, tensor: Tensor) -> bool:
        # Scaling while depositing is free where memory is what costs; in a small bucket calls are what costs.
        return tensor.nbytes <= 4 * BLOCK_BYTES

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Collective: every rank maps every rank's buffer. Private memory (and the channel) where there is no room."""
        if device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=device)
        nbytes = SharedBucket.nbytes(self.size, numel, dtype, self._counters)
        try:
            segment = self._new_segment(nbytes)
        except SegmentError as error:
            if not self._warned and self.rank == 0:
                self._warned = True
                warnings.warn(
                    f"a bucket does not fit into shared memory ({error.reason}); it travels in pieces, slower.", stacklevel=2
                )
            return torch.zeros(numel, dtype=dtype)
        room = SharedBucket(segment, self.rank, self.size, numel, dtype, self._counters)
        self.barrier("a shared bucket's counters")
        tensor = room.buffers[self.rank].view(-1)  # another object, whose end is the room's end
        self._rooms[tensor.data_ptr()] = room
        weakref.finalize(tensor, self._rooms.pop, tensor.data_ptr(), None)
        return tensor

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        count = self._guard.enter(what)
        room = self.room_of(tensor)
        if room is None:
            return self._enqueue(self._reduce_foreign(tensor, op), count, what)
        return self.start(self._reduce_room(room, op), count, what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        count = self._guard.enter(what)
        check_fold(tensor, fold, self.size)
        room = self.room_of(tensor)
        if room is None:
            return self._enqueue(self._fold_foreign(tensor, fold, scale), count, what)
        return self.start(self._fold_room(room, fold, scale), count, what)

    def room_of(self, tensor: Tensor) -> SharedBucket | None:
        """The shared bucket that this tensor is, or None."""
        room = self._rooms.get(tensor.data_ptr()) if not tensor.is_cuda else None
        return room if room is not None and tensor.numel() == room.buffers[self.rank].numel() else None

    def start(self, steps: Steps, count: int, what: str) -> Pending:
        """Run ``steps`` as far as they go; the rest happens in later calls."""
        running = Operation(self, steps, count, what)
        self._running.append(running)
        self.progress()
        return running

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        count = self._guard.enter(what)
        data = bits(tensor)

        def write(offset: int, slot: Tensor) -> None:
            if self.rank == source:
                slot.copy_(data[offset : offset + slot.numel()])

        def read(offset: int, length: int) -> None:
            if self.rank != source:
                data[offset : offset + length].copy_(self._channel.slots[source][:length])

        return self._enqueue(self._channel.exchange(f"broadcast from {source}", data.numel(), write, read), count, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        count = self._guard.enter(what)
        data = bits(tensor)
        outputs = [bits(output[r]) for r in range(self.size)]

        def read(offset: int, length: int) -> None:
            for out, slot in zip(outputs, self._channel.slots, strict=True):
                out[offset : offset + length].copy_(slot[:length])

        return self._enqueue(
            self._channel.exchange("gather", data.numel(), lambda at, slot: _fill(slot, data, at), read), count, what
        )

    def barrier(self, what: str = "a barrier") -> None:
        count = self._guard.enter(what)
        self._enqueue(self._channel.exchange("barrier", 0, lambda at, slot: None, lambda at, length: None), count, what).wait()

    def progress(self) -> None:
        """Let everything in flight go on as far as it can without waiting."""
        if self._running:
            self._running = [running for running in self._running if not running.go_on()]
        while self._queue and self._queue[0].go_on():
            self._queue.popleft()

    def go_on(self) -> bool:
        """``progress``, and whether something is still in flight."""
        self.progress()
        return bool(self._running or self._queue)

    def abort(self, reason: str) -> None:
        self._guard.fail(PeerError(reason))

    def close(self) -> None:
        self._finalizer()

    # -- operations --------------------------------------------------------------------------

    def _reduce_room(self, room: SharedBucket, op: Op) -> Steps:
        epoch = room.deposit()
        while not room.deposited.reached(epoch):
            yield
        scale = 1.0 / self.size if op == "mean" and self.size > 1 else None
        for block in room.blocks:
            combine(block, op, scale)
        room.reduced.publish(self.rank, epoch)
        while not room.reduced.reached(epoch):
            yield

    def _reduce_foreign(self, tensor: Tensor, op: Op) -> Steps:
        """Any tensor: everybody reads everybody's chunk and adds them in rank order."""
        wire = real(tensor).reshape(-1)
        data = bits(wire)
        scale = 1.0 / self.size if op == "mean" else None

        def read(offset: int, length: int) -> None:
            parts = [slot[:length].view(wire.dtype) for slot in self._channel.slots]
            at = offset // wire.element_size()
            sum_into(wire[at : at + parts[0].numel()], parts, op, scale)

        return self._channel.exchange(f"{op} of {wire.dtype}", data.numel(), lambda at, slot: _fill(slot, data, at), read)

    def _fold_room(self, room: SharedBucket, fold: Fold, scale: float | None) -> Steps:
        epoch = room.deposit()
        while not room.deposited.reached(epoch):
            yield
        for block in room.fold_blocks(fold):
            block.run(scale)
        room.reduced.publish(self.rank, epoch)
        while not room.reduced.reached(epoch):
            yield

    def _fold_foreign(self, tensor: Tensor, fold: Fold, scale: float | None) -> Steps:
        """Any tensor: everybody reads some columns of everybody's rows and runs the whole tree on them."""
        rows, held = rows_of(tensor, fold.width), len(fold.held[self.rank])
        column_bytes = fold.width * rows.element_size()

        def columns(offset: int, length: int) -> slice:
            return slice(offset // column_bytes, (offset + length) // column_bytes)

        def write(offset: int, slot: Tensor) -> None:
            rows_of(slot.view(rows.dtype), fold.width)[:held].copy_(rows[:held, columns(offset, slot.numel())])

        def read(offset: int, length: int) -> None:
            everyone = [rows_of(slot[:length].view(rows.dtype), fold.width) for slot in self._channel.slots]
            total = torch.empty_like(everyone[0][0])
            fold_here([value.clone() for value in values_of(everyone, fold)], fold, scale, [total])
            rows[0, columns(offset, length)].copy_(total)

        step_bytes = max(1, SLOT_BYTES // column_bytes) * column_bytes
        return self._channel.exchange(f"fold of {fold.width} x {rows.dtype}", rows.nbytes, write, read, step_bytes)

    def _enqueue(self, steps: Steps, count: int, what: str) -> Operation:
        running = Operation(self, steps, count, what)
        self._queue.append(running)
        self.progress()
        return running

    def _new_segment(self, nbytes: int) -> Segment:
        """Rank 0 makes it, the others open it, all tell each other whether they could."""
        segment, reason = None, ""
        if self.rank == 0:
            try:
                segment = Segment.create(nbytes)
            except SegmentError as error:
                reason = error.reason
        address = self._tell(0, segment.address if segment is not None else "", "a segment's address")
        if self.rank != 0 and address:
            try:
                segment = Segment.open(address, nbytes)
            except SegmentError as error:
                reason = error.reason
        answers = torch.zeros(self.size, 1, dtype=torch.int64)
        self.all_gather(answers, torch.tensor([int(segment is not None)]), "who has the segment").wait()
        if segment is None or not bool(answers.all()):
            raise SegmentError(reason or "another worker could not map it")
        segment.seal()
        return segment

    def _tell(self, source: int, text: str, what: str) -> str:
        data = torch.zeros(256, dtype=torch.uint8)
        data[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        self.broadcast(data, source, what).wait()
        return bytes(data.tolist()).rstrip(b"\0").decode()

    # -- waiting -----------------------------------------------------------------------------

    def await_(self, running: Operation, timeout_s: float | None) -> None:
        """Spin a little, then let others have the core, then sleep; look for aborts, deaths and the clock."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        looks, looked_at = 0, began
        while not running.done():
            self.progress()
            if running.done():
                return
            looks += 1
            if looks > (0 if self._crowded else 64):
                os.sched_yield()
            if looks < 256:
                continue
            now = time.monotonic()
            if now - began > 0.002:
                time.sleep(min(0.0005, (now - began) / 20))
            if self._guard.error is not None:
                raise self._guard.again()
            if now - looked_at > 0.005:
                looked_at = now
                self._look_around(running, now - began, limit_s)

    def explain(self, running: Operation, error: RuntimeError) -> PeerError:
        return self._guard.explain(running.count, running.what, 0.0, str(error).splitlines()[0][:160])

    def _look_around(self, running: Operation, waited_s: float, limit_s: float) -> None:
        if max(self._channel.aborted.read()):
            raise self._guard.explain(running.count, running.what, waited_s, "another worker aborted")
        dead = self._peers.dead()
        if dead:
            raise self._guard.explain(
                running.count, running.what, waited_s, f"process of rank {', '.join(map(str, dead))} has ended"
            )
        if waited_s > limit_s:
            raise self._guard.explain(running.count, running.what, waited_s)


def _fill(slot: Tensor, data: Tensor, at: int) -> None:
    slot.copy_(data[at : at + slot.numel()])


def _shut(guard: PeerHealth, peers: Peers) -> None:
    guard.close()
    peers.close()
