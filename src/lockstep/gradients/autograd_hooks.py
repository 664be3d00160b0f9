"""AutogradHooks: reports when gradients are ready and when a backward ends. The only file that touches autograd hooks.

Knows nothing of buckets or workers.

Note: reentrant checkpointing
-----------------------------
``torch.utils.checkpoint(use_reentrant=True)`` runs a backward *inside* a backward. Hooks then fire in another graph task, and a
callback that is queued there runs at the end of the inner backward, too early. So every backward has an *owner*: the outermost
graph task. ``on_end`` is called when the owner ends.

    outer task 7   [head params] ......................... [embedding]  end -> on_end
    inner task 8                 [block 2's params] end
    inner task 9                                    [block 1's params] end

A task is inner if the ``backward`` of a Python autograd function is on the call stack. If the first parameter fires in an inner
task, the owner cannot be found from there. Therefore the module's outputs are hooked too: their hooks fire first, in the
outermost task. An owner that never ended (its backward raised) is replaced by the next outermost task.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_NESTED = BackwardCFunction.apply.__code__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_current_task: Callable[[], int] = torch._C._current_graph_task_id


class AutogradHooks:
    """Calls ``on_begin()``, ``on_ready(indices)`` and ``on_end()`` for every backward that reaches ``params``.

    ``on_begin`` is called before a backward's first ``on_ready``. It returns a mask over the parameters. The hook of an unmasked
    parameter only notes the index of the parameter (one list append: if launches limit a step, a hook may not cost more). The
    hook of a masked parameter reports all indices that were noted since the last report to ``on_ready``. The rest is reported
    just before ``on_end``. While ``enabled`` is False, nothing is called.

    A lock serialises the callbacks, because models on several devices run their hooks in several threads. An exception from a
    callback comes out of the user's ``backward()``.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        on_begin: Callable[[], bytes],
        on_ready: Callable[[Sequence[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self.enabled = True
        self._on_begin, self._on_ready, self._on_end = on_begin, on_ready, on_end
        self._lock = threading.RLock()
        self._task = -1
        self._owner: int | None = None
        self._began = False
        self._output_node: Any = None  # the graph node of an output of the module that this backward has passed
        self._ids = {id(param) for param in params}
        self._noted: list[int] = []
        self._all_ones = b"\1" * len(params)
        self._mask = self._all_ones  # from on_begin
        self._calls_fired = bytearray(self._all_ones)  # 1: the hook calls _fired. The mask, or all ones before a backward began
        self._handles = [self._register(param, i) for i, param in enumerate(params)]

    def _register(self, param: Tensor, index: int) -> Any:
        # Autograd keeps this function alive in memory that the garbage collector cannot see: it must not keep ``self`` alive.
        calls_fired, note, weak_self = self._calls_fired, self._noted.append, weakref.ref(self)

        def fired(_: Tensor) -> None:
            if not calls_fired[index]:
                note(index)
                return
            hooks = weak_self()
            if hooks is not None:
                hooks._fired(index)

        # A frozen parameter cannot be hooked, but a hooked parameter keeps its hook when it is frozen.
        frozen = not param.requires_grad
        if frozen:
            param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(fired)
        if frozen:
            param.requires_grad_(False)
        return handle

    def watch_outputs(self, outputs: Any) -> None:
        """Hook the tensors in the module's outputs, so that the outermost backward is known from its start."""
        if not self.enabled or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._began and _current_task() == -1:
            self._forget_owner()  # the last backward raised
        for tensor in find_tensors(outputs):
            if tensor.grad_fn is not None:  # a leaf would get one more hook in every forward
                tensor.register_hook(self._output_reached)

    @property
    def keys(self) -> list[int]:
        """The keys of these hooks among all post-accumulate-grad hooks of each parameter."""
        return [handle.id for handle in self._handles]

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        self.enabled = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _output_reached(self, grad: Tensor) -> None:
        self.enter_backward()

    def enter_backward(self) -> None:
        """A backward has reached an output of the module. Called inside that backward."""
        if self.enabled:
            with self._lock:
                if _current_task() != self._task:
                    self._enter_task(_current_task())
                if not self._began and self._output_node is None:
                    self._output_node = torch._C._current_autograd_node()

    def _fired(self, index: int) -> None:
        if not self.enabled:
            return
        with self._lock:
            task = _current_task()
            if task != self._task:
                self._enter_task(task)
            if not self._began:
                self._noted.clear()
                self._mask = self._on_begin()
                self._calls_fired[:] = self._mask
                self._began = True
            self._noted.append(index)
            if self._mask[index]:
                self._report()

    def _report(self) -> None:
        count = len(self._noted)
        ready = self._noted[:count]
        del self._noted[:count]  # another thread may have noted one more
        self._on_ready(ready)

    def _enter_task(self, task: int) -> None:
        self._task = task
        if task == self._owner or (self._owner is not None and _is_nested()):
            return
        self._forget_owner()
        self._owner = self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(task))  # type: ignore[no-untyped-call]

    def _forget_owner(self) -> None:
        self._owner, self._task, self._began, self._output_node = None, -1, False, None
        self._calls_fired[:] = self._all_ones

    def _ended(self, task: int) -> None:
        with self._lock:
            if task != self._owner:
                return
            if not self._began:
                # The backward passed an output, but no parameter got a gradient. Either this is torch.autograd.grad, which
                # accumulates nothing and is not a backward; or the output uses no parameter on this rank, and the other ranks
                # wait for this one.
                if self._output_node is None or _reaches(self._output_node, self._ids):
                    self._forget_owner()
                    return
                self._on_begin()
            self._report()
            self._forget_owner()
            self._on_end()


class LeftGradients:
    """The gradients as backwards have left them. ``addresses`` are those of their memory."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._left: dict[int, tuple[Tensor, int]] = {}

    def note(self, param: Tensor) -> None:
        """A backward has accumulated the gradient of ``param``."""
        grad = param.grad
        if grad is not None:
            self._left[id(param)] = grad, grad._version
            if grad.layout is torch.strided:
                self.addresses.add(grad.untyped_storage().data_ptr())

    def is_untouched(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` is the one that the last backward has left, or None."""
        tensor, version = self._left.get(id(param), (None, 0))
        return param.grad is None or (param.grad is tensor and param.grad._version == version)


@contextmanager
def noting_gradients(params: Sequence[Tensor]) -> Iterator[LeftGradients]:
    """In this context, note the gradients that backwards leave."""
    left = LeftGradients()
    handles = [param.register_post_accumulate_grad_hook(left.note) for param in params if param.requires_grad]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def _is_nested() -> bool:
    """Whether this backward runs inside another backward: a Python autograd function or a hook started it."""
    frame = sys._getframe(2)
    backwards = 0
    while frame is not None:
        backwards += frame.f_code is _BACKWARD
        if frame.f_code is _NESTED or backwards == 2:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _reaches(node: Any, params: set[int]) -> bool:
    """Whether the graph below ``node`` contains one of ``params`` (ids)."""
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in params:
            return True
        stack += [below for below, _ in node.next_functions]
    return False


def find_tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yields the tensors in outputs of any Python type: containers, dataclasses, and attributes of plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes, int, float, type(None), torch.nn.Module)):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item, depth - 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None), depth - 1)
    elif hasattr(value, "__dict__"):
        yield from find_tensors(vars(value), depth - 1)


def on_backward(tensor: Tensor, begin: Callable[[], None], end: Callable[[], None] | None = None) -> None:
    """Call ``begin()`` when a backward reaches ``tensor``, and ``end()`` when that backward ends. Does nothing for a leaf."""

    def reached(_: Tensor) -> None:
        begin()
        if end is not None:
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[no-untyped-call]

    if tensor.grad_fn is not None:
        tensor.register_hook(reached)
