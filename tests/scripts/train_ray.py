"""Trains in the train function of Ray Train's TorchTrainer, on two workers of the cluster that the argument names; else alone.

It writes done-<rank>-of-<size>, the digest of the model.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

import lockstep


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = lockstep.Run(model, opt, lanes=4)
    for (x,) in run.shard(torch.utils.data.TensorDataset(torch.randn(64, 8)), global_batch=8, shuffle=True, epochs=2):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    run.close()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    Path(config["folder"], f"done-{run.rank}-of-{run.size}").write_text(f"{digest}\n")


if __name__ == "__main__":
    config = {"folder": os.getcwd()}
    if len(sys.argv) == 1:
        train(config)
    else:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        ray.init(sys.argv[1])
        where = RunConfig(storage_path=os.path.abspath("results"))
        TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=where).fit()
