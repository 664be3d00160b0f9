"""LaneEngine: computes the averaged gradients of one model, lane by lane. Connects hooks, reducer, buffers and control word.

Knows nothing of data, optimizers or recovery. The caller says which lane comes next; autograd does the rest:

    start_step -> start_lane -> [user: forward, backward] -> start_lane -> [...] -> AVERAGED -> confirm -> CONFIRMED

The engine is always in one ``Phase``. A backward in a phase that does not allow it raises UsageError.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

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
from lockstep.gradients.lane_buffers import LaneBuffers
from lockstep.gradients.lane_reducer import LaneReducer, LaneWeights, WeightedMicroBatch
from lockstep.gradients.module import HookedModule
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import Fold, fold


class Phase(enum.Enum):
    IDLE = "between steps"
    LANE = "a lane was started; its backward has not begun"
    BACKWARD = "inside a lane's backward"
    FOLDED = "the lane's gradients are in the partial sums; more lanes follow"
    AVERAGED = "this worker has the averages of the step; other workers may still wait for theirs"
    UNCONFIRMED = "every worker has the averages, and this worker has what all have logged; others may still wait for that"
    CONFIRMED = "every worker has the averages and what all have logged: the step may commit"
    DISCARDED = "the set of workers changed; this micro-batch counts for nothing"


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
        callbacks: EngineCallbacks = _NO_CALLBACKS,
    ) -> None:
        self.comm, self.lanes, self._callbacks = comm, lanes, callbacks
        self._model = HookedModule(module)
        self._model.buffers.require_dense()
        self.named, self.params, self.buffers = self._model.named, self._model.params, self._model.buffers
        fold = self._assign_lanes()
        self._reducer = LaneReducer(
            self.params, self._model.names, comm, fold, int(bucket_mb * (1 << 20)), self._model.sparse, exact
        )
        self._lane_buffers = LaneBuffers(self.buffers, comm, fold)
        self.phase = Phase.IDLE
        self.requests_of_all: tuple[int, ...] = ()
        self.total_weight = 0.0
        self._peer_error: PeerError | None = None
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

    def start_step(self, step: int, counts: Sequence[int], position: Position = (0, 0, 0)) -> None:
        """A step begins, possibly again.

        ``counts``: the number of samples of every lane of the run. ``position``: (stage of the loop, epoch, index in the epoch),
        which must be equal on all ranks.
        """
        self.step, self._position = step, position
        self._weights = LaneWeights(step, counts, self.my_lanes)
        self._settings_hash: int | None = None
        self._reducer.start_step(step)
        self._lane_buffers.start_step(step)
        self.phase = Phase.IDLE

    def start_lane(self, lane: int, is_last: bool) -> None:
        """The loop body runs next on lane ``lane``. ``is_last``: it is this worker's last lane with samples in this step."""
        if self.phase is not Phase.IDLE:
            self._lane_buffers.restore()
        self._lane, self._is_last = lane, is_last
        for param in self.params:
            param.grad = None
        self.phase = Phase.LANE

    @property
    def is_averaged(self) -> bool:
        return self.phase in _AVERAGED

    def confirm(self) -> None:
        """Wait until every worker has the averages of the step and what all have logged. Called before the optimizer steps.

        If a worker is lost meanwhile, the step is CONFIRMED or DISCARDED afterwards, on all survivors alike.
        """
        if self.phase is not Phase.AVERAGED:
            return
        on_peer_lost = self._callbacks.on_peer_lost
        if on_peer_lost is not None and self.comm.size > 1:
            try:
                self._callbacks.share_logged(self.comm)
                self.phase = Phase.UNCONFIRMED
                self.comm.barrier(f"the confirmation of step {self.step}")
            except PeerError as error:
                on_peer_lost(error)
                return
        self.confirm_step()

    def confirm_step(self) -> None:
        """Allow the step to commit."""
        self.phase = Phase.CONFIRMED

    def stop(self) -> None:
        """The loop is over. An unfinished step leaves no trace in the buffers."""
        self._abandon_step(Phase.IDLE)

    def discard_step(self) -> None:
        """The set of workers changed: restore the buffers, and ignore the rest of this micro-batch."""
        self._abandon_step(Phase.DISCARDED)

    def _abandon_step(self, next_phase: Phase) -> None:
        if self.phase not in (Phase.IDLE, Phase.CONFIRMED, Phase.DISCARDED):
            self._lane_buffers.restore()
        self.phase = next_phase

    def weight_of(self, lane: int) -> float:
        """Returns the weight of a lane of this worker in this step."""
        return self._weights.mine[lane]

    def weigh(self, weight: float) -> None:
        """Give the current lane this weight instead of its number of samples."""
        if self.phase is not Phase.LANE:
            when = "after a lane's backward()" if self.phase is Phase.FOLDED or self.is_averaged else "outside a lane"
            raise UsageError(f"run.weigh() was called {when}. Call it in the loop body, before backward().")
        self._weights.weigh(self._lane, weight)

    # -- one backward (called by AutogradHooks) ----------------------------------------------

    def _begin(self) -> bytes:
        if self.phase is Phase.DISCARDED:
            return bytes(len(self.params))
        if self.phase is not Phase.LANE:
            raise UsageError(_WRONG_PHASE[self.phase])
        self.phase = Phase.BACKWARD
        if self._is_last:
            self._callbacks.before_send()
        if self._settings_hash is None:
            self._settings_hash = self._callbacks.settings_hash()
        scale = self._weights.scale_before_exchange(has_all_weights=self.comm.size == 1 and self._is_last)
        return self._reducer.begin(WeightedMicroBatch(self._lane, self._weights.share(self._lane), scale, self._is_last))

    def _ready(self, indices: Sequence[int]) -> None:
        if self.phase is Phase.BACKWARD and self._peer_error is None:
            try:
                self._reducer.ready(indices)
            except PeerError as error:
                if self._callbacks.on_peer_lost is None:
                    raise
                self._peer_error = error  # reported by _end: autograd must not be interrupted

    def _end(self) -> None:
        if self.phase is Phase.DISCARDED:
            return
        try:
            if self._peer_error is not None:
                raise self._peer_error
            self._finish()
        except PeerError as error:
            if self._callbacks.on_peer_lost is None:
                raise
            self._peer_error = None
            self._callbacks.on_peer_lost(error)

    def _finish(self) -> None:
        self._reducer.end()
        self._lane_buffers.end_lane(self._lane, self._weights.counts[self._lane] > 0)
        if not self._is_last:
            self.phase = Phase.FOLDED
            return
        words = exchange_words(self.comm, self._control_word(), self._most_lanes)
        self._compare(words)
        self.requests_of_all = tuple(word.requests for word in words)
        weights = [weight for word in words for weight in word.weights]
        self.total_weight, scale = math.fsum(weights), self._weights.scale(weights)
        self._reducer.finish(union([word.present for word in words]), scale)
        self._lane_buffers.average(union([word.changed for word in words]), self._weights, scale)
        self.phase = Phase.AVERAGED
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
                "samples cannot be added. Call run.weigh() in every iteration of the loop body, or never."
            )


_AVERAGED = (Phase.AVERAGED, Phase.UNCONFIRMED, Phase.CONFIRMED)
_WRONG_PHASE = {
    Phase.IDLE: (
        "backward() was called outside the loop over run.shard(...). Only inside the loop do gradients belong to a step. "
        "Move backward() into the loop, or train that model without Run."
    ),
    Phase.BACKWARD: "the last backward() raised half-way, and its lane cannot be repeated. Let the exception end the run.",
    Phase.FOLDED: (
        "backward() was called twice for one micro-batch: the gradients of this lane were already added up. Add the losses and "
        "call backward() once. (A reentrant checkpoint in a submodule that is called directly looks the same: use_reentrant=False.)"
    ),
    **dict.fromkeys(
        _AVERAGED,
        "backward() was called twice for one micro-batch: the gradients of this step were already averaged. "
        "Add the losses and call backward() once.",
    ),
}
