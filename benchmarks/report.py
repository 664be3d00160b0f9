"""Writes a benchmark's numbers with the machine and the command that made them."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def write(name: str, data: dict[str, Any], table: str, command: str) -> None:
    """``results/NAME.json`` with everything, ``results/NAME.md`` to read."""
    folder = Path(os.environ.get("BENCHMARK_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    about = ", ".join(f"{k} {v}" for k, v in data["machine"].items() if v is not None)
    (folder / f"{name}.md").write_text(f"Made by `{command}` on: {about}.\n\n{table}\n")
