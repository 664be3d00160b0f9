"""Trains a small CNN on images, validates after every epoch, keeps the best model, and stops early.

python image_classifier.py, or lockstep run -n 4 image_classifier.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def make_images(count: int, seed: int) -> TensorDataset:
    """Noisy 8x8 images; the class says in which quarter the bright square is."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.9 * torch.randn(count, 1, 8, 8, generator=generator)
    classes = torch.randint(4, (count,), generator=generator)
    for image, quarter in zip(images, classes.tolist(), strict=True):
        image[0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 0.7
    return TensorDataset(images, classes)


class Patience:
    """Says when `most` epochs have passed without a better accuracy. It is registered, so it survives an interruption."""

    def __init__(self, most: int) -> None:
        self.most, self.best, self.waited = most, 0.0, 0

    def is_better(self, accuracy: float) -> bool:
        self.waited = 0 if accuracy > self.best else self.waited + 1
        self.best = max(self.best, accuracy)
        return self.waited == 0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.waited = state["best"], int(state["waited"])


torch.manual_seed(0)
train, test = make_images(600, seed=1), make_images(200, seed=2)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 4)
)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)


def count_correct(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    images, classes = batch
    return {"correct": (model(images).argmax(1) == classes).sum()}


run = lockstep.Run(model, opt, sched, lanes=6, checkpoint="checkpoints", every="10 steps")
patience = Patience(most=2)
run.register("patience", patience)
for images, classes in run.shard(train, global_batch=60, shuffle=True, epochs=20):
    loss = F.cross_entropy(model(images), classes)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if run.every("epoch"):
        sched.step()
        accuracy = float(run.evaluate(count_correct, test, global_batch=60)["correct"]) / len(test)
        if patience.is_better(accuracy) and run.is_main:
            torch.save(model.state_dict(), "best.pt")
        if patience.waited == patience.most:
            break
run.save()  # a loop that was left by break is not saved by itself
if run.is_main:
    print(f"{run.step} steps, best accuracy {patience.best:.3f}")
    print(run.fingerprint())
