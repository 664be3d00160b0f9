"""A small training loop: alone.py in plain PyTorch, and train.py on any number of workers. Three lines differ."""

import lockstep
import torch
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.randn(20_000, 32)
dataset = torch.utils.data.TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(1))

model = torch.nn.Sequential(
    torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=79)
run = lockstep.Run(model, opt, sched, lanes=8)
for x, y in run.shard(dataset, global_batch=256):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()

print(f"weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
