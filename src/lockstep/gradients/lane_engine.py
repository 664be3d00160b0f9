"""LaneEngine: computes the averaged gradients of one model, lane by lane. Connects hooks, reducer, buffers and control word.

Knows nothing of data, optimizers or recovery. The caller says which lane comes next; autograd does the rest:

    start_phase -> start_lane -> [user: forward, backward] -> start_lane -> [...] -> AVERAGED -> confirm -> CONFIRMED

A *phase* is one pass over the lanes of a step, with one set of gradients. In a loop over ``run.shard`` a step has one phase, a lane
has one backward, and the backward of the last lane averages. In a loop over ``run.steps`` a step may have several phases and a lane
several backwards (``collects``): the loop calls ``end_lane`` and ``average``.

The engine is always in one ``EngineState``. A backward in a state that does not allow it raises UsageError.

Note: gradients inside a lane of run.steps
------------------------------------------
There, ``param.grad`` belongs to the user until the lane has ended: several backwards add up, clipping each lane or setting
``param.grad`` means what it says. So nothing is sent before the last lane has ended, unless the user gives up that freedom
(``overlap=True``): then each lane has one backward, and buckets leave while the last one runs, as in a loop over ``run.shard``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.autograd_hooks import AutogradHooks
from lockstep.gradients.control_word import (
    COUNTED,
    WEIGHED,
    ControlWord,
    Position,
    exchange_words,
    require_same_position,
    union,
)
from lockstep.gradients.engine_state import AFTER_BACKWARD, AVERAGED, EngineState, explain_backward
from lockstep.gradients.lane_buffers import LaneBuffers
from lockstep.gradients.lane_reducer import LaneReducer, LaneWeights, WeightedMicroBatch
from lockstep.gradients.module import HookedModule
from lockstep.gradients.replayed_gradients import ReplayedGradients
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import Fold, fold
from lockstep.recording.recorder import Recorder
from lockstep.recording.records import BACKWARD, BODY, CONFIRM, EXCHANGE, FORWARD, LANE, OPTIMIZER


@dataclass(frozen=True)
class EngineCallbacks:
    """What the engine asks of, and reports to, its owner. The defaults do nothing."""

    settings_hash: Callable[[], int] = lambda: 0
    """Returns the hash of the hyperparameters that must be equal on all ranks, and in all lanes of a step."""
    on_settings_differ: Callable[[int | None], None] = lambda rank: None
    """Called on a mismatch, with the first rank that differs from rank 0 (None if the hash changed between lanes of this worker).

    All ranks are called with the same rank.
    """
    before_send: Callable[[], None] = lambda: None
    """Called in the last lane, before anything of it is sent."""
    on_averaged: Callable[[], None] = lambda: None
    """Called when the averaged gradients of the step are set."""
    on_peer_lost: Callable[[PeerError], None] | None = None
    """Called when a peer was lost in backward or in ``confirm``; it confirms or discards the step. None: the error is raised."""
    share_logged: Callable[[Comm], None] = lambda comm: comm.barrier("what was logged")
    """Called on all ranks when this rank has the averages. It returns when this rank has what every rank has logged."""
    requests: Callable[[], int] = lambda: 0
    """Returns the request bits that this worker sends with the step (control_word.py)."""


_NO_CALLBACKS = EngineCallbacks()


class LaneEngine:
    """Averages the gradients and buffers of ``module`` over ``lanes`` lanes on the ranks of ``comm``.

    All ranks must construct it with equal arguments. ``my_lanes`` are this worker's lanes [first, last). ``requests_of_all``
    holds the request bits of every worker, by rank, of the last averaged step: they are equal on all workers. ``total_weight`` is
    the weight of all lanes of that step.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        lanes: int,
        *,
        exact: bool = True,
        bucket_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
        callbacks: EngineCallbacks = _NO_CALLBACKS,
        recorder: Recorder | None = None,
    ) -> None:
        self.comm, self.lanes, self._callbacks = comm, lanes, callbacks
        self._recorder = recorder or Recorder()
        self._model = HookedModule(module)
        self._model.buffers.require_dense()
        self.named, self.params, self.buffers = self._model.named, self._model.params, self._model.buffers
        self.param_names = self._model.names
        fold = self._assign_lanes()
        self._reducer = LaneReducer(
            self.params,
            self._model.names,
            comm,
            fold,
            int(bucket_mb * (1 << 20)),
            self._model.sparse,
            exact,
            reduce_dtype,
            self._recorder,
        )
        self._lane_buffers = LaneBuffers(self.buffers, comm, fold)
        self.state = EngineState.IDLE
        self.requests_of_all: tuple[int, ...] = ()
        self.total_weight = 0.0
        self.backwards_begun = 0  # in all lanes so far
        self._peer_error: PeerError | None = None
        self._collects, self.step, self._position = False, -1, (0, 0, 0, 0)
        self._report = b""  # the mask of the parameters that report their gradients at once
        self._sends_early = True  # whether buckets leave during the last backward
        self._replayed = ReplayedGradients(self.params)
        self._earlier: dict[int, Tensor] = {}  # parameter -> its gradient from the phases of this step before
        self._hooks = AutogradHooks(self.params, self._begin, self._ready, self._end)
        self._model.hook(self._hooks)

    def _assign_lanes(self) -> Fold:
        assignment = assign_lanes(self.lanes, self.comm.size)
        self.my_lanes = assignment[self.comm.rank]
        self._most_lanes = max(last - first for first, last in assignment)
        return fold(self.lanes, assignment)

    def rebind(self, comm: Comm) -> None:
        """Continue with another generation of workers, and assign lanes again. Collective. Drops an unfinished step."""
        self.comm = comm
        fold = self._assign_lanes()
        self._reducer.rebind(comm, fold)
        self._lane_buffers.rebind(comm, fold)

    def close(self) -> None:
        """Unhook the model. May be called twice."""
        self._hooks.remove()
        self._model.unhook()

    # -- the model ---------------------------------------------------------------------------

    def trainable(self) -> list[str]:
        """Returns the names of the parameters that require gradients now."""
        return [name for name, param in self.named if param.requires_grad]

    def require_unchanged(self) -> None:
        """Raises UsageError if the model does not have the parameters and buffers that it had when it was hooked."""
        self._model.require_unchanged()

    def buffer_fingerprints(self) -> list[list[str]]:
        """Returns rows (kind, name, hash) with which ranks compare their buffers at the beginning of a step."""
        return self._lane_buffers.fingerprints()

    def untouched_buffers(self) -> AbstractContextManager[None]:
        """A context manager: when it ends, the buffers have the values they had at its beginning."""
        return self.buffers.preserved()

    # -- called by the training loop ---------------------------------------------------------

    def start_phase(
        self,
        step: int,
        counts: Sequence[int],
        position: Position = (0, 0, 0, 0),
        *,
        collects: bool = False,
        overlap: bool = True,
    ) -> None:
        """A phase of a step begins, possibly again.

        Args:
            step: The step.
            counts: The number of samples of every lane of the run.
            position: (stage of the loop, epoch, index in the epoch, phase), which must be equal on all ranks.
            collects: Whether ``end_lane`` and ``average`` will be called. Then a lane that is not started counts for nothing.
            overlap: Whether a lane has one backward at most, so that buckets can leave while the last one runs.
        """
        if (step, position) != (self.step, self._position):
            self._keep_gradients(is_first=position[3] == 0)
        self.step, self._position, self._collects, self._sends_early = step, position, collects, overlap
        self._weights = LaneWeights(counts, self.my_lanes)
        self._settings_hash: int | None = None
        self._reducer.start_phase(step)
        self._lane_buffers.start_phase(step)
        self.requests_of_all = ()
        self._is_last = False
        self._lanes_run: set[int] = set()
        self.state = EngineState.IDLE

    def _keep_gradients(self, is_first: bool) -> None:
        """Keep the gradients of earlier phases of this step: this phase adds to them, as a second backward does without Run."""
        found = () if is_first else ((i, param.grad) for i, param in enumerate(self.params))
        self._earlier = {i: grad.clone() for i, grad in found if grad is not None}  # a bucket's memory is used again

    def _add_earlier_gradients(self) -> None:
        for i, earlier in self._earlier.items():
            grad = self.params[i].grad
            self.params[i].grad = earlier.clone() if grad is None else earlier + grad  # the phase may yet be repeated

    def start_lane(self, lane: int, is_last: bool) -> None:
        """The loop body runs next on lane ``lane``. ``is_last``: it is this worker's last lane with samples in this phase."""
        if self.state is not EngineState.IDLE:
            self._lane_buffers.restore()
        self._lane, self._is_last, self._backwards = lane, is_last, 0
        self._lanes_run.add(lane)
        self._replayed.start_lane()
        for param in self.params:
            param.grad = None
        self.state = EngineState.LANE

    def skip_lane(self, lane: int) -> None:
        """Let a lane of this worker count for nothing. Called before its ``start_lane``, if it is started at all."""
        self._weights.skip(lane)

    def end_lane(self) -> None:
        """A lane that ``collects`` is over: add its gradients to the partial sums. A lane without gradients counts for nothing."""
        if self.state is EngineState.DISCARDED:
            return
        has_gradients = bool(self._backwards) or any(param.grad is not None for param in self.params)
        if not has_gradients:
            self._weights.skip(self._lane)
        if not self._backwards and (has_gradients or self._is_last):
            self._begin_lane()
        self._recovering(self._fold_lane if has_gradients or self._is_last else self._drop_lane)

    def average(self) -> None:
        """All lanes that ``collect`` are over: average the gradients of all workers. Collective.

        Afterwards the state is AVERAGED; or DISCARDED, if a worker was lost.
        """
        if self.state is EngineState.DISCARDED:
            return

        def exchange() -> None:
            for lane in set(range(*self.my_lanes)) - self._lanes_run:
                self._weights.skip(lane)
            if not self._is_last:  # this worker ran no lane
                self._lane, self._is_last = self.my_lanes[1] - 1, True
                self._begin_lane()
                self._reducer.end()
            self._exchange()

        self._recorder.enter(EXCHANGE)
        self._recovering(exchange)
        self._recorder.enter(OPTIMIZER)

    @property
    def is_averaged(self) -> bool:
        return self.state in AVERAGED

    def confirm(self) -> None:
        """Wait until every worker has the averages of the step and what all have logged. Called before the optimizer steps.

        If a worker is lost meanwhile, the step is CONFIRMED or DISCARDED afterwards, on all survivors alike.
        """
        if self.state is not EngineState.AVERAGED:
            return
        if self._recovers:
            assert self._callbacks.on_peer_lost is not None
            self._recorder.enter(CONFIRM)
            try:
                self._callbacks.share_logged(self.comm)
                self.state = EngineState.UNCONFIRMED
                self.comm.barrier(f"the confirmation of step {self.step}")
            except PeerError as error:
                self._callbacks.on_peer_lost(error)
                return
            finally:
                self._recorder.enter(OPTIMIZER)
        self.confirm_step()

    @property
    def _recovers(self) -> bool:
        """Whether the other workers would continue without this one, and this one without them."""
        return self._callbacks.on_peer_lost is not None and self.comm.size > 1

    def forget_requests(self) -> None:
        """This step had no phase in which workers could ask for something."""
        self.requests_of_all = ()

    def confirm_step(self) -> None:
        """Allow the step to commit."""
        self.state = EngineState.CONFIRMED

    def stop(self) -> None:
        """The loop is over. An unfinished step leaves no trace in the buffers."""
        self._abandon_step(EngineState.IDLE)

    def discard_step(self) -> None:
        """The set of workers changed: restore the buffers, and ignore the rest of this micro-batch."""
        self._abandon_step(EngineState.DISCARDED)

    def _abandon_step(self, next_state: EngineState) -> None:
        if self.state not in (EngineState.IDLE, EngineState.CONFIRMED, EngineState.DISCARDED):
            self._lane_buffers.restore()
        self.state = next_state

    def weight_of(self, lane: int) -> float:
        """Returns the weight of a lane of this worker in this step."""
        return self._weights.mine[lane]

    def weigh(self, weight: float) -> None:
        """Give the current lane this weight instead of its number of samples."""
        if self.state is not EngineState.LANE or self._backwards:
            when = "after a lane's backward()" if self.state in AFTER_BACKWARD else "outside a lane"
            raise UsageError(f"run.weigh() was called {when}. Call it in the loop body, before backward().")
        self._weights.weigh(self._lane, weight)

    # -- a backward that is replayed (training/captured_backward.py) --------------------------

    @property
    def awaits_backward(self) -> bool:
        """Whether a lane has begun whose backward has not, or may be followed by another one."""
        return self.state is EngineState.LANE

    @contextmanager
    def hooks_off(self) -> Iterator[None]:
        """In this context a backward leaves its gradients in ``param.grad``: it does not belong to a lane."""
        self._hooks.enabled = False
        try:
            yield
        finally:
            self._hooks.enabled = True

    def backward_was_replayed(self, gradients: Sequence[Tensor | None]) -> None:
        """A backward of this lane was replayed: it counts as one whose gradients all became ready at its end.

        Args:
            gradients: The gradient of each of ``params``, or None. They lie in memory that the next replay overwrites.
        """
        with torch.no_grad():
            self._begin()
            if self.state is not EngineState.BACKWARD:
                return
            is_used_up = self._is_last and (self._sends_early or not self._collects)
            self._ready(self._replayed.place(gradients, is_used_up=is_used_up, is_last=self._is_last))
            self._end()

    # -- one backward (called by AutogradHooks) ----------------------------------------------

    def _begin(self) -> bytes:
        self.backwards_begun += 1
        if self.state is EngineState.DISCARDED:
            return bytes(len(self.params))
        if self.state is not EngineState.LANE:
            raise UsageError(explain_backward(self.state, self._collects))
        self.state = EngineState.BACKWARD
        self._recorder.enter(BACKWARD)
        self._backwards += 1
        if self._backwards == 1:
            self._begin_lane()
        elif self._sends_early:
            raise UsageError(
                "backward() was called twice in one lane of run.steps(..., overlap=True), whose gradients leave while the first "
                "backward runs. Add the losses and call backward() once, or pass overlap=False."
            )
        return self._report if self._sends_early else bytes(len(self.params))

    def _begin_lane(self) -> None:
        """The gradients of a lane will come."""
        if self._is_last:
            self._callbacks.before_send()
        if self._settings_hash is None:
            self._settings_hash = self._callbacks.settings_hash()
        self._report = self._reducer.begin(
            WeightedMicroBatch(self._lane, self._weights.share(self._lane), self._weights.scale, self._is_last)
        )

    def _ready(self, indices: Sequence[int]) -> None:
        if self.state is not EngineState.BACKWARD or self._peer_error is not None:
            return
        if not self._sends_early:
            self._reducer.note_order(indices)
            return
        try:
            self._reducer.ready(indices)
        except PeerError as error:
            if self._callbacks.on_peer_lost is None:
                raise
            self._peer_error = error  # reported when the lane ends: autograd must not be interrupted

    def _end(self) -> None:
        if self.state is EngineState.DISCARDED:
            return
        if self._collects:
            self.state = EngineState.LANE
            self._recorder.enter(FORWARD)
            return
        self._recorder.enter(LANE)
        self._recovering(self._fold_lane)
        if self._is_last and self.state is EngineState.FOLDED:
            self._recorder.enter(EXCHANGE)
            self._recovering(self._exchange)
        self._recorder.enter(OPTIMIZER if self._is_last else BODY)

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do ``work``. If a peer is lost, or was lost in the backward before, the owner recovers."""
        try:
            if self._peer_error is not None:
                raise self._peer_error
            work()
        except PeerError as error:
            self._peer_error = None
            if self._callbacks.on_peer_lost is None:
                raise
            self._callbacks.on_peer_lost(error)

    def _fold_lane(self) -> None:
        self._reducer.end()
        self._lane_buffers.end_lane(self._lane, self._weights.counts_for_something(self._lane))
        self.state = EngineState.FOLDED

    def _drop_lane(self) -> None:
        self._lane_buffers.end_lane(self._lane, has_samples=False)
        self.state = EngineState.FOLDED

    def _exchange(self) -> None:
        words = exchange_words(self.comm, self._control_word(), self._most_lanes)
        self._compare(words)
        self.requests_of_all = tuple(word.requests for word in words)
        weights = [weight for word in words for weight in word.weights]
        self.total_weight = math.fsum(weights) or float(sum(self._weights.counts))
        correction = self._weights.correction(weights)
        self._reducer.finish(union([word.present for word in words]), correction)
        self._add_earlier_gradients()
        if correction:
            changed = union([word.changed for word in words])
            self._lane_buffers.average(changed, self._weights, self._weights.scale_of_buffers(weights))
        else:
            self._lane_buffers.restore()
        if self._recovers:
            self.comm.await_device()  # from here on the user's code sees the averages
        self.state = EngineState.AVERAGED
        self._callbacks.on_averaged()

    def _control_word(self) -> ControlWord:
        settings_hash = self._callbacks.settings_hash()
        if settings_hash != self._settings_hash:
            self._callbacks.on_settings_differ(None)
        requests, weights = self._callbacks.requests() | self._weights.kinds(), tuple(self._weights.mine.values())
        present, changed = bytes(self._reducer.present), self._lane_buffers.changed()
        return ControlWord(self.step, self._position, settings_hash, requests, weights, present, changed)

    def _compare(self, words: Sequence[ControlWord]) -> None:
        require_same_position(words)
        for rank, word in enumerate(words):
            if word.settings_hash != words[0].settings_hash:
                self._callbacks.on_settings_differ(rank)
        kinds = {word.requests & (WEIGHED | COUNTED) for word in words} - {0}
        if len(kinds) > 1 or WEIGHED | COUNTED in kinds:
            raise UsageError(
                f"run.weigh() was called for some lanes of step {self.step} and not for others: your weights and numbers of "
                "samples cannot be added. Call run.weigh() in every iteration of the loop body, or never. (run.weigh(0), which "
                "skips a batch, may be called in any iteration.)"
            )
