"""Links, pipes, huge files and a wrong clock in the checkpoint place: nothing outside is touched, and nothing waits or runs out."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.checkpoint import retention as retentions
from lockstep.checkpoint.checkpoints import SaveError
from lockstep.checkpoint.manifest import NAME, _digest
from lockstep.checkpoint.storage import LocalStorage
from tests.unit.test_checkpoint_states import OneWeight, folders, open_checkpoints, published

OLD = "step-000000001-0000000000000001"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of somebody else, outside the checkpoint place."""
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in ("thesis.txt", NAME):
        (folder / name).write_text("years of work")
    return folder


def require_untouched(precious: Path) -> None:
    assert {path.name: path.read_text() for path in precious.iterdir()} == dict.fromkeys(("thesis.txt", NAME), "years of work")


def test_a_link_named_like_a_checkpoint_is_not_followed(precious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / OLD).symlink_to(precious)
    checkpoints = open_checkpoints(place, keep=1)
    assert not checkpoints.resume()
    assert f"{OLD} is a symbolic link, which is not followed" in capsys.readouterr().err
    checkpoints.save(5)
    checkpoints.save(6)
    checkpoints.close()
    assert published(place) == [6]
    require_untouched(precious)
    assert (place / OLD).is_symlink()


def test_links_inside_a_checkpoint_are_removed_and_what_they_point_to_is_not(precious: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / OLD).mkdir(parents=True)
    (place / OLD / "a").symlink_to(precious)
    (place / OLD / "b").symlink_to(precious / "thesis.txt")
    open_checkpoints(place, keep=1).save(5)
    assert published(place) == [5]
    assert OLD not in folders(place)
    require_untouched(precious)


def test_a_folder_that_becomes_a_link_after_it_was_listed_is_not_followed(
    precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    (place / OLD).mkdir(parents=True)
    (place / "step-000000002-0000000000000002").mkdir()
    checkpoints = open_checkpoints(place, keep=1)
    remove = LocalStorage.remove

    def swap_then_remove(self: LocalStorage, folder: str) -> None:
        if folder == OLD:
            (place / OLD).rmdir()
            (place / OLD).symlink_to(precious)
        remove(self, folder)

    monkeypatch.setattr(LocalStorage, "remove", swap_then_remove)
    checkpoints.save(5)
    assert "older checkpoints" in capsys.readouterr().err
    require_untouched(precious)
    assert [name[:14] for name in folders(place) if name != OLD] == ["step-000000005"]  # the other old one was removed


def test_a_folder_that_becomes_a_link_is_not_written_to(precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(LocalStorage, "make_folder", lambda self, folder: (place / folder).symlink_to(precious))
    with pytest.raises(SaveError, match="Not a directory"):
        open_checkpoints(place).save(5)
    require_untouched(precious)


def test_a_link_in_place_of_a_new_file_is_not_written_to(precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    make = LocalStorage.make_folder

    def make_with_link(self: LocalStorage, folder: str) -> None:
        make(self, folder)
        (place / folder / "model-00001-of-00001.safetensors").symlink_to(precious / "thesis.txt")

    monkeypatch.setattr(LocalStorage, "make_folder", make_with_link)
    with pytest.raises(SaveError, match="File exists"):
        open_checkpoints(place).save(5)
    require_untouched(precious)


def test_the_place_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "disk")
    open_checkpoints(tmp_path / "place").save(5)
    assert published(tmp_path / "disk") == [5]


# -- files that are not what they should be -------------------------------------------------------


def two_checkpoints(place: Path) -> Path:
    """Return the newest of two checkpoints: the weights are 2 at step 2, and 3 at step 3."""
    state = OneWeight()
    checkpoints = open_checkpoints(place, state)
    for step in (2, 3):
        state.weight.fill_(step)
        checkpoints.save(step)
    checkpoints.close()
    return place / folders(place)[-1]


def resumed_weight(place: Path, deadline_s: float = 20.0) -> float:
    """Return the weight after a resume. Fails if that takes too long."""
    found: list[float] = []

    def resume() -> None:
        state = OneWeight()
        checkpoints = open_checkpoints(place, state)
        assert checkpoints.resume()
        checkpoints.close()
        found.append(float(state.weight[0]))

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    thread.join(deadline_s)
    assert found, "the resume failed, or hangs"
    return found[0]


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [replace_by_pipe, replace_by_link, make_huge, replace_by_folder])
@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "model.safetensors.index.json", NAME])
def test_the_checkpoint_before_is_used(
    file: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(two_checkpoints(tmp_path) / file)
    assert resumed_weight(tmp_path) == 2
    assert f"{file} " in capsys.readouterr().err


@pytest.mark.parametrize("in_header", [True, False])
def test_a_manifest_that_promises_more_than_memory_is_damage(in_header: bool, tmp_path: Path) -> None:
    newest = two_checkpoints(tmp_path)
    body = json.loads((newest / NAME).read_text())
    body.pop("digest")
    name = "model-00001-of-00001.safetensors"
    body["files"][name]["bytes"] = 1 << 42
    if in_header:
        body["files"][name]["head"] = 1 << 42
    else:
        extra = {"name": "extra", "file": name, "dtype": "float32", "shape": [1 << 39], "begin": 1 << 20, "sum": ""}
        body["tensors"].append(extra)
    (newest / NAME).write_text(json.dumps({**body, "digest": _digest(body)}))
    os.truncate(newest / name, 1 << 42)
    assert resumed_weight(tmp_path) == 2


# -- clocks ---------------------------------------------------------------------------------------


def test_old_checkpoints_are_removed_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = OneWeight()

    def save(step: int, at_s: float) -> None:
        monkeypatch.setattr(retentions.time, "time_ns", lambda: int(at_s * 1e9))
        state.weight.fill_(step)
        checkpoints = open_checkpoints(tmp_path, state, keep=2)
        checkpoints.resume()
        state.weight.fill_(step)
        checkpoints.save(step)
        checkpoints.close()

    now_s = time.time()
    for number, step in enumerate((1, 2, 3, 4, 5)):
        save(step, now_s - 3600 * number)
    assert published(tmp_path) == [5, 4]
    assert len(folders(tmp_path)) == 2
    monkeypatch.undo()
    assert resumed_weight(tmp_path) == 5


@pytest.mark.parametrize("token", ["7fffffffffff0000", "ffffffffffffffff", "01f0000000000000"])
def test_a_leftover_folder_of_the_future_is_removed(token: str, tmp_path: Path) -> None:
    (tmp_path / f"step-000000001-{token}").mkdir()
    open_checkpoints(tmp_path).save(5)
    assert [name[:14] for name in folders(tmp_path)] == ["step-000000005"]


def test_a_run_that_begins_anew_leaves_the_checkpoints_of_the_other_and_is_resumed_itself(tmp_path: Path) -> None:
    state = OneWeight()
    for steps, mode in (((100, 200, 300), "auto"), ((10, 20, 30, 40), "never")):
        checkpoints = open_checkpoints(tmp_path, state, keep=2, resume=mode)
        checkpoints.resume()
        for step in steps:
            state.weight.fill_(step)
            checkpoints.save(step)
        checkpoints.close()
    assert published(tmp_path) == [40, 30, 300, 200]
    assert resumed_weight(tmp_path) == 40
