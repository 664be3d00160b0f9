"""Which kernels are compiled, and when they are used. A module that notes what is asked of it stands for Triton."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lockstep.comm import tree_sum
from lockstep.comm.tree_sum import TreeSum
from tests.waiting import wait_until

ADDS = ((0, 1), (0, 2))


class Compiler:
    """``make_kernel`` of tree_kernel.py. The first call of a kernel blocks until ``may_end``, as one that compiles it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.compiled: list[Any] = []
        self.threads: list[threading.Thread] = []

    def make_kernel(self, *shape: Any) -> Callable[..., None]:
        def kernel(values: torch.Tensor, out: torch.Tensor, scale: float) -> None:
            self.threads.append(threading.current_thread())
            assert self.may_end.wait(10)
            self.compiled.append((*shape, values.dtype))

        return kernel


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    module: Any = types.ModuleType("lockstep.comm.tree_kernel")
    module.make_kernel = made.make_kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(tree_sum, "_kernels", {})
    yield made
    made.may_end.set()
    wait_until(lambda: not tree_sum._underway, "all kernels are compiled", 10)


def kernel_for(length: int, dtype: torch.dtype = torch.float32, adds: tuple[tuple[int, int], ...] = ADDS) -> Any:
    """What a fold of rows of this length would use. Each length has a TreeSum of its own."""
    values = torch.zeros(3, length, dtype=dtype)
    return TreeSum(3, adds, 0)._kernel_for(values, 0.5, torch.empty(length, dtype=dtype))


def test_rows_of_all_lengths_share_one_kernel(compiler: Compiler) -> None:
    for length in (16, 32, 64):
        assert kernel_for(length) is None
    compiler.may_end.set()
    wait_until(lambda: kernel_for(16) is not None, "the kernel is compiled", 5)
    assert kernel_for(32) is kernel_for(64) is kernel_for(16)
    assert compiler.compiled == [(3, ADDS, 0, True, torch.float32)]


def test_no_kernel_is_used_while_another_one_is_compiled(compiler: Compiler) -> None:
    compiler.may_end.set()
    kernel_for(16)
    wait_until(lambda: kernel_for(16) is not None, "the first kernel is compiled", 5)
    compiler.may_end.clear()
    assert kernel_for(16, adds=((0, 2), (0, 1))) is None
    assert kernel_for(16) is None, "both are one function of Triton's, which must not be called by two threads at once"
    compiler.may_end.set()
    wait_until(lambda: kernel_for(16) is not None, "the second kernel is compiled", 5)


def test_one_kernel_is_compiled_at_a_time_by_a_thread_that_does_not_keep_the_process_alive(compiler: Compiler) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        kernel_for(16, dtype)
    wait_until(lambda: bool(compiler.threads), "a compiler has begun", 5)
    assert len(compiler.threads) == 1
    compiler.may_end.set()
    wait_until(lambda: not tree_sum._underway, "all kernels are compiled", 5)
    assert len(compiler.compiled) == 3
    assert all(thread.daemon for thread in compiler.threads)


def test_a_kernel_that_cannot_be_compiled_is_not_tried_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*shape: Any) -> None:
        tried.append(shape)
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(sys.modules["lockstep.comm.tree_kernel"], "make_kernel", fail)
    kernel_for(16)
    wait_until(lambda: not tree_sum._underway, "the compiler has failed", 5)
    assert kernel_for(32) is None
    assert len(tried) == 1
