"""Fine-tuning: first the new head alone, on frozen features; then, with a smaller learning rate, the backbone too.

python fine_tuning.py, or lockstep run -n 4 fine_tuning.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
inputs = torch.randn(480, 32)
train = TensorDataset(inputs, (inputs[:, :4] * inputs[:, 4:8]).argmax(1))

backbone = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU())  # pretrained, say
head = nn.Linear(64, 4)
model = nn.Sequential(backbone, head)

backbone.requires_grad_(False)
opt = torch.optim.AdamW(head.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

run = lockstep.Run(model, opt, sched, lanes=6, checkpoint="checkpoints", every="10 steps")
for epoch in run.epochs(6):
    if epoch == 2:
        backbone.requires_grad_(True)
        opt.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
    for x, y in run.shard(train, global_batch=48, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.log(loss=loss)
    sched.step()

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}")
    print(run.fingerprint())
