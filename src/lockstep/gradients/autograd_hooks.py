"""The only file that touches autograd hooks: tells when a gradient is ready and when a backward ends.

Knows nothing of buckets or workers.

Note: reentrant checkpointing
-----------------------------
``torch.utils.checkpoint(use_reentrant=True)`` runs a backward *inside* a backward. Hooks then fire
under another graph task, and a callback queued there runs at the inner end, too early. So every
backward has an *owner*: the outermost graph task, at whose end ``on_end`` is called.

    outer task 7   [head params] ......................... [embedding]  end -> on_end
    inner task 8                 [block 2's params] end
    inner task 9                                    [block 1's params] end

A task is inner if a Python autograd function's ``backward`` is on the call stack. If the first
parameter to fire lies in an inner task, the owner is not known from it: therefore the module's
outputs are hooked too, whose hooks fire at the very beginning, in the outermost task. An owner
that never ended (its backward raised) is replaced by the next outermost task.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_NESTED = BackwardCFunction.apply.__code__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_current_task: Callable[[], int] = torch._C._current_graph_task_id


class AutogradHooks:
    """Calls ``on_begin()``, ``on_ready(numbers)`` and ``on_end()`` for every backward that reaches ``params``.

    ``on_begin`` comes before a backward's first ``on_ready`` and returns a mask over the parameters:
    gradients are only noted (a list append: most of what a hook may cost where a step is bound by
    launches) until one of the masked parameters fires, when ``on_ready`` gets all that were noted
    since. The rest comes just before ``on_end``. While ``enabled`` is False nothing is called.

    Callbacks are serialised by a lock: models on several devices run their hooks in several
    threads. An exception from a callback comes out of the user's ``backward()``.
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
        self._reached: Any = None  # the graph node of an output that this backward passed
        self._ids = {id(param) for param in params}
        self._noted: list[int] = []
        self._everyone = b"\1" * len(params)
        self._wanted = self._everyone
        self._looks = bytearray(self._everyone)  # whose hook must look up: everybody's until a backward has begun
        self._handles = [self._register(param, i) for i, param in enumerate(params)]

    def _register(self, param: Tensor, index: int) -> Any:
        # Autograd owns this function where the garbage collector does not look: it must not own us in turn.
        looks, note, me = self._looks, self._noted.append, weakref.ref(self)

        def fired(_: Tensor) -> None:
            if not looks[index]:
                note(index)
                return
            hooks = me()
            if hooks is not None:
                hooks._look(index)

        # A frozen parameter cannot be hooked, but keeps its hook when frozen later.
        frozen = not param.requires_grad
        if frozen:
            param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(fired)
        if frozen:
            param.requires_grad_(False)
        return handle

    def watch_outputs(self, outputs: Any) -> None:
        """Hook the tensors in a module's outputs, so that the outermost backward is known from its start."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._began and _current_task() == -1:
            self._disown()  # the last backward raised
        for tensor in find_tensors(outputs):
            if tensor.grad_fn is not None:  # a leaf would collect a hook per forward
                tensor.register_hook(self._output_reached)

    def remove(self) -> None:
        self.enabled = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _output_reached(self, grad: Tensor) -> None:
        if self.enabled:
            with self._lock:
                if _current_task() != self._task:
                    self._enter(_current_task())
                if not self._began and self._reached is None:
                    self._reached = torch._C._current_autograd_node()

    def _look(self, index: int) -> None:
        if not self.enabled:
            return
        with self._lock:
            task = _current_task()
            if task != self._task:
                self._enter(task)
            if not self._began:
                self._noted.clear()
                self._wanted = self._on_begin()
                self._looks[:] = self._wanted
                self._began = True
            self._noted.append(index)
            if self._wanted[index]:
                self._hand_over()

    def _hand_over(self) -> None:
        count = len(self._noted)
        ready = self._noted[:count]
        del self._noted[:count]  # another thread may have noted one more
        self._on_ready(ready)

    def _enter(self, task: int) -> None:
        self._task = task
        if task == self._owner or (self._owner is not None and _is_nested()):
            return
        self._disown()
        self._owner = self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(task))  # type: ignore[no-untyped-call]

    def _disown(self) -> None:
        self._owner, self._task, self._began, self._reached = None, -1, False, None
        self._looks[:] = self._everyone

    def _ended(self, task: int) -> None:
        with self._lock:
            if task != self._owner:
                return
            if not self._began:
                # Outputs were passed, but no parameter got a gradient. Either this is torch.autograd.grad, which
                # accumulates nothing and is not a backward; or the output uses no parameter on this rank, and
                # the others wait for us.
                if self._reached is None or _reaches(self._reached, self._ids):
                    self._disown()
                    return
                self._on_begin()
            self._hand_over()
            self._disown()
            self._on_end()


def _is_nested() -> bool:
    """Whether this backward runs inside another: started by a Python autograd function, or by somebody's hook."""
    frame = sys._getframe(2)
    backwards = 0
    while frame is not None:
        backwards += frame.f_code is _BACKWARD
        if frame.f_code is _NESTED or backwards == 2:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _reaches(node: Any, params: set[int]) -> bool:
    """Whether one of ``params`` (by id) lies in the graph below ``node``."""
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
    """Tensors in outputs of any Python type: containers, dataclasses, and plain objects' attributes."""
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
