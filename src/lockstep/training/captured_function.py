"""CapturedFunction: what ``run.capture`` returns. Calls the user's function, records it, and replays the recording.

    call 1, 2       as it is: correct steps by themselves. What the function does decides what it is: it calls backward()
                    (captured_backward.py) or an optimizer (captured_update.py). In the second step the GPU is watched.
    call 3          recorded, which executes nothing, then replayed
    call 4, ...     arguments are copied to where the recording reads them; replayed

A function that cannot be recorded runs as it is for good, and one line says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from lockstep.data.seeding import SavedRandomness
from lockstep.errors import UsageError
from lockstep.gradients.cuda_graph import CannotRecord, GraphRecorder, Recording, Results
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training import step_gate
from lockstep.training.call_signature import (
    CannotTakeApart,
    Structure,
    addresses,
    empty_like,
    is_plain,
    map_tensors,
    put_together,
    take_apart,
    torch_settings,
)
from lockstep.training.capture_reasons import describe_difference, describe_failure
from lockstep.training.captured_backward import BackwardWork, Recorded
from lockstep.training.captured_update import UpdateWork, describe_host_work, describe_replaced, host_state, state_tensors
from lockstep.training.memory_reads import MemoryReads
from lockstep.training.outer_variables import OuterVariables
from lockstep.training.recordings import EAGER_STEPS, Recordings
from lockstep.training.step_gate import StepGate

P = ParamSpec("P")
T = TypeVar("T")
_GENERATOR = "the random generator"
_OBSERVED_CALLS = 8
"""In how many calls Lockstep observes what a function does."""
Key = tuple[tuple[str, Hashable], ...]
"""(what, its value) for everything on which a recording depends."""


class Work(Protocol):
    """What differs between a function that calls backward() and one that makes the step."""

    refuses_everything: bool
    """Whether a function that cannot be recorded with one signature is not recorded with another one either."""

    def is_now(self) -> bool: ...
    def objection(self) -> str | None: ...
    def key(self) -> Key: ...
    def tensors(self) -> list[Tensor]: ...
    def call(self, function: Callable[[], Any], reads: MemoryReads | None = None) -> Recorded: ...
    def after_replay(self, recorded: Recorded) -> None: ...


@dataclass
class CaptureContext:
    """What all captured functions of a run share. ``recorder`` is None if functions run as they are on this device."""

    device: torch.device
    model: nn.Module
    engine: LaneEngine
    gate: StepGate
    recorder: GraphRecorder | None
    is_in_loop: Callable[[], bool]
    notice: Callable[[str], None]
    functions: list[CapturedFunction[Any, Any]] = field(default_factory=list)
    inside: str = ""
    """The name of the captured function that runs now."""

    def capture(self, function: Callable[P, T], shapes: int) -> CapturedFunction[P, T]:
        self.functions.append(CapturedFunction(function, self, shapes))
        return self.functions[-1]

    def require_outside(self, call: str, where: str) -> None:
        """Raise a UsageError if ``call`` is made in a captured function: a replay would not make it."""
        if self.inside:
            raise UsageError(
                f"{call} was called in the captured function {self.inside}, which does not run any more once it is captured. Call "
                f"it outside, {where}."
            )

    def close(self) -> None:
        """Release the memory of all recordings. The functions run as they are from now on."""
        self.recorder = None
        for function in self.functions:
            function.close()


@dataclass
class KeptRecording:
    """A recording, and what a replay needs."""

    recording: Recording
    inputs: list[Tensor]
    recorded: Recorded
    outputs: Structure
    """Of what the function returned: its tensors are the first ones of the recording's results."""
    written: list[Tensor]
    """Parameters and buffers that it changes in place. Autograd and LaneBuffers must know that they have changed."""
    keeps_alive: list[Any]
    """Memory that it reads and that the key does not mention; and objects whose ids are in the key."""

    def close(self) -> None:
        self.recording.close()
        self.inputs, self.written, self.keeps_alive = [], [], []
        self.recorded = Recorded(None, [])


class CapturedFunction(Generic[P, T]):
    """A function of the user, captured. ``replays`` counts the calls that were replayed; ``reasons`` says why others never are."""

    def __init__(self, function: Callable[P, T], context: CaptureContext, shapes: int) -> None:
        functools.update_wrapper(self, function)
        self.replays = 0
        self.reasons: list[str] = []
        self._function, self._context = function, context
        self._name = getattr(function, "__name__", type(function).__name__)
        self._outer = OuterVariables(function)
        self._work: Work | None = None
        self._recordings: Recordings[KeptRecording] = Recordings(shapes)
        self._modules = list(context.model.modules())
        self._refused: set[Hashable] = set()
        self._is_refused = self._has_complained = False
        self._observed = 0

    @property
    def recordings(self) -> int:
        """How many recordings are kept now."""
        return len(self._recordings)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        context = self._context
        if context.inside:  # it is a part of the function that is recorded
            return self._function(*args, **kwargs)
        context.inside = self._name
        try:
            if context.recorder is None or self._is_refused or not context.is_in_loop():
                return self._run_detached((args, kwargs))
            return self._dispatch(context.recorder, (args, kwargs))
        finally:
            context.inside = ""

    def close(self) -> None:
        self._recordings.clear()

    # -- as it is --------------------------------------------------------------------------------

    def _run(self, arguments: Any) -> T:
        args, kwargs = arguments
        return self._function(*args, **kwargs)

    def _run_detached(self, arguments: Any) -> T:
        """Call the function. If it has called backward(), what it returns is free of autograd's graph, as after a replay."""
        before = self._context.engine.backwards_begun
        returned = self._run(map_tensors(arguments, lambda tensor: tensor.to(self._context.device, non_blocking=True)))
        if self._context.engine.backwards_begun == before:
            return returned
        return map_tensors(returned, Tensor.detach)  # type: ignore[no-any-return]

    def _observe(self, arguments: Any) -> T:
        """Call the function, and find out what it is."""
        context = self._context
        self._observed += 1
        if self._observed > _OBSERVED_CALLS:
            return self._run_detached(arguments)
        optimizers = context.gate.optimizers
        before, numbers, tensors = context.engine.backwards_begun, host_state(optimizers), state_tensors(optimizers)
        context.gate.called.clear()
        returned = self._run_detached(arguments)
        called = list(context.gate.called)
        calls_backward = context.engine.backwards_begun != before
        others = [type(each).__name__ for each in called if not isinstance(each, (Optimizer, GradScaler))]
        if calls_backward and called:
            self._refuse("it calls backward() and makes the step. Capture two functions: between them workers exchange gradients")
        elif others:
            self._refuse(f"it calls {others[0]}.step(), which works on the host. Call that outside of it")
        elif calls_backward and self._work is None:
            self._work = BackwardWork(context.engine)
        elif called:
            self._work = self._work or UpdateWork(context.engine, context.gate, self._name, context.is_in_loop)
            reason = describe_host_work(numbers, host_state(optimizers)) or describe_replaced(tensors, state_tensors(optimizers))
            if reason is not None:
                self._refuse(reason)
        return returned

    def _refuse(self, reason: str, key: Hashable = None) -> None:
        """Run as it is for good: with this signature, or with any."""
        if key is None:
            self._is_refused = True
            self._recordings.clear()
        else:
            self._refused.add(key)
        if reason not in self.reasons:
            self.reasons.append(reason)
            self._context.notice(f"{self._name} is not captured: {reason}.")

    # -- recorded and replayed -------------------------------------------------------------------

    def _dispatch(self, recorder: GraphRecorder, arguments: Any) -> T:
        work = self._work
        if work is None:
            return self._observe(arguments)
        if not work.is_now():
            return self._run_detached(arguments)
        reason = work.objection()
        if reason is not None:
            self._refuse(reason)
            return self._run_detached(arguments)
        try:
            structure, tensors = take_apart(arguments, "an argument")
        except CannotTakeApart as error:
            self._refuse(str(error))
            return self._run_detached(arguments)
        key = self._key(recorder, structure, work)
        kept = self._recordings.get(key)
        if kept is None and key in self._refused:
            return self._run_detached(arguments)
        if kept is None and self._recordings.is_due(key, self._context.engine.step):
            kept = self._try_to_record(recorder, work, key, structure, tensors)
        if kept is not None:
            return self._replay(work, kept, tensors)
        self._say_if_it_never_repeats()
        return self._watch(recorder, work, arguments, key)

    def _watch(self, recorder: GraphRecorder, work: Work, arguments: Any, key: Hashable) -> T:
        """Call the function in the steps before it is recorded; in the last one look for what cannot be recorded."""
        steps = self._recordings.times_seen(key)
        if steps < EAGER_STEPS:
            return self._observe(arguments)
        with recorder.watching(step_gate.__file__) as places:
            returned = self._observe(arguments)
        if places:
            self._refuse(f"the host waits for the GPU in it{places[0]}", None if work.refuses_everything else key)
        return returned

    def _try_to_record(
        self, recorder: GraphRecorder, work: Work, key: Key, structure: Structure, tensors: list[Tensor]
    ) -> KeptRecording | None:
        saved = SavedRandomness()
        torch.clear_autocast_cache()  # its casts of the weights are not those of the replays
        try:
            with self._context.engine.untouched_buffers():
                kept = self._record(recorder, work, structure, tensors)
            drawn = [] if recorder.runs_on_host else saved.drawn_on_host()
            if drawn:
                kept.close()
                raise CannotRecord(f"it draws random numbers on the host ({', '.join(drawn)}), which a replay would repeat")
        except Exception as error:  # noqa: BLE001 - whatever it is, the function can run as it is
            self._refuse(describe_failure(error), None if work.refuses_everything else key)
            return None
        finally:
            torch.clear_autocast_cache()
            saved.restore()
        now = {_GENERATOR: recorder.generator}  # a rehearsal that failed may have replaced it
        self._recordings.add(tuple((what, now.get(what, value)) for what, value in key), kept)
        if self._recordings.dropped == 1:
            self._context.notice(
                f"{self._name} comes with more than the {len(self._recordings)} shapes that are kept as captures. Pad batches to "
                "fewer shapes, or pass shapes= to run.capture."
            )
        return kept

    def _record(self, recorder: GraphRecorder, work: Work, structure: Structure, tensors: list[Tensor]) -> KeptRecording:
        engine = self._context.engine
        inputs = [empty_like(tensor, self._context.device) for tensor in tensors]
        for mine, given in zip(inputs, tensors, strict=True):
            mine.copy_(given)
        followed = [*engine.params, *engine.buffers.tensors()]
        found: list[Any] = []

        def body(reads: MemoryReads | None = None) -> Results:
            versions = [tensor._version for tensor in (*inputs, *followed)]
            with reads or nullcontext():
                recorded = work.call(lambda: self._run(put_together(structure, inputs)), reads)
            outputs, returned = take_apart(map_tensors(recorded.returned, Tensor.detach), "what it returns")
            changed = [t for t, v in zip((*inputs, *followed), versions, strict=True) if t._version != v]
            if changed and any(changed[0] is mine for mine in inputs):
                raise CannotRecord("it changes one of its arguments in place")
            found[:] = recorded, outputs, changed
            recorded.returned = None
            return [*returned, *recorded.memory]

        reads, is_seen = MemoryReads(), True
        try:
            recorder.rehearse(lambda: body(reads))
        except CannotRecord:
            if reads.has_met_gradient:
                raise
            is_seen = False  # whether the function can be recorded is for the recording to say, which is made without this mode
        found.clear()
        torch.clear_autocast_cache()
        recording = recorder.record(body)
        if not is_seen:
            self._context.notice(
                f"{self._name} is captured, but Lockstep could not see which attributes it reads: change tensors in attributes in "
                "place (copy_), do not replace them."
            )
        recorded, outputs, changed = found
        scales = [scaler._scale for scaler in self._context.gate.enabled_scalers if scaler._scale is not None]
        known = [*inputs, *followed, *scales, *self._outer.tensors(), *work.tensors()]
        keeps_alive = [*reads.outside(self._context.device, known), *(tensor for tensor in known if not is_plain(tensor))]
        return KeptRecording(recording, inputs, recorded, outputs, changed, keeps_alive)

    def _replay(self, work: Work, kept: KeptRecording, tensors: list[Tensor]) -> T:
        for mine, given in zip(kept.inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        kept.recording.replay()
        if kept.written:
            torch.autograd.graph.increment_version(kept.written)
        count = len(kept.recording.results) - len(kept.recorded.memory)
        returned = put_together(kept.outputs, [_copy(tensor) for tensor in kept.recording.results[:count]])
        self.replays += 1
        work.after_replay(kept.recorded)
        return returned  # type: ignore[no-any-return]

    # -- signatures --------------------------------------------------------------------------------

    def _key(self, recorder: GraphRecorder, structure: Structure, work: Work) -> Key:
        engine = self._context.engine
        tensors = [*(param for _, param in engine.named), *engine.buffers.tensors()]
        return (
            ("the arguments", structure),
            ("the variables", self._outer.values()),
            ("torch's settings", torch_settings(self._context.device)),
            ("train or eval mode", bytes(module.training for module in self._modules)),
            ("what requires gradients", bytes(tensor.requires_grad for tensor in tensors)),
            ("where the model's tensors are", addresses(tensors)),
            ("the scale", tuple(0 if s._scale is None else s._scale.data_ptr() for s in self._context.gate.enabled_scalers)),
            (_GENERATOR, recorder.generator),
            *work.key(),
        )

    def _say_if_it_never_repeats(self) -> None:
        pair = self._recordings.differing()
        if pair is not None and not self._has_complained:
            self._has_complained = True
            self._context.notice(f"{self._name} is not captured so far: {describe_difference(*pair)}.")


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.clone()
