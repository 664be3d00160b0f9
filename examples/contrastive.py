"""Contrastive learning: each image must find its second view among those of the whole global batch, not only of its own lane.

The first pass collects the features of all lanes, without gradients. The loss over all of them gives the gradient of each feature,
and the second pass takes it back into the model, lane by lane: exactly the gradient of the loss over the global batch.
python contrastive.py, or lockstep run -n 4 contrastive.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

TEMPERATURE = 0.2


class TwoViews(torch.utils.data.Dataset):
    """Each sample: two noisy, scaled views of one of 480 patterns."""

    def __init__(self) -> None:
        self.patterns = torch.randn(480, 24)

    def __len__(self) -> int:
        return len(self.patterns)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, second = (self.patterns[index] * (0.5 + torch.rand(())) + 0.5 * torch.randn(24) for _ in range(2))
        return first, second


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)


def features_of(batch: list[Tensor]) -> Tensor:
    """The features of both views: (2, samples, 16), of length 1."""
    return F.normalize(model(torch.stack(batch)), dim=-1)


run = lockstep.Run(model, opt, lanes=6, checkpoint="checkpoints", every="10 steps")
for step in run.steps(TwoViews(), global_batch=48, shuffle=True, epochs=8):
    parts = [part.requires_grad_() for part in step.gather(features_of)]
    first, second = torch.cat(parts, dim=1)
    scores = first @ second.T / TEMPERATURE
    wanted = torch.arange(len(scores))
    loss = (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.T, wanted)) / 2
    loss.backward()  # reaches the features, not the model

    for batch in step:
        run.weigh(1)  # lanes are averaged with equal weights: times the number of lanes, that is their sum
        (features_of(batch) * parts[step.lane].grad).sum().mul(len(parts)).backward()
    opt.step()
    opt.zero_grad()
    run.log(loss=loss, found=(scores.argmax(1) == wanted).float().mean())

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}, {run.logged['found']:.0%} of the views found")
    print(run.fingerprint())
