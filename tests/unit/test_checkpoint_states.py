"""Checkpoints step by step: what a worker requests in each state, what abandoned and failed checkpoints leave, what is removed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints, SaveError
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.state_layout import assign_to_writers
from lockstep.checkpoint.storage import LocalStorage, open_storage
from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.plain_state import Stateful
from lockstep.errors import UsageError
from lockstep.gradients.control_word import PUBLISHED, SAVE, STOP, WROTE
from lockstep.plan.step_end import StepEnd
from tests.threads import on_threads


class OneWeight:
    """The state of a run: one tensor."""

    settings: dict[str, Any]

    def __init__(self) -> None:
        self.settings = {}
        self.weight = torch.zeros(1000)

    def capture(self) -> dict[str, Any]:
        return {"parameters": {"weight": self.weight}}

    def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None:
        self.weight.copy_(state["parameters"]["weight"])

    def replicated(self) -> dict[str, Any]:
        return self.capture()

    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def persistent(self) -> set[str]:
        return {"weight"}

    def aliases(self) -> dict[str, str]:
        return {}


def open_checkpoints(
    folder: Path, state: Stateful | None = None, comm: Comm | None = None, *, keep: int = 3, resume: str = "auto", **callbacks: Any
) -> Checkpoints:
    alone = comm or loopback(1, 10.0)[0]
    called = CheckpointCallbacks(**callbacks)
    return Checkpoints(folder, "1000h", keep, state or OneWeight(), lambda: alone, called, resume=resume)


def published(folder: Path) -> list[int]:
    return [each.step for each in Retention(open_storage(folder)).published()]


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def end_step(checkpoints: Checkpoints, step: int, requests: int = 0) -> None:
    """What the training loop of a lone worker does after a step in whose control word it sent ``requests``."""
    now = StepEnd(step, 0, False, (requests,))
    if checkpoints.is_due(now):
        checkpoints.done(checkpoints.perform(now))


class Gate:
    """Lets calls of one method of local storage wait until ``release`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._open, self.entered, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.calls = 0
        real = getattr(LocalStorage, method)

        def gated(*args: Any) -> None:
            self.calls += 1
            self.entered.set()
            self._open.wait(10.0)
            try:
                real(*args)
            finally:
                self.ended.set()

        monkeypatch.setattr(LocalStorage, method, gated)

    def release(self) -> None:
        self._open.set()


def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    pause = threading.Event()
    for _ in range(int(deadline_s / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("did not happen")


def test_a_worker_says_wrote_and_published_when_that_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, publishing = Gate(monkeypatch, "write"), Gate(monkeypatch, "publish")
    notices: list[tuple[int, str]] = []
    checkpoints = open_checkpoints(tmp_path, published=lambda step, where: notices.append((step, where)))
    assert checkpoints.requests() == 0
    checkpoints.request_save()
    end_step(checkpoints, 1)
    assert checkpoints.requests() == 0
    writing.release()
    until(lambda: checkpoints.requests() == WROTE)
    end_step(checkpoints, 2, WROTE)  # gathers, and begins to publish
    assert checkpoints.requests() == 0
    assert published(tmp_path) == []
    publishing.release()
    until(lambda: checkpoints.requests() == PUBLISHED)
    (notice,) = notices
    assert notice[0] == 1
    assert Path(notice[1]).parent == tmp_path
    end_step(checkpoints, 3, PUBLISHED)
    assert checkpoints.requests() == 0
    checkpoints.abandon()  # nothing is in flight
    assert checkpoints.requests() == 0
    assert published(tmp_path) == [1]


def test_one_worker_that_has_not_written_delays_the_publication(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.begin(1)
    assert not checkpoints.is_due(StepEnd(2, 0, False, (WROTE, 0)))
    assert checkpoints.is_due(StepEnd(2, 0, False, (WROTE, WROTE)))
    assert not checkpoints.is_due(StepEnd(2, 0, False, ()))  # the workers have changed since
    checkpoints.wait_until_idle()


def test_requests_of_others_make_a_checkpoint_due_once_per_step(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    for request in (SAVE, STOP):
        assert checkpoints.is_due(StepEnd(1, 0, False, (0, request)))
    checkpoints.begin(1)
    assert not checkpoints.is_due(StepEnd(1, 0, False, (0, SAVE)))
    checkpoints.wait_until_idle()


def test_before_a_stop_the_checkpoint_is_published(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    end_step(checkpoints, 4, STOP)
    assert published(tmp_path) == [4]
    assert checkpoints.exit_code() == 0


@pytest.mark.parametrize("method", ["write", "publish"])
def test_a_stop_without_a_checkpoint_exits_with_143(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalStorage, method, refuse)
    checkpoints = open_checkpoints(tmp_path)
    end_step(checkpoints, 4, STOP)
    assert checkpoints.exit_code() == 143
    assert "the checkpoint of step 4" in capsys.readouterr().err
    monkeypatch.undo()
    end_step(checkpoints, 5, STOP)
    assert checkpoints.exit_code() == 0


def refuse(*args: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_abandoned_checkpoint_is_not_published_and_another_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = OneWeight()
    checkpoints = open_checkpoints(tmp_path, state)
    gate = Gate(monkeypatch, "write")
    checkpoints.begin(1)
    assert gate.entered.wait(10.0)
    checkpoints.abandon()
    assert checkpoints.requests() == SAVE
    state.weight.fill_(2)
    threading.Timer(0.2, gate.release).start()
    end_step(checkpoints, 2, SAVE)
    assert gate.ended.is_set()  # the snapshot's memory was not used again before
    assert checkpoints.requests() & SAVE == 0
    checkpoints.wait_until_idle()
    assert gate.calls == 1 + 2  # the first checkpoint ended in its first file of two
    assert published(tmp_path) == [2]
    assert len(folders(tmp_path)) == 1
    checkpoints.close()
    loaded = OneWeight()
    assert open_checkpoints(tmp_path, loaded).resume()
    assert loaded.weight.eq(2).all()


def test_an_abandoned_publication_makes_another_checkpoint_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "publish")
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.begin(1)
    until(lambda: checkpoints.requests() == WROTE)
    end_step(checkpoints, 2, WROTE)
    checkpoints.abandon()  # rank 0 could have died before it was done
    assert checkpoints.requests() == SAVE
    gate.release()
    end_step(checkpoints, 3, SAVE)
    checkpoints.wait_until_idle()
    assert published(tmp_path) == [3, 1]


def test_a_part_that_fails_is_an_error_on_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = LocalStorage.write

    def refuse_second_part(self: LocalStorage, folder: str, file: str, pieces: Iterable[bytes]) -> None:
        if "-00002-of-" in file:
            raise OSError(28, "No space left on device")
        write(self, folder, file, pieces)

    monkeypatch.setattr(LocalStorage, "write", refuse_second_part)

    class TwoWeights(OneWeight):
        def capture(self) -> dict[str, Any]:
            return {"parameters": {"weight": self.weight, "bias": self.weight}}

    def body(comm: Comm) -> str:
        checkpoints = open_checkpoints(tmp_path, TwoWeights(), comm)
        with pytest.raises(SaveError) as caught:
            checkpoints.save(7)
        return str(caught.value)

    first, second = on_threads(2, body)
    assert first == second
    assert "the checkpoint of step 7" in first
    assert "was not written: rank 1: OSError: [Errno 28] No space left on device" in first
    assert capsys.readouterr().err.count("No space left") == 1  # rank 0 says it, once
    assert folders(tmp_path) == []


def test_checkpoints_that_may_hold_wrong_bits_are_removed_when_the_next_is_published(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=10)
    for step in (1, 2, 3, 4):
        checkpoints.save(step)
    checkpoints.distrust_after(2)
    assert published(tmp_path) == [4, 3, 2, 1]
    end_step(checkpoints, 5)
    checkpoints.wait_until_idle()
    assert published(tmp_path) == [5, 2, 1]
    checkpoints.save(6)  # it is trusted again
    assert published(tmp_path) == [6, 5, 2, 1]


@pytest.mark.parametrize("method", ["write", "publish"])
def test_distrust_outlives_a_checkpoint_that_fails(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=10)
    for step in (1, 2, 3):
        checkpoints.save(step)
    checkpoints.distrust_after(2)
    checkpoints.distrust_after(1)
    checkpoints.distrust_after(2)
    monkeypatch.setattr(LocalStorage, method, refuse)
    with pytest.raises(SaveError):
        checkpoints.save(4)
    monkeypatch.undo()
    assert published(tmp_path) == [3, 2, 1]
    checkpoints.begin(5)
    checkpoints.abandon()
    checkpoints.save(6)
    assert published(tmp_path) == [6, 1]


def test_the_newest_checkpoint_of_equal_replicas_stays_beyond_keep(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=2, agreed_at=lambda step: min(step, 3))
    for step in (2, 3, 4, 5, 6):
        checkpoints.save(step)
    assert published(tmp_path) == [6, 5, 3]


def test_a_folder_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    """By a worker of a newer generation, while the old rank 0 is about to be ended."""
    earlier, foreign = tmp_path / "step-000000009-0000000000000001", tmp_path / "mine"
    for folder in (earlier, foreign):
        folder.mkdir()
    newest, begun_later = "step-000000005-000000000002aaaa", "step-000000005-000000000003aaaa"
    for name in (newest, begun_later):
        (tmp_path / name).mkdir()
    Retention(open_storage(tmp_path)).remove_old(newest, "a run", 5)
    assert folders(tmp_path) == ["mine", newest, begun_later]


def test_a_loop_that_ended_with_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.loop_ended(3)
    checkpoints.loop_ended(3)
    assert [name[:14] for name in folders(tmp_path)] == ["step-000000003"]
    resumed: list[int] = []
    again = open_checkpoints(tmp_path, resumed=resumed.append)
    assert again.resume()
    assert resumed == [3]
    again.loop_ended(3)
    assert len(folders(tmp_path)) == 1


def test_a_sparse_tensor_is_named(tmp_path: Path) -> None:
    state = OneWeight()
    state.weight = torch.zeros(4).to_sparse()
    with pytest.raises(UsageError, match=r"parameters\.weight is a torch.float32 tensor \(torch.sparse_coo\)"):
        open_checkpoints(tmp_path, state).begin(1)


def damage(folder: Path, step: int) -> None:
    """Change one bit of the checkpoint of ``step``."""
    (file,) = folder.glob(f"step-{step:09d}-*/model-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damage_that_one_worker_sees_makes_all_workers_use_the_checkpoint_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "rank-0", tmp_path / "rank-1"]
    checkpoints = open_checkpoints(folders[0])
    for step in (1, 2):
        checkpoints.save(step)
    shutil.copytree(folders[0], folders[1])
    damage(folders[1], 2)

    def body(comm: Comm) -> int:
        resumed: list[int] = []
        assert open_checkpoints(folders[comm.rank], comm=comm, resumed=resumed.append).resume()
        return resumed[0]

    assert on_threads(2, body) == [1, 1]
    assert "its checksum differs (seen by rank 1). The checkpoint before it is used." in capsys.readouterr().err


def test_a_run_does_not_begin_anew_if_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    assert not open_checkpoints(tmp_path).resume()
    open_checkpoints(tmp_path).save(1)
    damage(tmp_path, 1)
    with pytest.raises(UsageError, match=r"every checkpoint in .* is damaged. The newest: step-000000001-.*its checksum differs"):
        open_checkpoints(tmp_path).resume()


def test_tensors_whose_paths_give_one_name_are_kept_apart(tmp_path: Path) -> None:
    class Dotted(OneWeight):
        restored: Mapping[str, Any]

        def capture(self) -> dict[str, Any]:
            return {**super().capture(), "a.b": torch.ones(3), "a": {"b": torch.zeros(3)}, "__metadata__": torch.ones(1)}

        def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None:
            self.restored = state

    open_checkpoints(tmp_path, Dotted()).save(1)
    (file,) = tmp_path.glob("*/state-*.safetensors")
    assert len(load_file(file)) == 3
    state = Dotted()
    assert open_checkpoints(tmp_path, state).resume()
    assert state.restored["a.b"].eq(1).all()
    assert state.restored["a"]["b"].eq(0).all()


def test_a_state_that_changes_its_shape_is_copied_anew(tmp_path: Path) -> None:
    state = OneWeight()
    checkpoints = open_checkpoints(tmp_path, state)
    checkpoints.save(1)
    state.weight = torch.arange(5000.0)
    checkpoints.save(2)
    loaded = OneWeight()
    loaded.weight = torch.zeros(5000)
    assert open_checkpoints(tmp_path, loaded).resume()
    assert torch.equal(loaded.weight, state.weight)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_each_tensor_is_written_once_and_writers_have_about_equally_many_bytes(sizes: list[int], writers: int) -> None:
    parts = assign_to_writers(sizes, writers)
    assert len(parts) == writers
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    written = [sum(sizes[index] for index in part) for part in parts]
    assert max(written) - min(written) <= max(sizes, default=0)
