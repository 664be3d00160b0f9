"""Trains a small classifier for the pictures of the docs. Its forward and backward wait, as for a device.

PICTURED_STEPS, PICTURED_LR: how many steps, and the learning rate.
PICTURED_SLOW: this worker loads its data slowly from step 150 on.
It writes pid-<worker>.
"""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import lockstep

BATCH, LANES, CLASSES, FEATURES = 64, 8, 10, 64
worker = os.environ["LOCKSTEP_WORKER"]
steps, lr = int(os.environ["PICTURED_STEPS"]), float(os.environ["PICTURED_LR"])
is_slow = os.environ.get("PICTURED_SLOW") == worker
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
torch.manual_seed(0)
torch.set_num_threads(1)
centres = torch.randn(CLASSES, FEATURES)


class Points(torch.utils.data.Dataset):
    """Noisy points around the centres of ten classes."""

    def __len__(self):
        return steps * BATCH

    def __getitem__(self, index):
        time.sleep(0.0026 if is_slow and run.step >= 150 else 0.0004)
        label = index % CLASSES
        return centres[label] + 3.0 * torch.randn(FEATURES), label


class Device(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.015)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.025)
        return gradient


model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
run = lockstep.Run(model, opt, schedule, lanes=LANES, checkpoint="checkpoints", every="100 steps", log_every=5)
print(f"{sum(each.numel() for each in model.parameters())} parameters, {len(Points())} samples", flush=True)
for x, y in run.shard(Points(), global_batch=BATCH):
    scores = model(Device.apply(x.requires_grad_()))
    loss = F.cross_entropy(scores, y)
    loss.backward()
    run.log(loss=loss, accuracy=(scores.argmax(1) == y).float().mean())
    opt.step()
    schedule.step()
    opt.zero_grad()
    if run.committed and run.step % 20 == 0:
        print(f"step {run.step} of {steps}: loss {run.logged['loss']:.3f}, accuracy {run.logged['accuracy']:.2f}", flush=True)
run.close()
