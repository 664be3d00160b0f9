"""Trains a tiny GPT-2 with transformers.Trainer on two workers: with torch's class, with ours, from a checkpoint, with LoRA."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from tests.frameworks.torchrun import patched, write_results
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import lockstep

STEPS = 8
DIED = Path("died-1")


class Tokens(Dataset[Any]):
    """64 random sequences."""

    def __init__(self) -> None:
        self.ids = torch.randint(32, (64, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make_model() -> GPT2LMHeadModel:
    """With dropout: a resumed run must continue the random numbers too."""
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def make_trainer(model: Any, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
        **options,
    )
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def train(folder: str, resume_from: str | bool | None = None, callback: TrainerCallback | None = None) -> dict[str, Any]:
    """Returns the losses and gradient norms that the Trainer has logged, and the loss of an evaluation."""
    trainer = make_trainer(make_model(), folder)
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume_from)
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return {
        "is_ours": type(trainer.model_wrapped) is lockstep.DistributedDataParallel,
        "logged": logged,
        "evaluated": trainer.evaluate()["eval_loss"],
        "saved": sorted(os.listdir(f"{folder}/checkpoint-{STEPS}")),
    }


class Killed(TrainerCallback):
    """Kills rank 1 after step 6, once."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1" and state.global_step == 6 and not DIED.exists():
            DIED.write_text("step 6\n")
            os.kill(os.getpid(), signal.SIGKILL)


class ReducedParameters(TrainerCallback):
    """Replaces the all-reduce by one that notes which parameters it averages."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.reduced: set[int] = set()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.model_wrapped.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # torch takes its own types or none
        self.reduced |= {id(parameter) for parameter in bucket.parameters()}
        tensor = bucket.buffer().div_(2)
        done = torch.distributed.all_reduce(tensor, async_op=True).get_future()
        return done.then(lambda future: future.value()[0])


def train_adapters(folder: str) -> dict[str, Any]:
    """LoRA: returns the names of all parameters that were averaged, whether others have changed, and the logged losses."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(model, folder, save_strategy="no")
    callback = ReducedParameters()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    return {
        "is_ours": type(trainer.model_wrapped) is lockstep.DistributedDataParallel,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "reduced": sorted(name for name, parameter in model.named_parameters() if id(parameter) in callback.reduced),
        "changed": sorted(name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])),
        "adapters": [parameter.tolist() for name, parameter in sorted(model.named_parameters()) if "lora_" in name],
    }


if __name__ == "__main__":
    write_results(
        torch=lambda: train("torch"),
        ours=patched(lambda: train("ours")),
        resumed=patched(lambda: train("resumed", resume_from=f"ours/checkpoint-{STEPS // 2}")),
        killed=lambda: train("killed", resume_from=DIED.exists(), callback=Killed()),
        torch_adapters=lambda: train_adapters("torch-adapters"),
        adapters=patched(lambda: train_adapters("adapters")),
    )
