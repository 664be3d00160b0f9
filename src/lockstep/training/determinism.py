"""Determinism: asks torch for deterministic kernels and a fixed number of threads, so that a lane always gives the same bits.

These are settings of the whole process. They hold from the first ``Determinism`` until the last one is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.world import ask_cublas_to_repeat

_open = 0
_restore: Callable[[], None] = lambda: None  # noqa: E731


class Determinism:
    """Deterministic kernels, and ``threads`` intra-op threads unless None, until ``close``. ``close`` may be called twice."""

    def __init__(self, model: nn.Module, threads: int | None) -> None:
        global _open, _restore
        if _open == 0:
            _restore = _remember()
        _open += 1
        self._is_open = True
        ask_cublas_to_repeat()
        torch.use_deterministic_algorithms(True)
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False  # only helps debugging, and costs time
        torch.backends.cudnn.benchmark = False
        if threads is not None:
            torch.set_num_threads(threads)
        self._hook = model.register_forward_hook(_explain, always_call=True)

    def close(self) -> None:
        global _open
        self._hook.remove()
        if self._is_open:
            self._is_open = False
            _open -= 1
            if _open == 0:
                _restore()


def _remember() -> Callable[[], None]:
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    switches: Any = torch.utils.deterministic
    fill, benchmark, threads = switches.fill_uninitialized_memory, torch.backends.cudnn.benchmark, torch.get_num_threads()

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    return restore


def _explain(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Add a note to torch's error, which names the operator but not who asked for determinism. Called also if forward raised."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and "deterministic" in str(error):
        error.add_note(
            "Lockstep asked for deterministic operators, because this Run is exact. Replace the operator named above, "
            "or pass exact=False to Run."
        )
