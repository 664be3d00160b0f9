"""TreeSum: the additions of one fold on memory of one device. On CUDA one kernel performs them all, if Triton is there.

    the chain of torch's additions      v0 += v1    v2 += v3    v0 += v2    v0 *= scale       reads and writes memory each time
    the kernel (tree_kernel.py)         out = ((v0 + v1) + (v2 + v3)) * scale                 reads and writes memory once

Both round every addition to the dtype of the values, so both give the same bits, and either may be used at any time. A kernel is
compiled by a background thread, since another set of workers needs another kernel, and recovery should not wait for a compiler.
Rows of any length share it. The chain is used on machines where no kernel can be compiled (no Triton, no C compiler), and while any
kernel is compiled: all kernels are one function of Triton's, which is not made for two threads at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_log = logging.getLogger("lockstep")
_MOST_VALUES = 32  # more would not fit the registers
UNIT = 16
"""The kernel adds whole units of this many elements."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Kernel = Callable[[Tensor, Tensor, float], None]
"""``kernel(values, out, scale)`` enqueues the additions on the current stream."""


@dataclass(frozen=True)
class _KernelKind:
    """What a kernel is compiled for."""

    count: int
    adds: tuple[tuple[int, int], ...]
    root: int
    is_scaled: bool
    dtype: torch.dtype
    device: torch.device


_kernels: dict[_KernelKind, Kernel | None] = {}
"""Of this process. None: it is being compiled, or cannot be."""
_underway: set[_KernelKind] = set()
"""Those that are being compiled, or wait for it."""
_compiler = threading.Lock()


class TreeSum:
    """The sum of ``count`` values: ``adds`` is a list of (to, from), value[to] += value[from]; the total is value[``root``]."""

    def __init__(self, count: int, adds: Sequence[tuple[int, int]], root: int) -> None:
        self.count, self._adds, self._root = count, tuple(adds), root

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
        """Returns a kernel that is compiled, or None. The first call for a kind of kernel lets a thread compile it."""
        if out.numel() % UNIT or out.data_ptr() % UNIT or not 1 < self.count <= _MOST_VALUES or values.dtype not in _DTYPES:
            return None
        is_scaled = scale is not None and values.dtype != torch.float64
        kind = _KernelKind(self.count, self._adds, self._root, is_scaled, values.dtype, values.device)
        if kind not in _kernels:
            _kernels[kind] = None
            _underway.add(kind)
            # a daemon: a device that does not answer must not keep the process alive
            threading.Thread(target=_compile, args=(kind,), name="lockstep-compile", daemon=True).start()
        return None if _underway else _kernels[kind]


def _compile(kind: _KernelKind) -> None:
    """Compile a kernel and run it once on a stream of its own, which loads it. Run by a thread."""
    try:
        with _compiler:
            from lockstep.comm.tree_kernel import make_kernel

            kernel = make_kernel(kind.count, kind.adds, kind.root, kind.is_scaled)
            with torch.cuda.device(kind.device), torch.cuda.stream(torch.cuda.Stream(kind.device)):
                memory = torch.zeros(kind.count + 1, UNIT, dtype=kind.dtype, device=kind.device)
                kernel(memory[1:], memory[0], 1.0)
        _kernels[kind] = kernel
    except Exception as error:  # noqa: BLE001 - whatever Triton raises, the chain does the same work
        _log.debug("the sums of gradients need several kernels per bucket, because Triton has not compiled one: %r", error)
    finally:
        _underway.discard(kind)
