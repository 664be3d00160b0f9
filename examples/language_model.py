"""Trains a small transformer on texts of different lengths. Each token counts the same, in whatever batch it is.

python language_model.py, or lockstep run -n 4 language_model.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import lockstep

WORDS, PADDING, LONGEST = 24, 0, 20


def make_texts(count: int) -> list[torch.Tensor]:
    """Texts in which each word follows from the word before it."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in torch.randint(6, LONGEST + 1, (count,), generator=generator).tolist():
        words = torch.randint(1, WORDS, (1,), generator=generator).tolist()
        while len(words) < length:
            words.append(1 + (5 * words[-1] + 2) % (WORDS - 1))
        texts.append(torch.tensor(words))
    return texts


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        length = texts.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(self.words(texts) + self.places.weight[:length], mask=mask, is_causal=True))


torch.manual_seed(0)
texts = make_texts(480)
model = LanguageModel()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=60)

run = lockstep.Run(model, opt, sched, lanes=6, checkpoint="checkpoints", every="10 steps")


def collate(texts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(texts, batch_first=True, padding_value=PADDING)


for batch in run.shard(texts, global_batch=48, shuffle=True, epochs=6, collate_fn=collate):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
    run.weigh(int((targets != PADDING).sum()))  # the mean over the tokens of the whole step, not of each micro-batch
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
    run.log(loss=loss)

if run.is_main:
    print(f"{run.step} steps, loss {run.logged['loss']:.3f}")
    print(run.fingerprint())
