"""The folder of a store in a file: it must be the user's own, and nobody else may write to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.comm.store import open_store
from lockstep.errors import UsageError
from lockstep.world import World


def open_in(folder: Path) -> None:
    open_store(World(0, 2, rendezvous=f"file://{folder}/store"), 1.0)


def test_a_folder_is_made_for_the_user_alone(tmp_path: Path) -> None:
    open_in(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(UsageError, match=r"other users may write to the folder .*mode 1777"):
        open_in(tmp_path / "open")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_a_folder_of_another_user_is_refused_sticky_or_not(tmp_path: Path, mode: int) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other").chmod(mode)
    os.chown(tmp_path / "other", 65534, 65534)
    with pytest.raises(UsageError, match="belongs to user 65534, not to you"):
        open_in(tmp_path / "other")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link of another user")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    open_in(tmp_path / "link")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    with pytest.raises(UsageError, match="belongs to user 65534, not to you"):
        open_in(tmp_path / "link")


def test_a_path_that_is_not_utf8_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        open_in(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
