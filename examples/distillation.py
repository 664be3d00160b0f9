"""Distillation: a small student learns the answers of a large, frozen teacher. Only the student belongs to the run.

python distillation.py, or lockstep run -n 4 distillation.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

TEMPERATURE = 2.0

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 10))  # trained before, say
teacher.eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
inputs = torch.randn(480, 32)
train = TensorDataset(inputs, teacher(inputs).argmax(1))
opt = torch.optim.AdamW(student.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)

run = lockstep.Run(student, opt, sched, lanes=6, checkpoint="checkpoints", every="10 steps")
for x, y in run.shard(train, global_batch=48, shuffle=True, epochs=6):
    with torch.no_grad():
        wanted = F.softmax(teacher(x) / TEMPERATURE, dim=1)
    logits = student(x)
    answers = F.log_softmax(logits / TEMPERATURE, dim=1)
    imitation = F.kl_div(answers, wanted, reduction="batchmean") * TEMPERATURE**2
    loss = 0.7 * imitation + 0.3 * F.cross_entropy(logits, y)
    loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()
    run.log(loss=loss)

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}")
    print(run.fingerprint())
