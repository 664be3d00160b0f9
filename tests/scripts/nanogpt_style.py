"""Trains a tiny GPT as nanoGPT's train.py does, with torch's class and then with ours. Rank 0 prints the losses of both.

What nanoGPT does: ``require_backward_grad_sync`` on all but the last micro-step, autocast, a GradScaler, clipping, ``module.``
"""

import json
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep

VOCABULARY, BLOCK_SIZE, BATCH_SIZE, WIDTH = 32, 8, 4, 16
GRADIENT_ACCUMULATION_STEPS = 4
MAX_ITERS = 5


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK_SIZE, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ln_1, self.ln_f = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying
        self.register_buffer("mask", torch.triu(torch.ones(BLOCK_SIZE, BLOCK_SIZE, dtype=torch.bool), 1), persistent=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        h = self.ln_1(x)
        x = x + self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def train(ddp_class, rank, local_rank, world_size):
    torch.manual_seed(1337 + rank)
    generator = torch.Generator().manual_seed(1337 + rank)
    accumulation = GRADIENT_ACCUMULATION_STEPS // world_size

    def get_batch():
        x = torch.randint(VOCABULARY, (BATCH_SIZE, BLOCK_SIZE + 1), generator=generator)
        return x[:, :-1], x[:, 1:]

    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = ddp_class(model)
    raw_model, losses = model.module, []
    X, Y = get_batch()
    for _ in range(MAX_ITERS):
        total = 0.0
        for micro_step in range(accumulation):
            model.require_backward_grad_sync = micro_step == accumulation - 1
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(X, Y)
                loss = loss / accumulation
            X, Y = get_batch()
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    assert not any(name.startswith("module.") for name in raw_model.state_dict())
    return losses


init_process_group("gloo")
place = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
classes = {"torch": DistributedDataParallel, "ours": lockstep.DistributedDataParallel}
results = {name: train(ddp_class, *place) for name, ddp_class in classes.items()}
if place[0] == 0:
    print("losses", json.dumps(results))
destroy_process_group()
