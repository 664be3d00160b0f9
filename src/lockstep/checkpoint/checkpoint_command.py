"""`lockstep checkpoint list | verify | export`: shows, checks and exports the checkpoints of a run.

Imports torch only to verify and to export.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.atomic_file import Piece, write_atomically
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.retention import CheckpointFolder, Retention
from lockstep.checkpoint.storage import open_storage
from lockstep.checkpoint.tensor_file import DamagedCheckpointError
from lockstep.errors import UsageError
from lockstep.launcher.arguments import whole_number, write


def show(retention: Retention, given: argparse.Namespace) -> int:
    """Print a line for each checkpoint, newest first. Reads the manifests, not the tensors."""

    def describe(folder: CheckpointFolder, manifest: Manifest) -> str:
        files = f"{len(manifest.files)} files, {_size(manifest)}"
        return f"step {manifest.step}, saved {manifest.made} by {manifest.workers} workers, {files}"

    return _print(retention, _select(retention), describe)


def verify(retention: Retention, given: argparse.Namespace) -> int:
    """Read every byte of every checkpoint, or of the checkpoint of ``--step``."""
    from lockstep.checkpoint.reader import read_tensors

    def describe(folder: CheckpointFolder, manifest: Manifest) -> str:
        read_tensors(retention.storage, folder.name, manifest)
        return f"intact: {len(manifest.tensors)} tensors, {_size(manifest)}"

    return _print(retention, _select(retention, given.step), describe)


def _print(retention: Retention, folders: Sequence[CheckpointFolder], describe: Callable[[CheckpointFolder, Manifest], str]) -> int:
    code = 0
    for folder in folders:
        try:
            line = describe(folder, retention.manifest(folder))
        except DamagedCheckpointError as damage:
            code, line = 1, f"damaged: {damage}"
        write(1, f"{folder.name}  {line}\n")
    return code


def export(retention: Retention, given: argparse.Namespace) -> int:
    """Write the model's weights, verified, into one file that any reader of safetensors loads."""
    target = Path(given.file)
    if target.is_dir():
        target = target / "model.safetensors"
    if target.exists():
        raise UsageError(f"{target} exists already. Remove it, or name another file.")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}. Make it, or name another file.")
    folder = _select(retention, given.step)[0]
    try:
        manifest = retention.manifest(folder)
        nbytes = _write_model(retention, folder, manifest, target)
    except DamagedCheckpointError as damage:
        remedy = "Choose another checkpoint with --step; `lockstep checkpoint list` shows them."
        write(2, f"lockstep: {folder.name} is damaged: {damage}. {remedy}\n")
        return 1
    write(1, f"{target}  {len(manifest.model)} tensors of step {manifest.step}, {nbytes / 1e6:.1f} MB\n")
    return 0


def _write_model(retention: Retention, checkpoint: CheckpointFolder, manifest: Manifest, target: Path) -> int:
    """Write ``target`` as the package ``safetensors`` lays out a model. Returns the number of bytes.

    Tied weights are written once; their other names are in the metadata.
    """
    from lockstep.checkpoint.reader import read_tensors
    from lockstep.checkpoint.snapshot import METADATA, memory_of, plan_file
    from lockstep.comm.base import bits

    tensors = read_tensors(retention.storage, checkpoint.name, manifest, only=list(manifest.model.values()))
    names = {number: name for name, number in manifest.model.items()}
    named = {number: (names[number], tensors[number]) for number in sorted(tensors)}
    plan = plan_file(target.name, named, {**METADATA, **manifest.aliases})
    pieces: list[Piece] = [plan.header, *(memory_of(bits(tensors[entry.number])) for entry in plan.entries)]
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_atomically(target.name, pieces, folder)
    finally:
        os.close(folder)
    return len(plan.header) + plan.bytes


def _select(retention: Retention, step: int | None = None) -> list[CheckpointFolder]:
    """Return all checkpoints, or those of one step, newest first; at least one."""
    published = retention.published()
    found = [folder for folder in published if step is None or folder.step == step]
    if not published:
        raise UsageError(
            f"there is no checkpoint in {retention.storage.url}. Name the folder that was given to Run(checkpoint=...)."
        )
    if not found:
        steps = ", ".join(str(folder.step) for folder in published)
        raise UsageError(f"there is no checkpoint of step {step} in {retention.storage.url}. Choose one of these steps: {steps}.")
    return found


def _size(manifest: Manifest) -> str:
    return f"{sum(file.bytes for file in manifest.files.values()) / 1e6:.1f} MB"


def add_parsers(commands: Any) -> None:
    """Add `checkpoint` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command.

    It returns the exit code, 1 if a checkpoint is damaged.
    """
    parser = commands.add_parser("checkpoint", help="list, verify or export the checkpoints of a run", allow_abbrev=False)
    parser.set_defaults(execute=_no_command)
    actions = parser.add_subparsers(metavar="COMMAND")
    for name, function, help in (
        ("list", show, "print a line for each checkpoint, newest first"),
        ("verify", verify, "read every byte of each checkpoint"),
        ("export", export, "write the weights of the newest checkpoint to one model.safetensors"),
    ):
        action = actions.add_parser(name, help=help, allow_abbrev=False)
        action.set_defaults(execute=partial(_execute, function))
        action.add_argument("folder", metavar="FOLDER", help="the folder or URL that was given to Run(checkpoint=...)")
        if name == "export":
            action.add_argument("file", metavar="FILE", nargs="?", default=os.curdir, help="default: ./model.safetensors")
        if name != "list":
            action.add_argument("--step", type=whole_number(0), metavar="N", help="only the checkpoint of step N")


def _execute(function: Callable[[Retention, argparse.Namespace], int], given: argparse.Namespace) -> int:
    try:
        return function(Retention(open_storage(given.folder)), given)
    except OSError as error:
        raise UsageError(str(error)) from error


def _no_command(given: argparse.Namespace) -> int:
    raise UsageError(
        "no command was given. `lockstep checkpoint list FOLDER` lists the checkpoints; `verify` and `export` exist too."
    )
