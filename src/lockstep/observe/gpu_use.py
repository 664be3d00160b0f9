"""GpuUse: what a worker uses of its GPU, for the recording. Never waits for the device."""

from __future__ import annotations

import torch


class GpuUse:
    """Of one device. On a CPU it says 0 bytes and -1 percent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._knows_percent = device.type == "cuda"

    def memory_bytes(self) -> int:
        """Return how much memory is allocated.

        Only the main thread may call it. torch takes the lock of its allocator and keeps the interpreter's lock meanwhile. If the
        main thread waits inside the allocator for work of a lost worker, another thread that called this would stop the threads
        that can end the wait.
        """
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def percent(self) -> int:
        """Return the utilisation, or -1 if it is not known. It may hang in the driver.

        torch reads it with NVIDIA's library for Python, which ``pip install 'lockstep-ddp[gpu]'`` installs.
        """
        if self._knows_percent:
            try:
                return int(torch.cuda.utilization(self._device))
            except Exception:  # noqa: BLE001 - no library, a part of a GPU, a container: each has an error class of its own
                self._knows_percent = False
        return -1
