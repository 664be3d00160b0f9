"""`lockstep checkpoint`: what it prints, what it exports, and which arguments it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from lockstep.__main__ import main
from tests.checkpoint_jobs import Job
from tests.models import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds checkpoints of steps 1 and 2."""
    job = Job(tmp_path / "checkpoints", keep=2)
    for _ in range(2):
        job.step()
        job.save()
    job.close()
    return tmp_path / "checkpoints"


def damage(folder: Path, step: int, name: str = "model-*.safetensors") -> None:
    """Change one bit of a file of the checkpoint of ``step``."""
    (file,) = folder.glob(f"step-{step:09d}-*/{name}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_list_and_verify(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(folder)]) == 0
    newest, oldest = capfd.readouterr().out.splitlines()
    assert "step 2, saved " in newest
    assert "step 1, saved " in oldest
    assert main(["checkpoint", "verify", str(folder)]) == 0
    damage(folder, 2)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    newest, oldest = capfd.readouterr().out.splitlines()[-2:]
    assert "damaged: tensor " in newest
    assert "its checksum differs" in newest
    assert "intact: " in oldest
    assert main(["checkpoint", "verify", str(folder), "--step", "1"]) == 0
    damage(folder, 1, "manifest.json")
    assert main(["checkpoint", "list", str(folder)]) == 1
    newest, oldest = capfd.readouterr().out.splitlines()[-2:]
    assert "step 2, saved " in newest  # the tensors, which are damaged, are not read
    assert "damaged: manifest.json" in oldest


def test_export_writes_what_other_programs_load(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), str(tmp_path)]) == 0
    model = build("mlp")
    missing, unexpected = load_model(model, target)
    assert not missing
    assert not unexpected
    job = Job(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), job.model.state_dict().values(), strict=True))
    job.close()
    assert main(["checkpoint", "export", str(folder), str(target)]) == 2
    assert "exists already" in capfd.readouterr().err
    damage(folder, 2)
    target.unlink()
    assert main(["checkpoint", "export", str(folder), str(target)]) == 1
    assert "Choose another checkpoint with --step" in capfd.readouterr().err
    assert not target.exists()
    assert main(["checkpoint", "export", str(folder), str(target), "--step", "1"]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command was given"),
        (["lst", "x"], "there is no command lst. Did you mean list?"),
        (["list"], "required: FOLDER"),
        (["list", "nowhere"], "there is no checkpoint in"),
        (["verify", "FOLDER", "--step", "9"], "Choose one of these steps: 2, 1"),
        (["verify", "FOLDER", "--stp", "9"], "Did you mean --step"),
        (["export", "FOLDER", "nowhere/model"], "there is no folder nowhere"),
        (["list", "nosuch://x"], "cannot be reached"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *(str(folder) if each == "FOLDER" else each for each in arguments)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("lockstep: ")
    assert said.count("\n") == 1
    assert says in said


def test_listing_needs_no_torch(folder: Path) -> None:
    code = "import sys; from lockstep.__main__ import main; assert main(['checkpoint', 'list', sys.argv[1]]) == 0; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def test_tied_weights_are_exported_once(tmp_path: Path) -> None:
    import lockstep

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    with lockstep.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=1, checkpoint=tmp_path / "checkpoints") as run:
        run.save()
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), str(tmp_path)]) == 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["embedding.weight"]
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    other = Tied()
    missing, unexpected = load_model(other, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(other.head.weight, model.head.weight)
