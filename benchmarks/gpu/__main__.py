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


def main() -> None:
    options = _options()
    began = time.time()
    device_type = "cpu" if options.cpu_check else "cuda"
    gpus = 0 if options.cpu_check else torch.cuda.device_count()
    backend = "gloo" if options.cpu_check else options.backend
    configs = [Configuration(size, device_type, backend, options.cases, options.variants) for size in options.ranks]
    end = began + options.seconds - WRAP_UP_S
    rows, missing = list[dict[str, Any]](), list[tuple[str, str]]()
    todo = []
    for config in configs:
        reason = config.why_not(gpus)
        if reason is None:
            todo.append(config)
        else:
            missing.append((_name(config), reason))
    for number, config in enumerate(todo):
        now = time.time()
        found = measure(config, gpus, now + share_of(end - now, number, len(todo)))
        rows += [found.rows[key] for key in config.cases if key in found.rows]
        missing += [(f"{_name(config)}, {key}", why) for key, why in found.missing.items()]
        _write(rows, missing, options)  # whatever comes next, this is kept
    text = _write(rows, missing, options)
    print(f"\n{text}\n\ntook {time.time() - began:.0f} s")
    if not rows:
        raise SystemExit(1)


def _name(config: Configuration) -> str:
    return f"{config.size} rank{'s' * (config.size > 1)} over {config.backend}"


def _write(rows: list[dict[str, Any]], missing: list[tuple[str, str]], options: argparse.Namespace) -> str:
    text = tables.text(rows, missing)
    machine = report.machine() | {"gpu": next((row["gpu"] for row in rows), None)}  # this process leaves the GPU alone
    command = "python -m benchmarks.gpu" + (" --cpu-check" if options.cpu_check else f" --seconds {options.seconds:g}")
    report.write(options.name, {"machine": machine, "results": rows, "missing": missing}, text, command)
    return text


def _options() -> argparse.Namespace:
    keys, names = [case.key for case in GPU_CASES], [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=ABOUT, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=230, help="how long everything may take (default 230)")
    add("--ranks", type=_numbers, default=[1, 2], help="numbers of ranks, such as 1,2,8 (default 1,2)")
    add("--cases", type=_words(keys), default=keys, help=f"some of {','.join(keys)}")
    add("--variants", type=_words(names, ";"), default=[], help=f"some of these, with ';' between: {'; '.join(names)}")
    add("--backend", choices=["nccl", "gloo"], default="nccl", help="what carries gradients (default nccl)")
    add("--name", default="gpu", help="results/NAME.json and NAME.md (default gpu)")
    add("--cpu-check", action="store_true", help="tiny models on the CPU; results go to a temporary folder")
    options = parser.parse_args()
    if options.cpu_check:
        os.environ.setdefault("BENCHMARK_RESULTS", tempfile.mkdtemp(prefix="benchmark-gpu-"))
    elif not torch.cuda.is_available():
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
