"""Runs the code blocks of one page, in order, as its reader would.

    python     executed; all blocks of a page share their names. A block that begins with `# train.py` is written to that file too
    bash       executed by bash in the page's folder; what it printed is `output` in later Python blocks
    console    the lines after `$ ` are executed, and what is shown below them must be printed, in that order; numbers may differ
    diff       both sides are executed
    text       not code: a picture, or an excerpt of a file

Hidden blocks and blocks that are not run are comments of Sybil's: `invisible-code-block: python`, `skip: next "the reason"`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, SkipParser

import lockstep

__all__ = ["F", "build", "torch"]  # what the README's loop uses

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "console", "diff", "text")
FENCE = re.compile(r"^ *(```+|:::+)(\S*)", re.MULTILINE)
SKIP = re.compile(r"^(?:%|<!--+) *skip: *(\w+)(.*?)(?:--+>)?$", re.MULTILINE)
# What the commands of a page mean here: this interpreter's programs; nothing is installed, and make only says what it would do.
PROGRAMS = {
    "lockstep": 'exec "$PYTHON" -m lockstep "$@"',
    "python": 'exec "$PYTHON" "$@"',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
    "make": 'exec "$MAKE" -C "$ROOT" --dry-run "$@" >/dev/null',
    "pip": 'echo "pip $*"',
}


def parse(page: Path) -> Document:
    """The page's blocks, in order; evaluate each."""
    document = Document.parse(
        str(page),
        CodeBlockParser("python", Python()),
        CodeBlockParser("bash", bash),
        CodeBlockParser("console", console),
        CodeBlockParser("diff", diff),
        SkipParser(),
    )
    document.namespace["output"] = ""
    return document


def languages(text: str) -> list[str]:
    """Of all fenced blocks. Directives of Sphinx (`{toctree}`), which hold no code, are left out."""
    found, fence = [], ""
    for match in FENCE.finditer(text):
        if fence and match[1] == fence and not match[2]:
            fence = ""
        elif not fence:
            fence = match[1]
            found.append(match[2])
    return [language for language in found if not re.fullmatch(r"\{(?!code|sourcecode)[a-z-]+\}", language)]


class Python:
    def __init__(self) -> None:
        self._run = PythonEvaluator()

    def __call__(self, example: Example) -> None:
        name = re.match(r"# (\w+\.py)\n", example.parsed)
        if name is not None:
            Path(name[1]).write_text(example.parsed)
        self._run(example)


def bash(example: Example) -> None:
    example.namespace["output"] = shell(example.parsed)


def console(example: Example) -> str | None:
    """An error message if something of what is shown was not printed."""
    lines = example.parsed.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    example.namespace["output"] = shell("\n".join(commands))
    printed = iter([masked(line) for line in example.namespace["output"].splitlines()])
    shown = [line for line in lines if line.strip() and not line.startswith("$ ")]
    missing = [line for line in shown if masked(line) not in printed]  # in order: the iterator is used up by what was found
    return f"not printed: {missing[0]}\nprinted was:\n{example.namespace['output']}" if missing else None


def masked(line: str) -> str:
    """Without what differs from run to run: numbers, hexadecimal ones too, the name of the host, and the path of the folder."""
    line = re.sub(r"\S*/(?=lockstep-runs/|checkpoints\b)", "", line)
    line = re.sub(r" on \S+ failed", " on HOST failed", line)
    return re.sub(r"\b[0-9a-f]{12,}\b|\d+([.:,]\d+)*", "N", line).rstrip()


def diff(example: Example) -> None:
    for sign in "-+":
        side = [line[1:] for line in example.parsed.splitlines() if line[:1] in (" ", sign, "")]
        names = dict(example.namespace)
        try:
            exec(compile("\n".join(side), example.path, "exec"), names)
        finally:
            close_runs(names)


def close_runs(names: dict[str, Any]) -> None:
    """A model belongs to one Run at a time."""
    for value in list(names.values()):
        if isinstance(value, lockstep.Run):
            value.close()


def shell(commands: str) -> str:
    """What the commands print; they must end with 0."""
    programs = Path("programs").resolve()
    programs.mkdir(exist_ok=True)
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    environment |= {"PYTHON": sys.executable, "MAKE": shutil.which("make") or "", "ROOT": str(ROOT)}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\nended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, torch.utils.data.Dataset[Any]]:
    """Model, optimizer, scheduler and data of the README's loop."""
    model = torch.nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(2, (512,)))
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 10), data
