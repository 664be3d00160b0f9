"""Bytes of every file of a checkpoint are flipped, cut, swapped and added: every change is detected, and none is loaded.

    make chaos                            ten thousand cases, and a line about them
    python -m tests.fuzz FIRST COUNT

The files of the newest checkpoint are changed. The checkpoint before it is unchanged, and must be used if damage is found.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import NAME, Manifest
from lockstep.checkpoint.reader import read_newest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.loopback import loopback
from lockstep.comm.plain_state import digest, flatten
from lockstep.errors import UsageError
from tests.checkpoint_jobs import Job

CHANGES = ("flip a bit", "set a byte", "swap bytes", "swap pieces", "cut", "add", "zeros", "remove", "swap files", "forge")


class Target:
    """Two checkpoints of one job, of which the newest is damaged and restored."""

    def __init__(self, folder: Path) -> None:
        job = Job(folder, keep=2)
        self._expected = {}
        for _ in range(2):
            job.step()
            job.save()
            state = job.run._state
            self._expected[job.run.step] = self._sum(state.capture())
        self.weights = {name: tensor.clone() for name, tensor in job.run._state.weights().items()}
        self.settings = job.run._state.settings
        job.close()
        self.retention = Retention(open_storage(folder))
        self.newest = folder / self.retention.published()[0].name
        self.files = {path.name: path.read_bytes() for path in self.newest.iterdir()}
        (self._comm,) = loopback(1, 10.0)

    def restore(self) -> None:
        shutil.rmtree(self.newest, ignore_errors=True)
        self.newest.mkdir()
        for name, content in self.files.items():
            (self.newest / name).write_bytes(content)

    def is_unchanged(self) -> bool:
        """Whether the change has left every file as it was: a swap of equal bytes, or of white space in the manifest's JSON."""
        now = {path.name: path.read_bytes() for path in self.newest.iterdir()}
        same_manifest = json.loads(now.pop(NAME)) == json.loads(self.files[NAME])
        return same_manifest and now == {name: content for name, content in self.files.items() if name != NAME}

    def load(self) -> str:
        """Return 'intact', 'detected', 'no checkpoint' (without its manifest) or 'refused'. A wrong state raises."""
        said: list[str] = []
        into = {name: torch.full_like(tensor, 3) for name, tensor in self.weights.items()}
        try:
            found = read_newest(self.retention, self._comm, into, self.settings, said.append)
        except UsageError:
            return "refused"
        assert found is not None
        manifest, state = found.manifest, found.state
        if not {"parameters", "buffers", "objects", "registered", "progress"} <= set(state):
            return "refused"  # by Run, which loads nothing then
        assert self._sum(state) == self._expected[manifest.step], f"step {manifest.step} was loaded wrongly"
        if manifest.step == max(self._expected):
            assert not said
            return "intact"
        return "detected" if said else "no checkpoint"

    @staticmethod
    def _sum(state: Any) -> str:
        kept = {key: state[key] for key in ("parameters", "buffers", "objects", "registered", "progress")}
        return digest(*flatten(kept, "state")).hex()


def change(target: Target, seed: int) -> str:
    """Damage the newest checkpoint. Returns how, in words."""
    random = Random(seed)
    name = random.choice(sorted(target.files))
    content = bytearray(target.files[name])
    how = random.choice(CHANGES)
    at = random.randrange(len(content))
    if how == "flip a bit":
        content[at] ^= 1 << random.randrange(8)
    elif how == "set a byte":
        content[at] = random.randrange(256)
    elif how == "swap bytes":
        other = random.randrange(len(content))
        content[at], content[other] = content[other], content[at]
    elif how == "swap pieces":
        size = random.choice([4, 8, 64, 4096])
        other = random.randrange(len(content))
        content[at : at + size], content[other : other + size] = content[other : other + size], content[at : at + size]
    elif how == "cut":
        del content[at:]
    elif how == "add":
        content += random.randbytes(random.choice([1, 8, 5000]))
    elif how == "zeros":
        size = random.choice([1, 8, 512, 4096])
        content[at : at + size] = bytes(len(content[at : at + size]))
    elif how == "swap files":
        other_name = random.choice(sorted(target.files))
        (target.newest / other_name).write_bytes(content)
        content = bytearray(target.files[other_name])
    if how == "forge":
        (target.newest / NAME).write_bytes(forged(target.files[NAME], random))
        return "forge"
    if how == "remove":
        (target.newest / name).unlink()
    else:
        (target.newest / name).write_bytes(content)
    return f"{how} in {name}"


def forged(content: bytes, random: Random) -> bytes:
    """Return a manifest that somebody changed on purpose: its digest is right, its values may be impossible."""
    body = json.loads(content)
    body.pop("digest")
    where: Any = body
    for _ in range(random.randrange(1, 7)):
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        if not keys:
            break
        key = random.choice(keys)
        if isinstance(where[key], (dict, list)) and where[key] and random.random() < 0.8:
            where = where[key]
            continue
        where[key] = random.choice(
            [None, -1, 0, 1 << 40, 1 << 80, 0.5, "", "../../etc/passwd", "torch.load", [], {}, [[]], {"tensor": [99]}, {"a": 1}]
        )
        break
    return json.dumps({**body, "digest": manifests._digest(body)}).encode()


def play(target: Target, seed: int) -> str:
    """Damage, load and judge one case. Returns what ``Target.load`` returns; raises if a changed checkpoint was loaded."""
    target.restore()
    how = change(target, seed)
    if how == "forge":
        try:
            return f"forged: {target.load()}"
        except AssertionError as error:
            # The values may be others than those saved, if they fit together: who can write a manifest can write other weights.
            Manifest.parse((target.newest / NAME).read_bytes())
            return f"forged: taken ({error})"[:13]
    try:
        outcome = target.load()
        assert outcome != "intact" or target.is_unchanged(), "the change was not detected"
        return outcome
    except Exception as error:
        raise AssertionError(f"case {seed}, {how}: {type(error).__name__}: {error}") from error


def main(first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        began = time.monotonic()
        found = Counter(play(target, seed) for seed in range(first, first + count))
        took_s = time.monotonic() - began
    print(f"{count} damaged checkpoints from {first}: {dict(found)}; every change was detected; {took_s:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
