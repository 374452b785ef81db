"""Fine-tuning with the Trainer of transformers: a tiny GPT-2 from a local config, in BF16 on the CPU.

With mistakes: the weights themselves are BF16, to save memory, and the model is sampled from in another precision than
it is trained in.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

VOCABULARY, LENGTH, STEPS = 64, 16, 12


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards from a random start: what comes next can be learnt."""

    def __init__(self, size: int, seed: int) -> None:
        starts = torch.randint(VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (starts + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> PreTrainedModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config)


class Sampler(TrainerCallback):
    """Shows now and then what the model would say."""

    def __init__(self, prompt: Tensor) -> None:
        self.prompt = prompt

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs["model"]
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            logits = model(input_ids=self.prompt).logits  # expect: AMP501
        print(f"after {self.prompt[0].tolist()}: {logits[0, -1].argmax().item()}")


def main() -> None:
    torch.manual_seed(0)
    model = make_model().to(torch.bfloat16)  # type: ignore[arg-type]  # expect: AMP306
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=STEPS // 2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Counting(256, seed=1),
            eval_dataset=Counting(32, seed=2),
            callbacks=[Sampler(torch.tensor([[1, 2, 3]]))],
        )
        trainer.train()
    print(f"trained {STEPS} steps, loss {trainer.state.log_history[-1]['train_loss']:.3f}")


if __name__ == "__main__":
    main()
