"""The command: python -m benchmarks.gpu. It prints the tables and writes results/gpu.json and results/gpu.md."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu import __doc__ as ABOUT
from benchmarks.gpu import tables
from benchmarks.gpu.measuring import share_of
from benchmarks.gpu.models import GPU_CASES
from benchmarks.gpu.supervisor import Configuration, measure
from benchmarks.gpu.variants import VARIANTS

WRAP_UP_S = 5.0
RANKS, SECONDS = [1, 2], 230.0
CASES = [case.key for case in GPU_CASES]


def main() -> None:
    options = parse()
    if options.cpu_check and "BENCHMARK_RESULTS" not in os.environ:
        os.environ["BENCHMARK_RESULTS"] = tempfile.mkdtemp(prefix="benchmark-gpu-")
    began = time.time()
    device_type = "cpu" if options.cpu_check else "cuda"
    gpus = 0 if options.cpu_check else torch.cuda.device_count()
    backend = "gloo" if options.cpu_check else options.backend
    configs = [Configuration(size, device_type, backend, options.cases, options.variants) for size in options.ranks]
    end = began + options.seconds - WRAP_UP_S
    rows, missing = list[dict[str, Any]](), not_asked_for(options)
    todo = []
    for config in configs:
        reason = config.why_not(gpus)
        if reason is None:
            todo.append(config)
        else:
            missing.append((_name(config.size, backend), reason))
    for number, config in enumerate(todo):
        now = time.time()
        found = measure(config, gpus, now + share_of(end - now, number, len(todo)))
        rows += [found.rows[key] for key in config.cases if key in found.rows]
        missing += [(f"{_name(config.size, backend)}, {key}", why) for key, why in found.missing.items()]
        _write(rows, missing, options)  # whatever comes next, this is kept
    text = _write(rows, missing, options)
    print(f"\n{text}\n\ntook {time.time() - began:.0f} s")
    if not rows:
        raise SystemExit(1)


def _name(size: int, backend: str) -> str:
    return f"{size} rank{'s' * (size > 1)} over {backend}"


def not_asked_for(options: argparse.Namespace) -> list[tuple[str, str]]:
    """What the command would have measured without its options, and which option left it out."""
    no_ranks, no_case = f"left out by --ranks {_joined(options.ranks)}", f"left out by --cases {_joined(options.cases)}"
    ranks = [(_name(size, options.backend), no_ranks) for size in RANKS if size not in options.ranks]
    return ranks + [(case, no_case) for case in CASES if case not in options.cases]


def command(options: argparse.Namespace) -> str:
    """What was typed, without options that are at their defaults."""
    parts = ["python -m benchmarks.gpu"]
    parts += ["--cpu-check"] * options.cpu_check
    parts += [f"--ranks {_joined(options.ranks)}"] * (options.ranks != RANKS)
    parts += [f"--cases {_joined(options.cases)}"] * (options.cases != CASES)
    parts += [f"--variants '{';'.join(options.variants)}'"] * bool(options.variants)
    parts += [f"--backend {options.backend}"] * (options.backend != "nccl")
    parts += [f"--name {options.name}"] * (options.name != "gpu")
    return " ".join([*parts, f"--seconds {options.seconds:g}"])


def _joined(values: list[Any]) -> str:
    return ",".join(map(str, values))


def _write(rows: list[dict[str, Any]], missing: list[tuple[str, str]], options: argparse.Namespace) -> str:
    text = tables.text(rows, missing)
    machine = report.machine() | {"gpu": next((row["gpu"] for row in rows), None)}  # this process leaves the GPU alone
    report.write(options.name, {"machine": machine, "results": rows, "missing": missing}, text, command(options))
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=ABOUT, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=SECONDS, help=f"how long everything may take (default {SECONDS:g})")
    add("--ranks", type=_numbers, default=RANKS, help="numbers of ranks, such as 1,2,8 (default 1,2)")
    add("--cases", type=_words(CASES), default=CASES, help=f"some of {','.join(CASES)}")
    add("--variants", type=_words(names, ";"), default=[], help=f"some of these, with ';' between: {'; '.join(names)}")
    add("--backend", choices=["nccl", "gloo"], default="nccl", help="what carries gradients (default nccl)")
    add("--name", default="gpu", help="results/NAME.json and NAME.md (default gpu)")
    add("--cpu-check", action="store_true", help="tiny models on the CPU; results go to a temporary folder")
    options = parser.parse_args(arguments)
    if not options.cpu_check and not torch.cuda.is_available():
        parser.error("torch sees no NVIDIA GPU here. --cpu-check shows whether the benchmark itself works.")
    return options


def _numbers(text: str) -> list[int]:
    numbers = [int(each) for each in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of ranks is at least 1")
    return numbers


def _words(known: list[str], separator: str = ",") -> Any:
    def parse(text: str) -> list[str]:
        given = [each.strip() for each in text.split(separator)]
        unknown = [each for each in given if each not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(known)}")
        return given

    return parse


if __name__ == "__main__":
    main()
