"""TreeSum: the additions of one fold on memory of one device. On CUDA one kernel performs them all, if Triton is there.

    the chain of torch's additions      v0 += v1    v2 += v3    v0 += v2    v0 *= scale       reads and writes memory each time
    the kernel (tree_kernel.py)         out = ((v0 + v1) + (v2 + v3)) * scale                 reads and writes memory once

Both round every addition to the dtype of the values, so both give the same bits, and either may be used at any time. A kernel is
compiled by a background thread, since another set of workers needs another kernel, and recovery should not wait for a compiler.
Until the kernel is there, and on machines where it cannot be compiled (no Triton, no C compiler), the chain is used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("lockstep")
_MOST_VALUES = 32  # more would not fit the registers
UNIT = 16
"""The kernel adds whole units of this many elements."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Kernel = Callable[[Tensor, Tensor, float], None]
"""``kernel(values, out, scale)`` enqueues the additions on the current stream."""


class TreeSum:
    """The sum of ``count`` values: ``adds`` is a list of (to, from), value[to] += value[from]; the total is value[``root``]."""

    def __init__(self, count: int, adds: Sequence[tuple[int, int]], root: int) -> None:
        self.count, self._adds, self._root = count, tuple(adds), root
        self._kernels: dict[tuple[torch.dtype, torch.device, bool], Kernel | None] = {}

    def run(self, values: Tensor, scale: float | None, out: Tensor) -> None:
        """Write the total of the rows of ``values``, times ``scale``, to ``out``. The rows are overwritten."""
        kernel = self._kernel_for(values, scale, out) if values.is_cuda else None
        if kernel is None:
            self._chain(values.unbind(), scale, out)
            return
        kernel(values, out, 1.0 if scale is None else scale)
        if scale is not None and values.dtype == torch.float64:  # the kernel's factor is a float32
            out.mul_(scale)

    def _chain(self, rows: Sequence[Tensor], scale: float | None, out: Tensor) -> None:
        for to, other in self._adds[:-1]:
            torch.add(rows[to], rows[other], out=rows[to])
        if self._adds:
            to, other = self._adds[-1]
            torch.add(rows[to], rows[other], out=out)
        else:
            out.copy_(rows[self._root])
        if scale is not None:
            out.mul_(scale)

    def _kernel_for(self, values: Tensor, scale: float | None, out: Tensor) -> Kernel | None:
        """Returns a kernel that is compiled, or None. The first call for a dtype starts the compiler."""
        if out.numel() % UNIT or out.data_ptr() % UNIT or not 1 < self.count <= _MOST_VALUES:
            return None
        key = (values.dtype, values.device, scale is not None and values.dtype != torch.float64)
        if key not in self._kernels:
            self._kernels[key] = None
            if values.dtype in _DTYPES:
                threading.Thread(target=self._compile, args=key, name="lockstep-compile").start()
        return self._kernels[key]

    def _compile(self, dtype: torch.dtype, device: torch.device, is_scaled: bool) -> None:
        """Compile a kernel and run it once on a stream of its own, which loads it. Run by a thread."""
        try:
            from lockstep.comm.tree_kernel import make_kernel

            kernel = make_kernel(self.count, self._adds, self._root, is_scaled)
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                memory = torch.zeros(self.count + 1, UNIT, dtype=dtype, device=device)
                kernel(memory[1:], memory[0], 1.0)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises, the chain does the same work
            _log.debug("the sums of gradients need several kernels per bucket, because Triton has not compiled one: %r", error)
            return
        self._kernels[dtype, device, is_scaled] = kernel


def compiled(total: Any) -> bool:
    """Whether all kernels that ``total`` was asked for are compiled. For tests and benchmarks."""
    return all(kernel is not None for kernel in total._kernels.values())
