"""Trains with Lightning on two workers: with torch's class, with ours, and with ours from a checkpoint; validates."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from tests.frameworks.torchrun import write_results
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

CHECKPOINT = "checkpoints/one-epoch.ckpt"
ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


class Classifier(pl.LightningModule):
    """With BatchNorm, and two last layers of which each step uses one."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.last, self.other = nn.Linear(16, 4), nn.Linear(16, 4)
        self.losses: list[float] = []
        self.wrapper = ""

    def loss(self, batch: list[Tensor], last: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(last(self.first(batch[0])), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch, self.other if index % 4 > 1 else self.last)
        self.losses.append(loss.item())
        self.wrapper = type(self.trainer.strategy.model).__module__.split(".")[0]
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss(batch, self.last), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(128, 8), torch.randint(4, (128,))), batch_size=8)


def make_trainer(strategy: Strategy, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, num_sanity_val_steps=0, **quiet, **options)


def make_model(manual: bool = False) -> Classifier:
    torch.manual_seed(0)
    return Classifier(manual)


def train(strategy: Strategy, manual: bool) -> tuple[str, list[float]]:
    """Two epochs with a validation after each. Returns the wrapper, the losses of all batches and that of a last validation."""
    model = make_model(manual)
    trainer = make_trainer(strategy, max_epochs=2, **({} if manual else ACCUMULATED))
    trainer.fit(model, loader(), loader())
    return model.wrapper, [*model.losses, trainer.validate(model, loader(), verbose=False)[0]["validation"]]


def train_from_checkpoint() -> tuple[str, list[float]]:
    """One epoch, and a second one of another model from the checkpoint of the first. Returns the same as ``train``."""
    first, second = make_model(), make_model()
    trainer = make_trainer(lockstep.integrations.lightning.LockstepStrategy(), max_epochs=1, **ACCUMULATED)
    trainer.fit(first, loader())
    trainer.save_checkpoint(CHECKPOINT)
    trainer = make_trainer(lockstep.integrations.lightning.LockstepStrategy(), max_epochs=2, **ACCUMULATED)
    trainer.fit(second, loader(), ckpt_path=CHECKPOINT)
    return second.wrapper, [*first.losses, *second.losses, trainer.validate(second, loader(), verbose=False)[0]["validation"]]


def fit_again() -> list[float]:
    """One model in two calls of ``fit``."""
    model = make_model()
    for _ in range(2):
        make_trainer(lockstep.integrations.lightning.LockstepStrategy(), max_epochs=1).fit(model, loader())
    return model.losses


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # Lightning advises on the numbers of loader processes and of logged steps
    ours = lockstep.integrations.lightning.LockstepStrategy
    write_results(
        torch=lambda: train(DDPStrategy(find_unused_parameters=True), manual=False),
        ours=lambda: train(ours(), manual=False),
        resumed=train_from_checkpoint,
        names=lambda: sorted(torch.load(CHECKPOINT, weights_only=False)["state_dict"]),
        torch_manual=lambda: train(DDPStrategy(find_unused_parameters=True), manual=True),
        ours_manual=lambda: train(ours(timeout_s=30), manual=True),
        fit_again=fit_again,
    )
