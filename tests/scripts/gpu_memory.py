"""Trains until it is killed, over NCCL from the first step on. Worker 0 writes how many bytes of the GPU are used after each step.

memory-0.jsonl has [generation, size, bytes]: the bytes are those of all processes on this GPU, with what NCCL and CUDA use besides
tensors. On a CPU they are 0.
"""

import json
import os
from pathlib import Path

import torch

import lockstep
from lockstep.comm import open_comm

worker = os.environ["LOCKSTEP_WORKER"]
open_comm._GLOO_MEANWHILE_BYTES = 0  # every step is one over NCCL
device = torch.device("cpu") if os.environ.get("CHAOS_DEVICE") == "cpu" else lockstep.World.detect().device()


def used_bytes() -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
Path(f"pid-{worker}").write_text(f"{os.getpid()}\n")
run = lockstep.Run(model, opt, lanes=4)
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(64, 64)), global_batch=8, epochs=1_000_000):
    model(x.to(device)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if run.committed and worker == "0":
        with Path("memory-0.jsonl").open("a") as file:
            file.write(json.dumps([run.generation, run.size, used_bytes()]) + "\n")
