"""A contrastive loss, the wrong way and the right way: the same towers, the same batches, the numbers side by side.

Two towers learn to agree on pairs: similarities are divided by a temperature, and a softmax should select the right
partner. The wrong way is common: it disables autocast for the loss, in the belief that the loss is then FP32. It is
not: the towers' output is FP16, and so is all that is computed from it, with a softmax written out as exp, sum and log.
The exponential of more than 11.09 is infinite in FP16, and a similarity of 1 over a temperature of 0.08 is 12.5: it
fails just when the towers begin to agree. The right way, `@ampwise.keep("fp32")`, casts the inputs too.

    python examples/contrastive.py                      in FP16, some seconds on a CPU; a GPU is used if there is one
    python examples/contrastive.py --precision bf16     nothing overflows, but digits are still lost
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

HIDDEN, IMAGE, TEXT, WIDTH, OUT, BATCH = 8, 16, 12, 16, 16, 24
TEMPERATURE = 0.08
Loss = Callable[[Tensor, Tensor], Tensor]
LESSON = """
Lesson: disabling autocast casts nothing. Give a loss of exponentials FP32 inputs, by .float() or
@ampwise.keep("fp32"), and use torch's cross_entropy instead of exp, sum and log."""


def wrong_loss(image: Tensor, text: Tensor) -> Tensor:
    """Return the loss in the dtype of its inputs: autocast is off, and nothing was cast."""
    with torch.autocast(image.device.type, enabled=False):
        logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / TEMPERATURE  # what AMP406 is about
        return (logits.exp().sum(1).log() - logits.diagonal()).mean()


@ampwise.keep("fp32")
def right_loss(image: Tensor, text: Tensor) -> Tensor:
    """Return the loss in FP32, whatever the input dtype; cross_entropy subtracts the largest logit before exp."""
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(IMAGE), tower(TEXT)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


def tower(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Return two noisy views of the same hidden numbers."""

    views: tuple[Tensor, Tensor]
    device: torch.device

    def batch(self, seed: int, count: int = BATCH) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(count, HIDDEN, generator=generator)
        return tuple(
            (hidden @ view + 0.1 * torch.randn(count, view.shape[1], generator=generator)).to(self.device)
            for view in self.views
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    skipped: int
    found: float  # share of new images whose text is the nearest of 128
    off: float  # difference of a batch's loss from that of the same embeddings in FP64
    why: str  # of the first bad step


def train(loss: Loss, pairs: Pairs, precision: str, steps: int, device: torch.device) -> Result:
    torch.manual_seed(0)
    model = Towers().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0, scaling={"init_scale": 2.0**10})

    def loss_fn(image: Tensor, text: Tensor) -> Tensor:
        return loss(*model(image, text))

    try:
        for number in range(steps):
            engine.step(loss_fn, *pairs.batch(number))
    except ampwise.ScaleCollapsed:
        pass  # the loss scale is at its minimum, and every step still overflows
    with torch.no_grad():
        with engine.autocast():
            image, text = model(*pairs.batch(10**6, 128))
            narrow = loss(image[:BATCH], text[:BATCH])
        image, text = image.double(), text.double()
        off = abs(narrow.item() - wrong_loss(image[:BATCH], text[:BATCH]).item())
        nearest = (F.normalize(image, dim=1) @ F.normalize(text, dim=1).T).argmax(1)
    found = float((nearest == torch.arange(128, device=device)).double().mean())
    why = next((f"{each.rule.name} at {each.place}" for each in engine.findings), "")
    return Result(skipped=engine.skipped_steps, found=found, off=off, why=why)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="%(default)s")
    parser.add_argument("--precision", default="fp16", help="fp16, bf16, fp32 (%(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = Pairs(views=(torch.randn(HIDDEN, IMAGE), torch.randn(HIDDEN, TEXT)), device=device)
    ways: dict[str, Loss] = {"wrong": wrong_loss, "right": right_loss}
    results = {name: train(loss, pairs, options.precision, options.steps, device) for name, loss in ways.items()}
    print(f"{options.precision} on {device}, {options.steps} steps, temperature {TEMPERATURE}\n")
    print("         steps skipped    pairs found among 128    loss is off by")
    for name, result in results.items():
        print(f"{name:8} {result.skipped:13} {result.found:24.1%} {result.off:17.1e}")
    if results["wrong"].why:
        print(f"\nThe first bad step of the wrong way: {results['wrong'].why}")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
