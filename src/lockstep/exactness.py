"""What must be asked of torch so that the same lane gives the same bits: deterministic kernels, a fixed number of threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.world import ask_cublas_to_repeat


class Determinism:
    """Asks for deterministic kernels (and ``threads`` intra-op threads) until ``close``. Global settings of the process."""

    def __init__(self, model: nn.Module, threads: int | None) -> None:
        before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        switches: Any = torch.utils.deterministic
        fill, benchmark = switches.fill_uninitialized_memory, torch.backends.cudnn.benchmark
        count = torch.get_num_threads()
        ask_cublas_to_repeat()
        torch.use_deterministic_algorithms(True)
        switches.fill_uninitialized_memory = False  # a help for debugging, which costs time
        torch.backends.cudnn.benchmark = False
        if threads is not None:
            torch.set_num_threads(threads)

        def restore() -> None:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            switches.fill_uninitialized_memory = fill
            torch.backends.cudnn.benchmark = benchmark
            if threads is not None:
                torch.set_num_threads(count)

        self._restore: Callable[[], None] | None = restore
        self._note = model.register_forward_hook(_explain, always_call=True)

    def close(self) -> None:
        """May be called twice."""
        self._note.remove()
        if self._restore is not None:
            self._restore()
            self._restore = None


def _explain(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Runs also when forward raised: torch's message names the operator, but not who asked for determinism."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and "deterministic" in str(error):
        error.add_note(
            "Lockstep asked for deterministic operators, since this Run is exact. Replace the operator named above, "
            "or pass exact=False to Run."
        )
