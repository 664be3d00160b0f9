"""Trains a small CNN on images, validates after every epoch, keeps the best model, and stops early.

python image_classifier.py, or lockstep run -n 4 image_classifier.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

PATIENCE = 2  # stop when as many epochs have passed without a better accuracy


def make_images(count: int, seed: int) -> TensorDataset:
    """Noisy 8x8 images; the class says in which quarter the bright square is."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.9 * torch.randn(count, 1, 8, 8, generator=generator)
    classes = torch.randint(4, (count,), generator=generator)
    for image, quarter in zip(images, classes.tolist(), strict=True):
        image[0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 0.7
    return TensorDataset(images, classes)


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
for epoch in run.epochs(20):
    for images, classes in run.shard(train, global_batch=60, shuffle=True):
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.log(loss=loss)
    sched.step()
    accuracy = float(run.evaluate(count_correct, test, global_batch=60)["correct"]) / len(test)
    if accuracy > run.state.get("best", 0):
        run.state["best"], run.state["best_epoch"] = accuracy, epoch
        if run.is_main:
            torch.save(model.state_dict(), "best.pt")
    if epoch == run.state["best_epoch"] + PATIENCE:
        break

if run.is_main:
    print(f"{run.step} steps, best accuracy {run.state['best']:.3f}")
    print(run.fingerprint())
