"""`lockstep checkpoint list | verify | export`: what a run has saved, for people. Imports torch only to verify and to export."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.retention import Retention, Slot
from lockstep.checkpoint.storage import open_storage
from lockstep.checkpoint.tensor_file import Damaged
from lockstep.errors import UsageError
from lockstep.launch.arguments import whole_number, write


def show(retention: Retention, given: argparse.Namespace) -> int:
    """A line for each, newest first. Manifests are read; tensors are not."""
    worst = 0
    for slot in _some(retention):
        try:
            manifest = retention.manifest(slot)
        except Damaged as damage:
            worst = 1
            write(1, f"{slot.folder}  damaged: {damage}\n")
            continue
        parts = f"{len(manifest.files)} files, {_size(manifest)}"
        write(1, f"{slot.folder}  step {manifest.step}, saved {manifest.made} by {manifest.workers} workers, {parts}\n")
    return worst


def verify(retention: Retention, given: argparse.Namespace) -> int:
    """Every byte of every checkpoint (or of one step's) is read."""
    from lockstep.checkpoint.reader import read_tensors

    worst = 0
    for slot in _some(retention, given.step):
        try:
            manifest = retention.manifest(slot)
            read_tensors(retention.storage, slot.folder, manifest)
            write(1, f"{slot.folder}  whole: {len(manifest.tensors)} tensors, {_size(manifest)}\n")
        except Damaged as damage:
            worst = 1
            write(1, f"{slot.folder}  damaged: {damage}\n")
    return worst


def export(retention: Retention, given: argparse.Namespace) -> int:
    """The model's weights alone, verified, in one file that any reader of safetensors loads."""
    from lockstep.checkpoint.export import write_model

    target = Path(given.file)
    if target.is_dir():
        target = target / "model.safetensors"
    if target.exists():
        raise UsageError(f"{target} is there already. Remove it, or name another file.")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}. Make it, or name another file.")
    slot = _some(retention, given.step)[0]
    try:
        manifest = retention.manifest(slot)
        nbytes = write_model(retention.storage, slot.folder, manifest, target)
    except Damaged as damage:
        write(
            2, f"lockstep: {slot.folder} is damaged: {damage}. Choose another with --step; `lockstep checkpoint list` shows them.\n"
        )
        return 1
    write(1, f"{target}  {len(manifest.model)} tensors of step {manifest.step}, {nbytes / 1e6:.1f} MB\n")
    return 0


def _some(retention: Retention, step: int | None = None) -> list[Slot]:
    """Newest first; at least one."""
    there = retention.whole()
    found = [slot for slot in there if step is None or slot.step == step]
    if not there:
        raise UsageError(
            f"there is no checkpoint in {retention.storage.url}. Name the storage that was given to Run(checkpoint=...)."
        )
    if not found:
        steps = ", ".join(str(slot.step) for slot in there)
        raise UsageError(f"there is no checkpoint of step {step} in {retention.storage.url}; there are those of {steps}.")
    return found


def _size(manifest: Manifest) -> str:
    return f"{sum(file.bytes for file in manifest.files.values()) / 1e6:.1f} MB"


def add_parser(commands: Any) -> None:
    """Add `checkpoint` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command.

    It returns the exit code, 1 if a checkpoint is damaged.
    """
    parser = commands.add_parser("checkpoint", help="list, verify or export the checkpoints of a run", allow_abbrev=False)
    parser.set_defaults(execute=_no_command)
    actions = parser.add_subparsers(metavar="COMMAND")
    for name, function, help in (
        ("list", show, "one line per checkpoint, newest first"),
        ("verify", verify, "read and check every byte"),
        ("export", export, "write the weights of the newest checkpoint to one model.safetensors"),
    ):
        action = actions.add_parser(name, help=help, allow_abbrev=False)
        action.set_defaults(execute=partial(_execute, function))
        action.add_argument("storage", metavar="PLACE", help="the folder or URL that was given to Run(checkpoint=...)")
        if name == "export":
            action.add_argument("file", metavar="FILE", nargs="?", default=os.curdir, help="default: ./model.safetensors")
        if name != "list":
            action.add_argument("--step", type=whole_number(0), metavar="N", help="only the checkpoint of step N")


def _execute(function: Callable[[Retention, argparse.Namespace], int], given: argparse.Namespace) -> int:
    try:
        return function(Retention(open_storage(given.storage)), given)
    except OSError as error:
        raise UsageError(str(error)) from error


def _no_command(given: argparse.Namespace) -> int:
    raise UsageError(
        "no command was given. `lockstep checkpoint list PLACE` lists the checkpoints; `verify` and `export` exist too."
    )
