"""Damaged checkpoints (tests/fuzz.py): every change is detected, and none is loaded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import NAME, Manifest, _digest
from lockstep.checkpoint.tensor_file import DamagedCheckpointError
from tests.fuzz import Target, play


@pytest.mark.slow
def test_every_change_is_detected(tmp_path: Path) -> None:
    target = Target(tmp_path)
    target.restore()
    assert target.load() == "intact"
    found = Counter(play(target, seed) for seed in range(500))
    assert found["detected"] > 250
    assert set(found) <= {
        "detected",
        "intact",
        "no checkpoint",
        "forged: taken",
        "forged: detected",
        "forged: refused",
        "forged: intact",
    }


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("tensors", 0, "shape"), [1 << 61, 1 << 61, 0]),
        (("tensors", 0, "name"), "\ud800"),
        (("tensors", 0, "begin"), -1),
        (("tensors", 0, "dtype"), "object"),
        (("settings",), []),
        (("model", "x"), 10_000),
        (("step",), 1 << 80),
    ],
)
def test_a_forged_manifest_is_refused(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    target = Target(tmp_path)
    body = json.loads(target.files[NAME])
    body.pop("digest")
    inner = body
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(DamagedCheckpointError):
        Manifest.parse(json.dumps({**body, "digest": _digest(body)}).encode())


@pytest.mark.parametrize("name", ["a\0b", "../up", "/etc/passwd", ".hidden", "\udc80", ""])
def test_a_file_by_another_name_is_refused(name: str, tmp_path: Path) -> None:
    target = Target(tmp_path)
    body = json.loads(target.files[NAME])
    body.pop("digest")
    body["files"][name] = {"bytes": 1, "head": 1, "head_sha256": ""}
    with pytest.raises(DamagedCheckpointError):
        Manifest.parse(json.dumps({**body, "digest": _digest(body)}).encode())


def test_a_number_too_large_in_the_skeleton_is_damage(tmp_path: Path) -> None:
    target = Target(tmp_path)
    body = json.loads(target.files[NAME])
    body.pop("digest")
    body["skeleton"] = {"float": "0x1p99999"}
    (target.newest / NAME).write_bytes(json.dumps({**body, "digest": _digest(body)}).encode())
    assert target.load() == "detected"
