"""Trains on a stream: samples that can only be read one after the other. Each is used exactly once per epoch.

python streaming.py, or lockstep run -n 4 streaming.py: the same fingerprint. If it is interrupted, start it again.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import lockstep


class Measurements(IterableDataset):
    """Reads a signal as a log file would be read, line by line. Its length is not known before its end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        signal = torch.zeros(16)
        for _ in range(500):
            change = torch.randn((), generator=generator)
            value = 0.9 * signal[-1] - 0.5 * signal[-3] + 0.3 * change
            yield signal, value
            signal = torch.cat([signal[1:], value[None]])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)

run = lockstep.Run(model, opt, lanes=6, checkpoint="checkpoints", every="10 steps")
for signal, value in run.shard(Measurements(seed=1), global_batch=48, epochs=6):
    loss = F.mse_loss(model(signal).squeeze(1), value)
    loss.backward()
    opt.step()
    opt.zero_grad()
    run.log(loss=loss)

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.4f}")
    print(run.fingerprint())
