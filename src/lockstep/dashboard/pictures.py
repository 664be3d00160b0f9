"""The charts of a run as PNG files, for papers: drawn by matplotlib from what the report shows. Needs no display."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.dashboard.page_files import missing
from lockstep.recording.records import OWN_WORK, PHASES

Data = dict[str, Any]
_DPI = 200
_WIDTH = 6.0
_COLORS = {
    "data": "#e3a63b",
    "lane": "#9a83cf",
    "forward": "#6ba3e0",
    "backward": "#2f6dba",
    "optimizer": "#37967a",
    "body": "#86bfa8",
    "exchange": "#d9695f",
    "confirm": "#eaa79f",
    "between": "#a3acb8",
    "checkpoint": "#8a6a46",
    "evaluate": "#b3a437",
    "recovery": "#a91e4f",
    "outside": "#c9ced6",
}
_ABSENT, _FAULT, _GOOD = "#414b59", "#c02b3a", "#1d7f55"


def write_pictures(data: Data, folder: Path) -> list[Path]:
    """Draw what there is data for. ``data`` is that of ``report_data``. Returns the files that were written.

    Raises:
        UsageError: matplotlib is not installed.
        OSError: The folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "png") from error
    folder.mkdir(parents=True, exist_ok=True)
    groups, metrics = _joined(data["steps"]), _joined(data["metrics"])
    name = "loss" if "loss" in data["run"]["values"] else next(iter(data["run"]["values"]), "")
    workers = sorted({int(id) for group in groups for id in group["w"]} | {int(id) for id in data["lives"]})
    tall = 1.1 + 0.22 * len(workers)
    drawings: list[tuple[str, float, bool, Callable[[Any], None]]] = [
        ("loss", 3.0, any(name in group["v"] for group in metrics), lambda axes: _loss(axes, metrics, name)),
        ("throughput", 2.6, bool(groups), lambda axes: _throughput(axes, groups)),
        ("breakdown", 3.2, bool(groups), lambda axes: _breakdown(axes, groups)),
        ("workers", tall, bool(groups), lambda axes: _heat_map(axes, groups, workers, data)),
        ("timeline", tall, bool(data["generations"]), lambda axes: _timeline(axes, workers, data)),
    ]
    written = []
    for file, height, has_data, draw in drawings:
        if has_data:
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
            figure.savefig(folder / f"{file}.png", dpi=_DPI)
            written.append(folder / f"{file}.png")
    return written


def _joined(tiers: Data | None) -> list[Data]:
    """The groups of both tiers, as step_tiers.py says."""
    if tiers is None:
        return []
    first = tiers["fine"][0]["s"] if tiers["fine"] else float("inf")
    return [group for group in tiers["coarse"] if group["e"] < first] + list(tiers["fine"])


def _loss(axes: Any, groups: list[Data], name: str) -> None:
    known = [group for group in groups if group["v"].get(name)]
    steps = [group["e"] for group in known]
    axes.fill_between(
        steps, [group["v"][name][1] for group in known], [group["v"][name][2] for group in known], color="#3b76d1", alpha=0.2, lw=0
    )
    axes.plot(steps, [group["v"][name][0] for group in known], color="#3b76d1", lw=1.2)
    axes.set(xlabel="step", ylabel=name)
    axes.margins(x=0.01)


def _throughput(axes: Any, groups: list[Data]) -> None:
    has_samples = any(group["r"] for group in groups)
    axes.plot([group["e"] for group in groups], [group["r" if has_samples else "q"] for group in groups], color="#2f9a78", lw=1.2)
    axes.set(xlabel="step", ylabel="samples/s" if has_samples else "steps/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def _breakdown(axes: Any, groups: list[Data]) -> None:
    order = [*(each for each in PHASES if each in OWN_WORK), *(each for each in PHASES if each not in OWN_WORK)]
    used = [phase for phase in order if any(group["ph"].get(phase) for group in groups)]
    parts = [[1000 * (group["ph"].get(phase) or 0.0) for group in groups] for phase in used]
    axes.stackplot([group["e"] for group in groups], parts, labels=used, colors=[_COLORS[phase] for phase in used], lw=0)
    totals = sorted(map(sum, zip(*parts, strict=True)))
    usual = totals[int(0.95 * (len(totals) - 1))] * 1.5
    axes.set_ylim(0, min(totals[-1], usual) * 1.05 or 1)
    axes.set(xlabel="step", ylabel="ms per step")
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)


def _heat_map(axes: Any, groups: list[Data], workers: list[int], data: Data) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    known = LinearSegmentedColormap.from_list("own work", ["#cfe8dc", "#eef2f6", "#f6d08a", "#ea8a4a", "#c7283b"])
    colors = known.with_extremes(bad=_ABSENT)
    edges = [group["s"] - 0.5 for group in groups] + [groups[-1]["e"] + 0.5]
    typical = [statistics.median([own for own, *_ in group["w"].values()] or [0.0]) for group in groups]
    nan = float("nan")
    cells = [
        [_own(group, id) / middle if middle and _own(group, id) else nan for group, middle in zip(groups, typical, strict=True)]
        for id in workers
    ]
    mesh = axes.pcolormesh(edges, range(len(workers) + 1), _masked(cells), vmin=0.8, vmax=1.6, cmap=colors, rasterized=True)
    for line in range(1, len(workers)):
        axes.axhline(line, color="white", lw=1.2)
    for entry in data["entries"]:
        if entry["mark"] == "died" and entry["worker"] in workers:
            step = max([group["e"] for group in groups if group["b"] <= entry["t"]], default=groups[0]["s"])
            axes.plot(
                step + 0.5, workers.index(entry["worker"]) + 0.5, "X", color=_FAULT, ms=7, mec="white", mew=0.8, clip_on=False
            )
    _name_workers(axes, workers, 0.5, data["run"]["members"])
    axes.set(xlabel="step", ylabel="worker")
    axes.figure.colorbar(mesh, ax=axes, pad=0.015, extend="max", label="own work / median")


def _own(group: Data, worker: int) -> float:
    found = group["w"].get(worker)
    return float(found[0]) if found and found[0] else 0.0


def _masked(cells: list[list[float]]) -> Any:
    import numpy as np  # a dependency of matplotlib

    return np.ma.masked_invalid(np.array(cells, dtype=float))


def _timeline(axes: Any, workers: list[int], data: Data) -> None:
    end = max(float(data["run"]["elapsed"]), 1e-3)
    unit, name = (3600.0, "hours") if end > 3 * 3600 else (60.0, "minutes") if end > 180 else (1.0, "seconds")
    generations = data["generations"]
    for generation, after in zip(generations, [*generations[1:], {"t": end}], strict=True):
        for id in generation["members"]:
            gone = data["lives"].get(id, ["", "", 0])[2]
            until = min(after["t"], gone) if gone >= generation["t"] > 0 else after["t"]
            color = "#a8c4ea" if generation["number"] % 2 else "#7ea6dd"
            axes.barh(workers.index(id), (until - generation["t"]) / unit, left=generation["t"] / unit, height=0.6, color=color)
    for generation in generations[1:]:
        axes.axvline(generation["t"] / unit, color="#566273", lw=0.8, ls=":")
    for entry in data["entries"]:
        if entry["mark"] == "saved":
            axes.plot(entry["t"] / unit, -0.75, "D", color="#1f5fc4", ms=3.5)
        elif entry["mark"] in ("died", "joined") and entry["worker"] in workers:
            marker, color = ("X", _FAULT) if entry["mark"] == "died" else (">", _GOOD)
            axes.plot(entry["t"] / unit, workers.index(entry["worker"]), marker, color=color, ms=7, mec="white", mew=0.8)
    _name_workers(axes, workers, 0.0, data["run"]["members"])
    axes.set(xlabel=f"{name} since the beginning", ylabel="worker")


def _name_workers(axes: Any, workers: list[int], shift: float, members: list[int]) -> None:
    """As the page: each worker by its number, and by its rank if that is another number."""
    ranks = {id: rank for rank, id in enumerate(members)}
    names = [str(id) if ranks.get(id, id) == id else f"{id} (rank {ranks[id]})" for id in workers]
    every = max(1, len(workers) // 40)
    axes.set_yticks([at + shift for at in range(0, len(workers), every)], names[::every])
    axes.invert_yaxis()
