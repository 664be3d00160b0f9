"""Mixed precision: float16 in the forward and backward, float32 weights, and a GradScaler that is part of the run.

python mixed_precision.py, or lockstep run -n 4 mixed_precision.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = torch.randn(480, 32)
train = TensorDataset(inputs, (inputs[:, :4] * inputs[:, 4:8]).argmax(1))
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(device, growth_interval=20)

run = lockstep.Run(model, opt, scaler, lanes=6, checkpoint="checkpoints", every="10 steps")
for x, y in run.shard(train, global_batch=48, shuffle=True, epochs=6):
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    run.log(loss=loss)

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}, scale {scaler.get_scale():.0f}")
    print(run.fingerprint())
