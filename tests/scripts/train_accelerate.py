"""Trains with Accelerate on two workers: with torch's class, with ours, and with ours from a checkpoint; evaluates."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from tests.frameworks.torchrun import patched, write_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

CHECKPOINT = "checkpoints/one-epoch"


class Training:
    """A model with BatchNorm, its optimizer and its data, prepared by Accelerate."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.randn(100, 8), torch.randint(4, (100,)))
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, 8))
        self.model, self.optimizer, self.loader, self.test = prepared
        self.is_ours = type(self.model) is lockstep.DistributedDataParallel

    def train_epoch(self) -> list[Any]:
        """Returns the loss of each batch, and the number of correct answers of an evaluation over the workers."""
        losses, correct = [], 0
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        self.model.eval()
        with torch.no_grad():
            for x, y in self.test:
                correct += int(self.accelerator.gather_for_metrics(self.model(x).argmax(1) == y).sum())
        self.model.train()
        return [*losses, correct]


def train(resumed: bool = False) -> dict[str, Any]:
    """Two epochs. If ``resumed``, the second one on objects that load the checkpoint of the first one."""
    training = Training()
    results = training.train_epoch()
    if resumed:
        training.accelerator.save_state(CHECKPOINT)
        training = Training()
        training.train_epoch()  # what this did to the weights, the optimizer and the loader is replaced
        training.accelerator.load_state(CHECKPOINT)
    results += training.train_epoch()
    bare = training.accelerator.unwrap_model(training.model)
    return {"is_ours": training.is_ours, "results": results, "unwrapped": type(bare).__name__, "names": list(bare.state_dict())}


if __name__ == "__main__":
    write_results(torch=train, ours=patched(train), resumed=patched(lambda: train(resumed=True)))
