"""A Comm for the workers of one machine: their buckets are in memory that all of them map.

A bucket of N workers is one segment with a counter per worker and stage, and every worker's copy of the buffer:

    | deposited 0..N-1 | reduced 0..N-1 | buffer of rank 0 | buffer of rank 1 | ...
                                          [s0|s1|s2|...]     [s0|s1|s2|...]

A worker copies its gradients once, into its own buffer ("deposits" them). When all workers have deposited, rank r adds slice r of
all buffers along a fixed tree and writes the total to all of them, in blocks that fit the cache. So each worker reads and writes
the bucket once, and the sum does not depend on timing. A rank touches another rank's buffer only between that rank's "deposited"
and its own "reduced", so the next deposit needs no further barrier. A reduction is a fold of one row per rank (comm/fold.py).

Nothing blocks in a hook: an operation is a generator that yields when it would block (comm/operation.py), and every later call into
the comm advances all operations. If cores are free (comm/free_cores.py), a helper thread advances the operations on shared buckets
instead, until the main thread waits (comm/helper_thread.py). Tensors that are not in a shared bucket travel through a *channel*
(comm/channel.py), in chunks; the main thread alone advances these operations.

The process descriptors of the other workers show a death within milliseconds; a worker that hangs is found by timeout
(comm/peer_health.py). Every generation has its own segments: a worker that wakes up after the others have formed a new generation
has none of the new segments mapped.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending, bits
from lockstep.comm.blame import name_ranks
from lockstep.comm.channel import SLOT_BYTES, Channel
from lockstep.comm.counters import PlainCounters, counters_for
from lockstep.comm.fold import BLOCK_BYTES, Block, check_fold, fold_values, reduction, rows_of, values_of
from lockstep.comm.free_cores import cores_are_free
from lockstep.comm.helper_thread import HelperThread
from lockstep.comm.operation import Operation, OpGenerator
from lockstep.comm.peer_health import PeerHealth, PeerProcesses
from lockstep.comm.segment import Segment, SegmentError
from lockstep.comm.shared_bucket import SharedBucket
from lockstep.comm.store import await_ranks
from lockstep.errors import PeerError
from lockstep.plan.tree import Fold


class Shm:
    """The comm of workers that share this machine's memory. All ranks must construct it.

    Args:
        store: The store through which the ranks find each other.
        rank, size: This worker's number, and how many workers there are.
        timeout_s: How long a wait may take.
        need_bytes: Size of all buckets of one rank: whether they fit is found out now, not in the middle of training.
        counters: For tests; by default the fastest counters for this processor.
        health: The health of a larger comm that this comm is part of.
        place: Returns where the script is now, for error messages (``PeerHealth``).
        helper_thread: "on", "off" or "auto": on if each worker of this machine has a core for it. Ranks may differ.

    Raises:
        SegmentError: On every rank, if the ranks cannot share memory or the buckets do not fit.
        PeerError: A rank did not construct its comm within ``timeout_s``.
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
        health: PeerHealth | None = None,
        place: Callable[[], str] = lambda: "",
        helper_thread: str = "off",
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._counters = counters or counters_for()
        self._buckets: dict[int, SharedBucket] = {}
        self._in_flight: list[Operation] = []
        self._queue: deque[Operation] = deque()  # operations that use the channel: one at a time, in order
        self._oversubscribed = size > len(os.sched_getaffinity(0))
        self._warned = False
        await_ranks(store, rank, size, timeout_s)
        self._channel = Channel(store, rank, size, self._counters)
        self._processes = PeerProcesses(store, rank, size)
        self._helper = HelperThread(self._advance_in_flight, f"lockstep-fold-{rank}")
        self._helper_mode = helper_thread
        self.health = health or PeerHealth(store, rank, size, timeout_s, place)
        self.health.on_failure(_publish_abort(self._channel, rank))
        self.health.on_failure(self._helper.end)
        self._finalizer = weakref.finalize(self, _close, self.health, self._processes, self._helper)
        if need_bytes and (size > 1 or health is not None):  # ranks that share a health must count the same operations
            try:
                self._new_segment(size * need_bytes)  # freed at once
            except SegmentError:
                self.close()
                raise

    def averages(self, tensor: Tensor) -> bool:
        # In a large bucket memory bandwidth is the cost, so scaling while depositing is free; in a small one calls are the cost.
        return tensor.nbytes <= 4 * BLOCK_BYTES

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All ranks must call it: every rank maps every rank's buffer. If they do not fit, warns once, returns private memory."""
        if device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=device)
        try:
            segment = self._new_segment(SharedBucket.nbytes(self.size, numel, dtype, self._counters))
        except SegmentError as error:
            if not self._warned and self.rank == 0:
                self._warned = True
                warnings.warn(
                    f"a bucket does not fit into shared memory ({error.reason}); it travels in chunks, which is slower. "
                    "Give the container more memory, or choose a smaller bucket_mb.",
                    stacklevel=2,
                )
            return torch.zeros(numel, dtype=dtype)
        bucket = SharedBucket(segment, self.rank, self.size, numel, dtype, self._counters)
        self.barrier("the counters of a shared bucket")
        self._decide_on_helper()
        tensor = bucket.buffers[self.rank].view(-1)  # a new tensor object: when the user drops it, the bucket is dropped
        self._buckets[tensor.data_ptr()] = bucket
        weakref.finalize(tensor, self._buckets.pop, tensor.data_ptr(), None)
        return tensor

    def bucket_of(self, tensor: Tensor) -> SharedBucket | None:
        """The shared bucket of a tensor that ``buffer`` returned; None for any other tensor."""
        bucket = self._buckets.get(tensor.data_ptr()) if not tensor.is_cuda else None
        return bucket if bucket is not None and tensor.numel() == bucket.buffers[self.rank].numel() else None

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        scale = 1.0 / self.size if op == "mean" and self.size > 1 else None
        return self._issue_fold(tensor, None, scale, what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        check_fold(tensor, fold, self.size)
        return self._issue_fold(tensor, fold, scale, what)

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        number = self.health.begin(what)
        data = bits(tensor)

        def write(offset: int, slot: Tensor) -> None:
            if self.rank == source:
                slot.copy_(data[offset : offset + slot.numel()])

        def read(offset: int, length: int) -> None:
            if self.rank != source:
                data[offset : offset + length].copy_(self._channel.slots[source][:length])

        return self._enqueue(self._channel.exchange(f"broadcast from {source}: {what}", data.numel(), write, read), number, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        number = self.health.begin(what)
        data = bits(tensor)
        outputs = [bits(output[r]) for r in range(self.size)]

        def write(offset: int, slot: Tensor) -> None:
            slot.copy_(data[offset : offset + slot.numel()])

        def read(offset: int, length: int) -> None:
            for out, slot in zip(outputs, self._channel.slots, strict=True):
                out[offset : offset + length].copy_(slot[:length])

        return self._enqueue(self._channel.exchange(f"gather: {what}", data.numel(), write, read), number, what)

    def barrier(self, what: str = "a barrier") -> None:
        number = self.health.begin(what)
        body = self._channel.exchange(f"barrier: {what}", 0, lambda at, slot: None, lambda at, length: None)
        self._enqueue(body, number, what).wait()

    def await_device(self) -> None:
        """All results are on the host."""

    def progress(self) -> None:
        """Advance everything in flight without blocking, or let the helper thread do it."""
        if self._in_flight and self._helper.is_on:
            self._helper.wake()
        elif self._in_flight:
            self._advance_in_flight()
        self._advance_queue()

    def advance(self) -> bool:
        """``progress``, and whether an operation is still in flight."""
        self.progress()
        return bool(self._in_flight or self._queue)

    def start(self, body: OpGenerator, number: int, what: str) -> Operation:
        """Put an operation in flight that does not use the channel."""
        operation = Operation(self, body, number, what)
        self._in_flight.append(operation)
        if not self._helper.is_on:  # at the end of a backward a wait follows at once: no need to wake a thread
            self.progress()
        return operation

    def abort(self, reason: str) -> None:
        self.health.fail(PeerError(reason))

    def postpone_timeouts(self, until: float) -> None:
        self.health.postponed_until = until

    def link_us(self) -> int:
        return 0

    def close(self) -> None:
        self._finalizer()

    # -- operations --------------------------------------------------------------------------

    def _issue_fold(self, tensor: Tensor, fold: Fold | None, scale: float | None, what: str) -> Pending:
        """A fold, or a reduction if ``fold`` is None."""
        number = self.health.begin(what)
        bucket = self.bucket_of(tensor)
        if bucket is None:
            return self._enqueue(self._fold_through_channel(tensor, fold, scale, what), number, what)
        bucket.deposit()
        return self.start(self._fold_bucket(bucket, fold, scale), number, what)

    def _fold_bucket(self, bucket: SharedBucket, fold: Fold | None, scale: float | None) -> OpGenerator:
        while not bucket.is_deposited():
            yield
        yield from self.run_blocks(bucket.blocks(fold), scale)
        bucket.publish_reduced()
        while not bucket.is_reduced():
            yield

    def run_blocks(self, blocks: Sequence[Block], scale: float | None) -> OpGenerator:
        """Run ``blocks``. Yields only in the helper thread, when the main thread takes over."""
        for block in blocks:
            block.run(scale)
            if self._helper.must_stop:
                yield

    def _fold_through_channel(self, tensor: Tensor, fold: Fold | None, scale: float | None, what: str) -> OpGenerator:
        """Every rank reads some columns of all ranks' rows and runs the whole tree on them."""
        plan = fold or reduction(self.size)
        rows, count = rows_of(tensor, plan.width), len(plan.held[self.rank])
        overwritten = {plan.root, *(to for to, _ in plan.adds)}
        column_bytes = plan.width * rows.element_size()

        def columns(offset: int, length: int) -> slice:
            return slice(offset // column_bytes, (offset + length) // column_bytes)

        def write(offset: int, slot: Tensor) -> None:
            rows_of(slot.view(rows.dtype), plan.width)[:count].copy_(rows[:count, columns(offset, slot.numel())])

        def read(offset: int, length: int) -> None:
            everyone = [rows_of(slot[:length].view(rows.dtype), plan.width) for slot in self._channel.slots]
            values = [value.clone() if i in overwritten else value for i, value in enumerate(values_of(everyone, plan))]
            total = torch.empty_like(everyone[0][0])
            fold_values(values, fold, scale, [total])
            rows[0, columns(offset, length)].copy_(total)

        kind = f"{'reduce' if fold is None else 'fold'} of {plan.width} x {rows.dtype}: {what}"
        chunk_bytes = max(1, SLOT_BYTES // column_bytes) * column_bytes
        return self._channel.exchange(kind, rows.nbytes, write, read, chunk_bytes)

    def _enqueue(self, body: OpGenerator, number: int, what: str) -> Operation:
        operation = Operation(self, body, number, what)
        self._queue.append(operation)
        self.progress()
        return operation

    def _advance_in_flight(self) -> bool:
        """Advance the operations that do not use the channel; whether any is still in flight. In one thread at a time."""
        for operation in list(self._in_flight):
            if operation.advance():
                self._in_flight.remove(operation)
            if self._helper.must_stop:
                break
        return bool(self._in_flight)

    def _advance_queue(self) -> None:
        while self._queue and self._queue[0].advance():
            self._queue.popleft()

    def _advance_here(self) -> None:
        """Advance everything in the main thread, which has taken over from the helper thread."""
        self._advance_in_flight()
        self._advance_queue()

    def _decide_on_helper(self) -> None:
        """Called for every bucket, decides at the first one: by then the script has set its number of threads."""
        if self._helper_mode == "auto":
            self._helper_mode = "on" if cores_are_free(self._processes.ids, torch.get_num_threads()) else "off"
        if self._helper_mode == "on" and not self._helper.is_on:
            self._helper.start()

    def _new_segment(self, nbytes: int) -> Segment:
        """Rank 0 creates a segment, the others open it. Raises ``SegmentError`` on every rank if one of them cannot."""
        segment, reason = None, ""
        if self.rank == 0:
            try:
                segment = Segment.create(nbytes)
            except SegmentError as error:
                reason = error.reason
        address = self._broadcast_text(segment.address if segment is not None else "", "the address of a shared segment")
        if self.rank != 0 and address:
            try:
                segment = Segment.open(address, nbytes)
            except SegmentError as error:
                reason = error.reason
        answers = torch.zeros(self.size, 1, dtype=torch.int64)
        self.all_gather(answers, torch.tensor([int(segment is not None)]), "its answer about a shared segment").wait()
        if segment is None or not bool(answers.all()):
            raise SegmentError(reason or "another worker could not map it")
        segment.close_descriptor()
        return segment

    def _broadcast_text(self, text: str, what: str) -> str:
        """The text of rank 0, of at most 256 bytes."""
        data = torch.zeros(256, dtype=torch.uint8)
        data[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        self.broadcast(data, 0, what).wait()
        return bytes(data.tolist()).rstrip(b"\0").decode()

    # -- waiting -----------------------------------------------------------------------------

    def wait_for(self, operation: Operation, timeout_s: float | None) -> None:
        """Spin at first, then yield the core, then sleep; check for aborts, deaths and the timeout every 5 ms."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        began = checked_at = time.monotonic()
        polls = 0
        self._helper.take_over()
        while not operation.done():
            self._advance_here()
            if operation.done():
                return
            polls += 1
            if polls > (0 if self._oversubscribed else 64):
                os.sched_yield()
            if polls < 256:
                continue
            now = time.monotonic()
            if now - began > 0.002:
                time.sleep(min(0.0005, (now - began) / 20))
            self.health.raise_if_failed()
            if now - checked_at > 0.005:
                checked_at = now
                self._check_peers(operation, now - began, self.health.time_left_s(began, limit_s))

    def _check_peers(self, operation: Operation, waited_s: float, left_s: float) -> None:
        """Raise ``PeerError`` if another worker aborted or died, or if the timeout has passed; compare calls in a long wait."""
        cause = "another worker aborted" if max(self._channel.aborted.read()) else ""
        dead = [] if cause else self._processes.dead()
        if dead:
            self._advance_here()  # a worker may end as soon as it has done its part of the last operation
            if operation.done():
                return
            cause = f"the process of {name_ranks(dead)} has ended"
        if cause or left_s < 0:
            raise self.health.explain(operation.number, operation.what, waited_s, cause)
        self.health.compare_calls(operation.number, waited_s)


def _publish_abort(channel: Channel, rank: int) -> Callable[[], None]:
    """Tells the other workers that this comm failed. The thread of ``PeerHealth`` must not keep the comm alive."""
    aborted = channel.aborted
    return lambda: aborted.publish(rank, 1)


def _close(health: PeerHealth, processes: PeerProcesses, helper: HelperThread) -> None:
    helper.close()
    health.close()
    processes.close()
