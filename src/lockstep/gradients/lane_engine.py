"""LaneEngine: one model under lanes. Wires hooks, lane reducer, buffers and control word together.

Knows nothing of data, optimizers or recovery. Whoever drives it says which lane comes; autograd
says the rest:

    start_step -> start_lane -> [user: forward, backward] -> start_lane -> [...] -> AVERAGED

Every phase is left by one event; what comes at the wrong time is the user's mistake and gets a sentence.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.base import Comm
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.autograd_hooks import AutogradHooks
from lockstep.gradients.buffers import Buffers
from lockstep.gradients.control_word import COUNTED, WEIGHED, ControlWord, Exchange, union
from lockstep.gradients.lane_buffers import LaneBuffers
from lockstep.gradients.lane_reducer import LaneReducer, Turn
from lockstep.gradients.module import Mark, claim, disclaim, parameters_of, sparse_of
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import fold


class Phase(enum.Enum):
    IDLE = "between steps"
    LANE = "a lane waits for its backward"
    BACKWARD = "inside a backward"
    FOLDED = "the lane's gradients are taken; more lanes follow"
    AVERAGED = "the step's gradients are there"
    DISCARDED = "the generation broke: this turn counts for nothing"


@dataclass(frozen=True)
class EngineCallbacks:
    settings_hash: Callable[[], int] = lambda: 0
    on_settings_differ: Callable[[int | None], None] = lambda rank: None
    before_send: Callable[[], None] = lambda: None
    on_averaged: Callable[[], None] = lambda: None
    on_peer_lost: Callable[[PeerError], None] | None = None
    requests: Callable[[], int] = lambda: 0


class LaneEngine:
    """``lanes`` lanes of one model over the ranks of ``comm``. All ranks must construct it alike."""

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        lanes: int,
        *,
        exact: bool = True,
        bucket_mb: float = 25,
        callbacks: EngineCallbacks | None = None,
    ) -> None:
        self.comm, self.lanes, self._module = comm, lanes, module
        self.named = parameters_of(module, ())
        trainable = [(name, p) for name, p in self.named if p.is_floating_point() or p.is_complex()]
        self.params = [p for _, p in trainable]
        self.buffers = Buffers(module, ())
        for name, buffer in self.buffers.named():
            if buffer.layout is not torch.strided or any(
                s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                raise UsageError(
                    f"buffer {name} is sparse or expanded; Run can average dense ones. Store it as buffer.contiguous()."
                )
        sparse = sparse_of(module, self.params)
        self._reducer = LaneReducer(self.params, [name for name, _ in trainable], comm, int(bucket_mb * (1 << 20)), sparse, exact)
        self._lane_buffers = LaneBuffers(self.buffers, comm)
        self.phase = Phase.IDLE
        self._callbacks = callbacks or EngineCallbacks()
        self._lost: PeerError | None = None
        self.requests_of_all: tuple[int, ...] = ()
        """Every worker's requests, by rank, with the step just averaged: all of them have heard the same."""
        self._deal()
        self._hooks = AutogradHooks(self.params, self._begin, self._ready, self._end)
        self._mark = module.register_forward_hook(Mark(self))
        claim(p for _, p in self.named)

    def _deal(self) -> None:
        assignment = assign_lanes(self.lanes, self.comm.size)
        self.my_lanes = assignment[self.comm.rank]
        """This worker's lanes [first, last)."""
        self._fold = fold(self.lanes, assignment)
        self._most = max(last - first for first, last in assignment)
        self._reducer.assign_lanes(self._fold, self.my_lanes)

    def rebind(self, comm: Comm) -> None:
        """Another generation of workers: lanes are assigned anew. Collective. Nothing of a step under way is kept."""
        self.comm = comm
        self._reducer.rebind(comm)
        self._lane_buffers.rebind(comm)
        self._deal()

    def discard_step(self) -> None:
        """Give up the step under way: buffers are as at its beginning, and the rest of this turn counts for nothing."""
        if self.phase not in (Phase.IDLE, Phase.AVERAGED, Phase.DISCARDED):
            self._lane_buffers.restore()
        self.phase = Phase.DISCARDED

    def watch_outputs(self, outputs: Any) -> None:
        if self._hooks.enabled:
            self._hooks.watch_outputs(outputs)

    def close(self) -> None:
        """Unhook the model. May be called twice."""
        self._hooks.remove()
        self._mark.remove()
        disclaim(p for _, p in self.named)

    # -- driven from outside -----------------------------------------------------------------

    def start_step(self, step: int, counts: Sequence[int]) -> None:
        """A step begins (perhaps again). ``counts``: the samples of every lane of the whole run."""
        self.step, self._counts = step, counts
        self._unit = max(counts)
        self._weights = {lane: float(counts[lane]) for lane in range(*self.my_lanes)}
        self._weighed: set[int] = set()
        self._weighs = False
        self._first_settings: int | None = None
        self._reducer.start(step)
        self._lane_buffers.start(step)
        self.phase = Phase.IDLE

    def start_lane(self, lane: int, is_last: bool) -> None:
        """The loop body runs next, on lane ``lane``; it is this worker's last one with samples, or not."""
        if self.phase is not Phase.IDLE:
            self._lane_buffers.restore()
        self._lane, self._is_last = lane, is_last
        for param in self.params:
            param.grad = None
        self.phase = Phase.LANE

    def stop(self) -> None:
        """The loop is over: no lane waits for a backward any more. A step that is given up leaves no trace in the buffers."""
        if self.phase not in (Phase.IDLE, Phase.AVERAGED, Phase.DISCARDED):
            self._lane_buffers.restore()
        self.phase = Phase.IDLE

    def trainable(self) -> list[str]:
        """Names of the parameters that want gradients now."""
        return [name for name, param in self.named if param.requires_grad]

    def require_unchanged(self) -> None:
        """The model has the parameters and buffers that it had when it was hooked."""
        unsettled = self.buffers.unsettled()
        if unsettled:
            raise UsageError(
                f"buffer {unsettled[0]} appeared or vanished after Run(...) was made: nobody would average it. Register it with a "
                "tensor before; a cache that every worker can compute for itself with persistent=False."
            )
        now = list(self._module.named_parameters())
        if [id(p) for _, p in now] != [id(p) for _, p in self.named]:
            shown = ", ".join(sorted({name for name, _ in self.named} ^ {name for name, _ in now})[:3])
            raise UsageError(
                f"the model was changed after Run(...) was made: {shown or 'a parameter was replaced'}. Nobody would average the "
                "new parameters' gradients. Change it first, then make the optimizer and the Run."
            )

    def buffer_fingerprints(self) -> list[list[str]]:
        """Rows by which ranks compare the buffers they begin a step with."""
        return self._lane_buffers.fingerprints()

    @contextmanager
    def untouched_buffers(self) -> Iterator[None]:
        """Whatever happens inside, the buffers are afterwards as they were."""
        before = [(tensor, tensor.detach().clone()) for tensor in self.buffers.tensors()]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if tensor.shape == value.shape:
                        tensor.copy_(value)

    def weight_of(self, lane: int) -> float:
        return self._weights[lane]

    def weigh(self, weight: float) -> None:
        """The current lane's weight, instead of its number of samples."""
        if self.phase is not Phase.LANE:
            raise UsageError(
                f"run.weigh() came {'after' if self.phase in (Phase.FOLDED, Phase.AVERAGED) else 'outside'} a lane's backward(). "
                "Call it in the loop body, before backward()."
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise UsageError(f"run.weigh({weight}) is no weight. Pass a number of samples, tokens, ...: zero or more, and finite.")
        self._weighs = True
        if self._counts[self._lane]:
            self._weights[self._lane] = float(weight)
            self._weighed.add(self._lane)

    # -- one backward ------------------------------------------------------------------------

    def _begin(self) -> bytes:
        if self.phase is Phase.DISCARDED:
            return bytes(len(self.params))
        if self.phase is not Phase.LANE:
            raise UsageError(_WRONG_TIME[self.phase])
        self.phase = Phase.BACKWARD
        if self._is_last:
            self._callbacks.before_send()
        if self._first_settings is None:
            self._first_settings = self._callbacks.settings_hash()
        share = self._share(self._lane)
        return self._reducer.begin(Turn(self._lane, share, self._scale(), self._is_last))

    def _share(self, lane: int) -> float:
        """A lane's weight in units of a full lane: 1 for most, which costs nothing."""
        return self._weights[lane] / self._unit if self.lanes > 1 else float(self._counts[lane] > 0)

    def _scale(self) -> float | None:
        """1 / the sum of all shares; None where others' weights decide."""
        if self.lanes == 1:
            return 1.0
        if self.comm.size == 1 and self._is_last:
            return self._scale_of(list(self._weights.values()))
        return None if self._weighs else self._unit / sum(self._counts)

    def _scale_of(self, weights: Sequence[float]) -> float:
        total = math.fsum(weights)
        if total == 0:
            raise UsageError(
                f"all {self.lanes} lanes of step {self.step} have weight 0: there is nothing to average. Weigh at least one more."
            )
        return self._unit / total

    def _ready(self, indices: Sequence[int]) -> None:
        if self.phase is Phase.BACKWARD and self._lost is None:
            try:
                self._reducer.ready(indices)
            except PeerError as error:
                if self._callbacks.on_peer_lost is None:
                    raise
                self._lost = error

    def _end(self) -> None:
        """With somebody to recover with, a lost peer voids this turn; otherwise the error comes out of the user's backward()."""
        if self.phase is Phase.DISCARDED:
            return
        try:
            if self._lost is not None:
                raise self._lost
            self._finish()
        except PeerError as error:
            if self._callbacks.on_peer_lost is None:
                raise
            self._lost = None
            self._callbacks.on_peer_lost(error)

    def _finish(self) -> None:
        self._reducer.end()
        self._lane_buffers.note(self._lane, self._counts[self._lane] > 0)
        if not self._is_last:
            self.phase = Phase.FOLDED
            return
        words = Exchange(self.comm, self._word(), self._most).wait()
        self._compare(words)
        self.requests_of_all = tuple(word.wants for word in words)
        weights = [weight for word in words for weight in word.weights]
        scale = 1.0 if self.lanes == 1 else self._scale_of(weights)
        self._reducer.finish(union([word.present for word in words]), scale)
        shares = [self._share(lane) for lane in range(*self.my_lanes)]
        first = next(lane for lane, count in enumerate(self._counts) if count)
        self._lane_buffers.finish(union([word.changed for word in words]), self._fold, self.my_lanes, shares, scale, first)
        self.phase = Phase.AVERAGED
        self._callbacks.on_averaged()

    def _word(self) -> ControlWord:
        weights = tuple(self._weights[lane] for lane in range(*self.my_lanes))
        counted = any(self._counts[lane] and lane not in self._weighed for lane in range(*self.my_lanes))
        settings = self._callbacks.settings_hash()
        if settings != self._first_settings:
            self._callbacks.on_settings_differ(None)
        wants = self._callbacks.requests() | (WEIGHED if self._weighed else 0) | (COUNTED if counted else 0)
        return ControlWord(self.step, settings, wants, weights, bytes(self._reducer.present), self._lane_buffers.changed())

    def _compare(self, words: Sequence[ControlWord]) -> None:
        for rank, word in enumerate(words):
            if word.step != words[0].step:
                raise UsageError(
                    f"rank {rank} is at step {word.step} where rank 0 is at step {words[0].step}: their loops have parted. "
                    "Every worker must pass the same loops over run.shard(...), and leave them at the same step."
                )
            if word.settings != words[0].settings:
                self._callbacks.on_settings_differ(rank)
        ways = {w.wants & (WEIGHED | COUNTED) for w in words} - {0}
        if len(ways) > 1 or WEIGHED | COUNTED in ways:
            raise UsageError(
                f"run.weigh() was called for some lanes of step {self.step} and not for others: numbers of samples and weights "
                "of yours cannot be added. Call it in every turn of the loop body, or never."
            )


_WRONG_TIME = {
    Phase.IDLE: (
        "backward() was called outside the loop over run.shard(...): only there gradients belong to a step and a lane. "
        "Move it into the loop, or train that model without Run."
    ),
    Phase.BACKWARD: "the last backward() raised half-way, and its lane cannot be repeated. Let the exception end the run.",
    Phase.FOLDED: (
        "a second backward() in one turn of the loop: the gradients of this lane have been taken already. Add the losses and call "
        "backward() once. (A reentrant checkpoint in a submodule that is called directly looks the same: use_reentrant=False.)"
    ),
    Phase.AVERAGED: (
        "a second backward() in one turn of the loop: the gradients of this step have been averaged already. "
        "Add the losses and call backward() once."
    ),
}
