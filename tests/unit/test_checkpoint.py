"""Checkpoints of a run in one process: what they hold, when they are made, what is refused, and the bits of resumed runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.manifest import NAME, Manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from lockstep.comm.base import Comm
from lockstep.comm.plain_state import digest, flatten
from lockstep.errors import UsageError
from tests.models import build, data
from tests.threads import on_threads

pytestmark = pytest.mark.usefixtures("one_thread")


class Ema:
    """An object of the user with state."""

    def __init__(self) -> None:
        self.seen, self.mean = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean = state["seen"], state["mean"].clone()


def train(
    folder: Path | str | None, stop_at: int | None = None, model: nn.Module | None = None, *, every: str = "3 steps", **options: Any
) -> str:
    """Train loops of 2 x 5 and of 5 steps, each with an evaluation. Returns a digest of the end, or '' if it stopped before."""
    torch.manual_seed(1)
    model = model or build("mlp")
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    ema = Ema()
    seen: list[float] = []
    with lockstep.Run(model, opt, sched, lanes=4, checkpoint=folder, every=every, **options) as run:
        run.register("ema", ema)
        for loop in range(2):
            noise = torch.rand(()) * loop  # drawn between loops, of which a resumed run skips the first
            for x, y in run.shard(data(), global_batch=8, shuffle=True, epochs=2 - loop):
                x = x + torch.rand(()) * 0.1 + noise
                F.cross_entropy(model(x), y).backward()
                opt.step()
                sched.step()
                opt.zero_grad()
                if run.committed:
                    ema.seen += 1
                    ema.mean = ema.mean * 0.9 + next(model.parameters()).detach().flatten()[:3]
                if run.committed and run.step == stop_at:
                    return ""
            seen.append(
                run.evaluate(lambda b: {"loss": F.cross_entropy(model(b[0]), b[1]) * len(b[0])}, data(), global_batch=8)["loss"]
            )
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "ema": ema.state_dict()}
        return f"{run.step} {[float(s) for s in seen]} {digest(*flatten(state, 'state')).hex()}"


@pytest.mark.parametrize("stop_at", [1, 3, 4, 7, 10, 12, 15])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted(
    stop_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = train(None)
    assert train(tmp_path, stop_at) == ""
    assert train(tmp_path) == undisturbed
    said = capsys.readouterr().err
    last = max((step for step in (3, 6, 9, 10, 12) if step < stop_at), default=0)  # a step is saved when its loop body has ended
    assert (f"lockstep: resumed at step {last} from {tmp_path}" in said) == (last > 0)
    assert train(tmp_path) == undisturbed  # the run had ended: its loops are skipped


def test_checkpoints_are_made_when_due_and_old_ones_go(tmp_path: Path) -> None:
    incomplete, foreign = tmp_path / "step-000000099-0123456789abcdef", tmp_path / "mine"
    incomplete.mkdir()  # without a manifest it is not resumed from
    foreign.mkdir()
    assert train(tmp_path, keep=2) == train(None)
    assert sorted(path.name[:14] for path in tmp_path.iterdir()) == ["mine", "step-000000012", "step-000000015"]
    assert [folder.step for folder in Retention(open_storage(tmp_path)).published()] == [15, 12]


def test_intervals_and_saves_of_the_user(tmp_path: Path) -> None:
    for every, expected in (("1 epoch", [15, 10, 5]), ("1h", [15, 10])):
        train(tmp_path / every, every=every)
        assert [folder.step for folder in Retention(open_storage(tmp_path / every)).published()] == expected
    train(tmp_path / "now", every="0.000001 s")  # as fast as they can be written
    assert len(Retention(open_storage(tmp_path / "now")).published()) == 3
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Run(model, opt, lanes=2, checkpoint=tmp_path / "own", every="1h") as run:
        run.save()
        for x, y in run.shard(data(), global_batch=8):
            if run.step == 0:
                with pytest.raises(UsageError, match=r"if run.every\(100\): run.save\(\)"):
                    run.save()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if run.every(2):
                run.save()
    assert [folder.step for folder in Retention(open_storage(tmp_path / "own")).published()] == [5, 4, 2]


def test_a_requested_save_is_made_if_the_loop_is_left_at_once(tmp_path: Path) -> None:
    model = build("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Run(model, opt, lanes=2, checkpoint=tmp_path, every="1h") as run:
        for x, y in run.shard(data(), global_batch=8):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            if run.every(3):
                run.save()
                break
    assert [folder.step for folder in Retention(open_storage(tmp_path)).published()] == [3]


class Caching(nn.Module):
    """A model whose cache changes its shape in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cache) < 8:
            self.cache = torch.arange(8.0)
        return self.body(x) + self.cache[0]


def test_a_cache_that_changes_its_shape_is_not_saved(tmp_path: Path) -> None:
    assert train(tmp_path, 7, Caching()) == ""
    assert train(tmp_path, None, Caching()).startswith("15 ")


def test_workers_with_different_state_get_an_error(tmp_path: Path) -> None:
    def body(comm: Comm) -> str:
        torch.manual_seed(0)
        model = build("mlp")
        run = lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=2, comm=comm, checkpoint=tmp_path)
        if run.is_main:
            run.register("ema", Ema())
        try:
            run.save()
        except UsageError as error:
            return str(error)
        finally:
            run.close()
        return ""

    for said in on_threads(2, body):
        assert "rank 0 and rank 1 hold different state at step 0" in said


def test_two_ranks_write_parts_of_one_checkpoint(tmp_path: Path) -> None:
    def body(comm: Comm) -> str:
        torch.manual_seed(0)
        model = build("mlp")
        run = lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=2, comm=comm, checkpoint=tmp_path)
        run.save()
        run.close()
        return digest(*flatten(model.state_dict(), "x")).hex()

    first, second = on_threads(2, body)
    assert first == second
    files = {path.name for path in newest(tmp_path).iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= files


def newest(folder: Path) -> Path:
    return folder / Retention(open_storage(folder)).published()[0].name


def test_weights_are_found_by_any_reader_of_safetensors(tmp_path: Path) -> None:
    model = build("cnn")
    opt = torch.optim.Adam(model.parameters())
    with lockstep.Run(model, opt, lanes=1, checkpoint=tmp_path) as run:
        run.save()
    folder = newest(tmp_path)
    loaded = load_file(folder / "model-00001-of-00001.safetensors")
    assert set(loaded) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(loaded)


class Odd(nn.Module):
    """Tied weights, a buffer that is not saved, many dtypes, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(12, 12)
        self.two = nn.Linear(12, 4)
        self.tied = self.one
        self.register_buffer("cache", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 4))
        for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.uint16):
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", torch.ones(5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.tied(self.one(x)))


def test_tied_weights_and_unusual_dtypes(tmp_path: Path) -> None:
    def run_once() -> tuple[str, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Odd()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with lockstep.Run(model, opt, lanes=1, checkpoint=tmp_path) as run:
            for x, y in run.shard(data(), global_batch=8):
                F.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        return digest(*flatten({"m": model.state_dict(), "o": opt.state_dict()}, "x")).hex(), model.state_dict()

    first, state = run_once()
    again, _ = run_once()
    assert first == again
    with safe_open(newest(tmp_path) / "model-00001-of-00001.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name in state if not name.startswith("tied.")}
        assert torch.equal(file.get_tensor("one.weight"), state["one.weight"])
    manifest = Manifest.parse((newest(tmp_path) / NAME).read_bytes())
    assert manifest.aliases == {"tied.weight": "one.weight", "tied.bias": "one.bias"}


def test_a_checkpoint_of_another_model_or_run_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 4)
    narrow = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 4))
    with pytest.raises(UsageError, match=r"another model: 0\.weight is missing in the checkpoint, and has shape \[5, 12\]"):
        train(tmp_path, model=narrow)
    model = build("mlp")
    opt = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    with pytest.raises(UsageError, match="was made with lanes=4, this run has lanes=2"):
        lockstep.Run(model, opt, sched, lanes=2, checkpoint=tmp_path)
    with pytest.raises(UsageError, match=r"reduce_dtype=None, this run has reduce_dtype='torch\.float64'"):
        lockstep.Run(model, opt, sched, lanes=4, checkpoint=tmp_path, reduce_dtype=torch.float64)
    with pytest.raises(UsageError, match="Run with AdamW, CosineAnnealingLR; this Run has AdamW"):
        lockstep.Run(model, opt, lanes=4, checkpoint=tmp_path)
    with lockstep.Run(model, opt, sched, lanes=4, checkpoint=tmp_path) as run:
        with pytest.raises(UsageError, match="global_batch=8, and this script has global_batch=16"):
            next(iter(run.shard(data(), global_batch=16, shuffle=True)))


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Linear(12, 7), r"0.weight has shape \[6, 12\] and dtype float32 in the checkpoint, and has shape \[7, 12\] and"),
        (nn.Linear(12, 6).double(), "dtype float32 in the checkpoint, and has shape .* and dtype float64 in this model"),
        (nn.Linear(12, 6, bias=False), r"0.bias has shape \[6\] and dtype float32 in the checkpoint, and is missing in this model"),
    ],
)
def test_the_first_parameter_that_does_not_fit_is_named(layer: nn.Module, says: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 6))
    with lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, checkpoint=tmp_path) as run:
        run.save()
    model = nn.Sequential(layer)
    with pytest.raises(UsageError, match=says):
        lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, checkpoint=tmp_path)


class Strange(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "friend": {"deep": [object()]}}


def test_state_that_cannot_be_saved_is_named_after_the_first_step(tmp_path: Path) -> None:
    model = build("mlp")
    opt = Strange(model.parameters(), lr=0.1)
    run = lockstep.Run(model, opt, lanes=1, checkpoint=tmp_path, every="1h")
    with pytest.raises(UsageError, match=r"\['friend'\]\['deep'\]\[0\] is a builtins.object"):
        for x, y in run.shard(data(), global_batch=8):
            F.cross_entropy(model(x), y).backward()
            opt.step()
    assert run.step == 1
    run.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": "often"}, "is not an interval. Use '10min'"),
        ({"every": "0 steps"}, "whole numbers from 1. Use '1 step'"),
        ({"every": "1.5 epochs"}, "epochs are counted in whole numbers"),
        ({"keep": 0}, "not a number of checkpoints. Use 1 or more"),
        ({"checkpoint": ""}, "names no folder"),
        ({"checkpoint": "nosuch://bucket"}, "cannot be reached"),
        ({"verify_every": -1}, "verify_every=-1"),
        ({"checkpoint": None, "resume": "must"}, "resume='must' without checkpoint=: this run saves nothing"),
        ({"checkpoint": None, "override": ("lr",)}, r"override=\('lr',\) without checkpoint="),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = build("mlp")
    with pytest.raises(UsageError, match=says):
        lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, **{"checkpoint": tmp_path, **options})


def test_objects_that_cannot_be_registered_are_refused(tmp_path: Path) -> None:
    model = build("mlp")
    with lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1) as run:
        run.register("ema", Ema())
        with pytest.raises(UsageError, match="called twice"):
            run.register("ema", Ema())
        with pytest.raises(UsageError, match=r"has no state_dict\(\)"):
            run.register("list", [])
        with pytest.raises(UsageError, match="no place to save to"):
            run.save()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, checkpoint=file)


def test_an_object_store_by_url(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://bucket/{os.getpid()}"
    undisturbed = train(None)
    assert train(url, 7) == ""
    assert train(url) == undisturbed
    assert f"resumed at step 6 from {url}" in capsys.readouterr().err
    assert [folder.step for folder in Retention(open_storage(url)).published()] == [15, 12, 10]
    assert len(open_storage(url).folders()) == 3  # the files of removed checkpoints are removed too


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = train(None)
    train(tmp_path, 4)
    from lockstep.checkpoint import storage

    def full(self: storage.LocalStorage, folder: str, file: str, pieces: Any) -> None:
        raise OSError(28, "No space left on device", file)

    monkeypatch.setattr(storage.LocalStorage, "write", full)
    assert train(tmp_path) == undisturbed
    said = capsys.readouterr().err
    assert "the checkpoint of step 6" in said
    assert "No space left on device" in said
    assert [folder.step for folder in Retention(open_storage(tmp_path)).published()] == [3]
    assert len(list(tmp_path.iterdir())) == 1  # the incomplete folder was removed
    monkeypatch.undo()
    assert train(tmp_path) == undisturbed


def test_run_save_raises_if_the_checkpoint_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.checkpoint import storage

    def refused(self: storage.LocalStorage, folder: str, manifest: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    model = build("mlp")
    with lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, checkpoint=tmp_path) as run:
        monkeypatch.setattr(storage.LocalStorage, "publish", refused)
        with pytest.raises(OSError, match="was not written: rank 0: PermissionError"):
            run.save()
