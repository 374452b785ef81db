"""A Trainer in the manner of Hugging Face's, with Accelerate inside: BF16, micro-batches, warm-up, evaluation.

The model is loaded in BF16, so that small updates are rounded away, and someone's own training step goes backward
inside autocast.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY, WIDTH, LENGTH, LABELS = 32, 16, 8, 2
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    output_dir: Path
    per_device_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    max_steps: int = 12
    warmup_steps: int = 3
    learning_rate: float = 5e-3
    max_grad_norm: float = 1.0
    eval_steps: int = 6
    bf16: bool = True


class TinyBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Batch:
        hidden = self.norm(F.relu(self.dense(self.embeddings(input_ids))))
        logits = self.classifier(hidden.mean(1))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


class Trainer:
    def __init__(
        self, model: nn.Module, args: TrainingArguments, train: Sequence[Batch], test: Sequence[Batch]
    ) -> None:
        self.args, self.train_batches, self.test_batches = args, train, test
        self.accelerator = Accelerator(mixed_precision="bf16" if args.bf16 else "no", cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.lr_scheduler = LambdaLR(optimizer, self.warmup_then_linear)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def warmup_then_linear(self, step: int) -> float:
        warmup, last = self.args.warmup_steps, self.args.max_steps
        return (step + 1) / (warmup + 1) if step < warmup else max(0.0, (last - step) / (last - warmup))

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.accelerator.autocast()
        return context

    def compute_loss(self, inputs: Batch) -> Tensor:
        loss: Tensor = self.model(**inputs)["loss"]
        return loss

    def training_step(self, inputs: Batch) -> Tensor:
        self.model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(inputs)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def train(self) -> None:
        window = self.args.gradient_accumulation_steps
        for step in range(self.args.max_steps):
            micro_batches = [self.train_batches[(step * window + k) % len(self.train_batches)] for k in range(window)]
            loss = sum(self.training_step(inputs).item() for inputs in micro_batches)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            if not self.accelerator.optimizer_step_was_skipped:
                self.lr_scheduler.step()
            self.model.zero_grad()
            if (step + 1) % self.args.eval_steps == 0:
                print({"step": step + 1, "loss": round(loss, 4), "eval_loss": round(self.evaluate(), 4)})
                self.save_checkpoint(step + 1)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        losses = []
        for inputs in self.test_batches:
            with self.compute_loss_context_manager():
                losses.append(self.compute_loss(inputs).item())
        return sum(losses) / len(losses)

    def save_checkpoint(self, step: int) -> None:
        folder = self.args.output_dir / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(self.accelerator.unwrap_model(self.model).state_dict(), folder / "pytorch_model.bin")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")


class WeightedTrainer(Trainer):
    """A loss of its own, as people write it when the one of the model will not do."""

    def training_step(self, inputs: Batch) -> Tensor:
        self.model.train()
        with self.compute_loss_context_manager():
            logits = self.model(**inputs)["logits"]
            loss = F.cross_entropy(logits, inputs["labels"], weight=torch.tensor([1.0, 2.0]))
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)  # expect: AMP111
        return loss.detach()


def load_model(dtype: torch.dtype) -> TinyBert:
    return TinyBert().to(dtype)  # expect: AMP306


def make_batches(number: int, size: int) -> list[Batch]:
    """Sentences with label 1 where the small tokens are many."""
    input_ids = torch.randint(VOCABULARY, (number, size, LENGTH))
    labels = (input_ids < VOCABULARY // 2).float().mean(-1).gt(0.5).long()
    return [{"input_ids": ids, "labels": label} for ids, label in zip(input_ids, labels, strict=True)]


def main() -> None:
    torch.manual_seed(42)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=Path(folder))
        batches = make_batches(20, args.per_device_batch_size)
        trainer = WeightedTrainer(load_model(torch.bfloat16), args, train=batches[:16], test=batches[16:])
        trainer.train()


if __name__ == "__main__":
    main()
