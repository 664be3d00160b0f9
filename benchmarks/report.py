"""Writes a benchmark's numbers with the machine and the command that made them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

RESULTS = Path(__file__).parent / "results"


def run_workers(body: Callable[..., None], size: int, *args: Any, method: str = "fork") -> None:
    """``body(rank, size, *args)`` in ``size`` processes; forked from this one, unless they use CUDA (``spawn``)."""
    mp.start_processes(_enter, args=(body, size, args), nprocs=size, start_method=method)


def _enter(rank: int, body: Callable[..., None], size: int, args: tuple[Any, ...]) -> None:
    body(rank, size, *args)


def machine(gpu: bool = False) -> dict[str, Any]:
    """Asks CUDA for nothing unless ``gpu``: workers forked later could not use torch then."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
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


def line_chart(title: str, below: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of few lines with few points: x at equal distances, y from 0 to 110 (percent)."""
    width, height, left, top, bottom = 640, 360, 60, 50, 50
    places = [x for x, _ in next(iter(lines.values()))]

    def at(index: int, value: float) -> tuple[float, float]:
        x = left + (width - left - 30) * (index + 0.5) / len(places)
        return round(x, 1), round(top + (height - top - bottom) * (1 - value / 110), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="24" font-size="15">{title}</text>',
    ]
    for value in range(0, 101, 20):
        y = at(0, value)[1]
        parts.append(f'<line x1="{left}" x2="{width - 30}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value}</text>')
    for index, place in enumerate(places):
        parts.append(f'<text x="{at(index, 0)[0]}" y="{height - bottom + 18}" text-anchor="middle">{place:g}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">{below}</text>')
    for number, (name, points) in enumerate(lines.items()):
        color = ("#888888", "#0b6bcb", "#c2410c")[number % 3]
        spots = [at(index, value) for index, (_, value) in enumerate(points)]
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="2.5" points="{" ".join(f"{x},{y}" for x, y in spots)}"/>'
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>' for x, y in spots]
        parts.append(f'<text x="{left + 14}" y="{height - bottom - 14 - 20 * number}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
