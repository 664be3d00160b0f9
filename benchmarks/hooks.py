"""What the hooks cost per parameter: a backward of 580 tiny parameters on one worker, bare, under torch DDP and under Lockstep.

python -m benchmarks.hooks
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from examples.gpt import GPT, GPTConfig
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from benchmarks.report import machine, write


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{tempfile.mkdtemp()}/store", 1), rank=0, world_size=1)
    config = GPTConfig(vocab=64, context=8, layers=48, heads=2, width=16)
    models = {
        "bare": GPT(config),
        "torch DDP": TorchDDP(GPT(config), gradient_as_bucket_view=True),
        "Lockstep": lockstep.replicate(GPT(config)),
    }
    tokens = torch.randint(config.vocab, (1, config.context + 1))
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(80):
        for name, model in models.items():
            began = time.perf_counter()
            model(tokens).backward()
            if round_ > 5:
                times[name].append(time.perf_counter() - began)
            model.zero_grad()
    count = len(list(models["bare"].parameters()))
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    rows = [f"| {name} | {v:.2f} | {1e3 * (v - ms['bare']) / count:.1f} |" for name, v in ms.items()]
    text = "\n".join([f"| {count} parameters | step ms | us per parameter over bare |", "|---|---|---|", *rows])
    print(text)
    write("hooks", {"machine": machine(), "results": ms}, text, "python -m benchmarks.hooks")
    os._exit(0)  # torch's DdpReducer may deadlock when the last owner of a gloo group is destroyed


if __name__ == "__main__":
    main()
