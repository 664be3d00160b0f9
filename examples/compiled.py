"""Trains a model whose blocks torch.compile has compiled. On a CPU this needs a C++ compiler.

python compiled.py, or lockstep run -n 4 compiled.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
inputs = torch.randn(480, 32)
train = TensorDataset(inputs, (inputs[:, :4] * inputs[:, 4:8]).argmax(1))
blocks = [Block(32) for _ in range(2)]
for block in blocks:
    block.compile()  # block by block: gradients of the later blocks are sent while the earlier ones are computed
model = nn.Sequential(*blocks, nn.Linear(32, 4))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

run = lockstep.Run(model, opt, lanes=6, checkpoint="checkpoints", every="10 steps")
for x, y in run.shard(train, global_batch=48, shuffle=True, epochs=6):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    run.log(loss=loss)

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}")
    print(run.fingerprint())
