"""Train a GPT on letters, with warmup and cosine decay, weight decay, accumulation and a checkpoint.

The text is examples/text.txt; any other works. char_gpt.py shows what each layer's gradients would lose in narrower
formats; would_it_train.py shows whether a GPT trains in formats that your device does not have.

    python examples/gpt.py                              some seconds on a CPU; a GPU is used if there is one
    python examples/gpt.py --text mine.txt --steps 2000 --width 256 --checkpoint mine.pt
    python examples/gpt.py --precision bf16             or fp16, fp32; "auto" takes what the device has tensor cores for
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

TEXT = Path(__file__).with_name("text.txt")
HEADS, LAYERS, CONTEXT, BATCH, ACCUMULATE = 4, 2, 32, 8, 2
LESSON = """
Lesson: mixed precision does not change the weights' dtype. Only matmuls run in 16 bits, on copies; weights,
gradients and Adam's moments stay FP32. A checkpoint has these and engine.state_dict(), with the loss scale."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        longer: Tensor = x + self.mlp(self.norms[1](x))
        return longer


class GPT(nn.Module):
    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW that decays only matrices."""
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95), fused=True)


def rate(step: int, steps: int) -> float:
    """Return a schedule: warmup for a tenth of the steps, then cosine decay to a tenth of the rate."""
    warmup = max(1, steps // 10)
    done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))


class Training:
    """Model, engine and training text."""

    def __init__(self, words: str, width: int, precision: str, steps: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        alphabet = {letter: number for number, letter in enumerate(sorted(set(words)))}
        text = torch.tensor([alphabet[letter] for letter in words], device=self.device)
        self.seen, self.held_out = text.split([len(text) - len(text) // 10, len(text) // 10])
        self.model = GPT(len(alphabet), width).to(self.device)
        self.optimizer = make_optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(rate, steps=steps))
        self.engine = ampwise.Engine(
            self.model, self.optimizer, precision, clip_norm=1.0, accumulate=ACCUMULATE, scheduler=scheduler
        )

    def loss(self, letters: Tensor, nexts: Tensor) -> Tensor:
        return F.cross_entropy(self.model(letters).float().flatten(0, 1), nexts.flatten())

    def train(self, steps: int) -> None:
        print("step    loss    held out    norm      lr")
        while self.engine.applied_steps < steps:
            step = self.engine.step(self.loss, *windows(self.seen, BATCH))
            if step.closed and step.number % max(1, steps // 6) == 0:
                held_out = f"{self.evaluate():11.3f}"
                print(f"{step.number:4} {step.loss:7.3f} {held_out} {step.grad_norm:7.2f} {step.lr:7.4f}")

    @torch.no_grad()
    def evaluate(self) -> float:
        with self.engine.autocast():
            return self.loss(*windows(self.held_out, 64, torch.Generator().manual_seed(0))).item()

    def save(self, path: Path) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict(), self.engine.state_dict()
        torch.save(dict(zip(("model", "optimizer", "engine"), states, strict=True)), path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.engine.load_state_dict(saved["engine"])
        print(f"resuming from {path}, after {self.engine.applied_steps} steps")


def windows(text: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return random windows of the text, and the same windows shifted by one letter."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    rows = text[(starts + torch.arange(CONTEXT + 1)).to(text.device)]
    return rows[:, :-1], rows[:, 1:]


def dtypes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="%(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    parser.add_argument("--text", type=Path, default=TEXT, help="text to learn (examples/text.txt)")
    parser.add_argument("--width", type=int, default=64, help="%(default)s")
    parser.add_argument("--checkpoint", type=Path, help="resume from it if it exists, and save to it at the end")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    training = Training(options.text.read_text(encoding="utf-8"), options.width, options.precision, options.steps)
    if options.checkpoint and options.checkpoint.exists():
        training.load(options.checkpoint)
    training.train(options.steps)
    if options.checkpoint:
        training.save(options.checkpoint)
    with torch.no_grad(), training.engine.autocast():
        logits = training.model(training.seen[None, :CONTEXT])
    moments = [each["exp_avg"] for each in training.optimizer.state.values()]
    print(
        f"\n{training.engine.precision} on {training.device}: logits {dtypes([logits])}, "
        f"weights {dtypes(training.model.parameters())}, Adam's moments {dtypes(moments)}."
    )
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
