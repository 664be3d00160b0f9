"""What a person reads: the table of steps, the table of goals, and what failed or is missing. Pure: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.goals import Goal, Row, figure, goals, ratio, summary
from benchmarks.gpu.variants import VARIANTS, Variant

_BASES = {  # what the ratios of a variant are taken of, by whether it asks for deterministic kernels
    False: ("bare", "torch DDP", "bare captured"),
    True: ("bare, deterministic", "torch DDP, deterministic", "bare captured, deterministic"),
}


def text(rows: Sequence[Row], missing: Sequence[tuple[str, str]]) -> str:
    """Everything. ``missing``: what was not measured at all, and why."""
    parts = [steps(rows), _remarks(rows, missing), goal_table(goals(rows))]
    return "\n\n".join(part for part in parts if part)


def steps(rows: Sequence[Row]) -> str:
    """One line for each variant that was measured. Ratios are those of variants with the same kernels."""
    lines = [
        "| step | ranks | variant | ms (quartiles) | ms by the clock | x bare | x torch DDP | x bare captured | peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    known = {variant.name: variant for variant in VARIANTS}
    for row in rows:
        for name, found in row["variants"].items():
            if "ms" not in found:
                continue
            lines.append(
                f"| {row['case']} | {row['ranks']} | {name} | {found['ms']:.2f} ({found['p25_ms']:.2f}-{found['p75_ms']:.2f}) "
                f"| {found['wall_ms']:.2f} | {' | '.join(_ratios(row, known[name]))} | {_peak(row, name)} |"
            )
    return "\n".join(lines)


def _ratios(row: Row, variant: Variant) -> list[str]:
    found = [ratio(row, variant.name, base) for base in _BASES[variant.kernels.value == "deterministic"]]
    if not variant.is_captured:
        found[2] = None
    return ["-" if value is None else f"{value:.3f}" for value in found]


def _peak(row: Row, name: str) -> str:
    value = figure(row, name, "peak_mb")
    return "-" if value is None else f"{value:.0f}"


def _remarks(rows: Sequence[Row], missing: Sequence[tuple[str, str]]) -> str:
    """What was not measured and why, what failed, and what must be known to read the table. Equal reasons are said once."""
    places: dict[tuple[str, str], list[str]] = {}
    for what, why in missing:
        places.setdefault(("not measured", why), []).append(what)
    for row in rows:
        where = f"{row['case']} ({_ranks(row)})"
        if not row["complete"]:
            places.setdefault(("ended early", "some variants have few rounds or none"), []).append(where)
        for name, found in row["variants"].items():
            if "error" in found:
                places.setdefault((f"failed: {name}", f"`{found['error'].replace('`', '')}`"), []).append(where)
            elif "skipped" in found:
                places.setdefault((f"not measured: {name}", found["skipped"]), []).append(where)
    lines = [f"- {what}: {why}. {'; '.join(found)}" for (what, why), found in places.items()]
    shared = [row for row in rows if row["shares_gpu"]]
    if shared:
        over = ", ".join(sorted({f"NCCL {row['nccl']}" for row in shared if row["nccl"]} or {shared[0]["backend"]}))
        lines.append(
            f"- {', '.join(sorted({_ranks(row) for row in shared}))} share one GPU, over {over}: what they exchange goes "
            "through its memory and its processors. Only the ratios between variants mean something there."
        )
    return "\n".join(lines)


def _ranks(row: Row) -> str:
    return f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"


def goal_table(found: Sequence[Goal]) -> str:
    """The verdicts, those missed first."""
    order = {False: 0, None: 1, True: 2}
    words = {False: "**missed**", None: "not measured", True: "met"}
    lines = [summary(found), "", "| goal | step | ranks | measured | limit | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {goal.what} | {goal.case} | {goal.ranks} | {goal.measured_text} | {goal.limit_text} | {words[goal.is_met]} |"
        for goal in sorted(found, key=lambda goal: order[goal.is_met])
    ]
    return "\n".join(lines)
