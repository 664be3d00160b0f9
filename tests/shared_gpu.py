"""Several NCCL ranks on one GPU: NCCL before 2.30 refuses them, and torch may come with an older one.

``LOCKSTEP_NCCL_LIB=/path/to/libnccl.so.2`` names a newer NCCL for the processes of tests and benchmarks. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "LOCKSTEP_NCCL_LIB"
_MAX_CTAS = "4"  # several ranks must fit on the GPU at once, or they wait for each other for ever


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of a process that shares its GPU with other NCCL ranks. Empty if no library is named.

    They must be set when the process starts: a fork gets the NCCL of the process that it is forked from.
    """
    library = environ.get(VARIABLE, "")
    if not library:
        return {}
    if not os.path.isfile(library):
        raise FileNotFoundError(f"{VARIABLE}={library!r} is not a file. Name a libnccl.so.2 of NCCL 2.30 or newer, or unset it.")
    preloaded = ":".join(filter(None, [os.path.abspath(library), environ.get("LD_PRELOAD", "")]))
    return {"LD_PRELOAD": preloaded, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": _MAX_CTAS}


def why_no_nccl(ranks: int, gpus: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why so many ranks cannot meet over NCCL on a machine with so many GPUs, or None if they can."""
    if ranks <= gpus or (gpus and ranks > 1 and environ.get(VARIABLE)):
        return None
    if not gpus:
        return "there is no NVIDIA GPU"
    return f"{ranks} NCCL ranks need {ranks} GPUs, or NCCL 2.30 or newer to share one: set {VARIABLE}=/path/to/libnccl.so.2"
