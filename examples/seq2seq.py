"""Train a small translator with accumulation: micro-batches of long and of short sentences.

Sentences are sorted by length into micro-batches, to waste little on padding, so some have many more tokens than
others. The mean over micro-batches then counts each token of a short sentence several times; the mean over tokens is
right. `weight=` is the weight of a micro-batch. First both are compared with the gradient of all micro-batches at once;
then a model is trained the right way.

    python examples/seq2seq.py                          some seconds on a CPU; a GPU is used if there is one
    python examples/seq2seq.py --precision bf16         or fp16, fp32; "auto" takes what the device has tensor cores for
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

PADDING, START, WORDS, LONGEST, WIDTH = 0, 1, 14, 10, 32
BATCH, ACCUMULATE = 16, 4
Batch = tuple[Tensor, Tensor]
LESSON = """
Lesson: with padding, `loss / n` is not the mean. Give the engine weight=, a function that counts tokens, and
accumulation equals one large batch."""


class Translator(nn.Module):
    """Encoder, and a decoder that attends to its own output so far and to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.said, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WORDS)
        )

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        places = torch.arange(source.shape[1], device=source.device)
        length = (source != PADDING).sum(1, keepdim=True)
        from_the_end = (length - 1 - places).clamp(min=0)
        memory = F.relu(self.mix(self.words(source) + self.places(from_the_end)))
        state = self.said(before) + self.places(places)
        looks_at = (source != PADDING).unsqueeze(1)  # a boolean mask: FP16 has no -1e9
        found = F.scaled_dot_product_attention(self.query(state), self.key(memory), self.value(memory), looks_at)
        logits: Tensor = self.out(state + found)
        return logits


def sentences(count: int, lengths: Sequence[int], device: torch.device) -> Batch:
    """Return sentences and their translations: the next word for each, in reverse."""
    length = torch.tensor(lengths)[torch.randint(len(lengths), (count, 1))]
    places = torch.arange(max(lengths))
    source = torch.randint(START + 1, WORDS, (count, max(lengths))).where(places < length, PADDING)
    reverse = (length - 1 - places).clamp(min=0)
    following = (source - 1) % (WORDS - START - 1) + START + 1
    target = following.gather(1, reverse).where(places < length, PADDING)
    return source.to(device), target.to(device)


def window(device: torch.device) -> list[Batch]:
    """Return the micro-batches of one step, from short sentences to long ones."""
    return [sentences(BATCH, lengths, device) for lengths in ((1, 2), (2, 3), (4, 5, 6), (8, 9, 10))]


def tokens(_source: Tensor, target: Tensor) -> Tensor:
    """Return the weight of a micro-batch. It stays on the device, so there is no sync."""
    return (target != PADDING).sum()


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean over the tokens of a micro-batch."""

    def loss_fn(source: Tensor, target: Tensor) -> Tensor:
        before = F.pad(target[:, :-1], (1, 0), value=START)
        return F.cross_entropy(model(source, before).float().flatten(0, 1), target.flatten(), ignore_index=PADDING)

    return loss_fn


def moved(batches: Sequence[Batch], weight: Callable[..., Tensor] | None, device: torch.device) -> Tensor:
    """Return the change of the weights by one SGD step with a rate of 1: the gradient of the step."""
    torch.manual_seed(0)
    model = Translator().to(device)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = ampwise.Engine(model, optimizer, "fp32", accumulate=len(batches), weight=weight)
    for batch in batches:
        engine.step(loss_of(model), *batch)
    return start - nn.utils.parameters_to_vector(model.parameters()).detach()


def compare(device: torch.device) -> tuple[float, float]:
    """Return the gradient's errors relative to one large batch: averaged over micro-batches, and over tokens."""
    batches = window(device)
    padded = [[F.pad(each, (0, LONGEST - each.shape[1]), value=PADDING) for each in batch] for batch in batches]
    whole = moved([(torch.cat([each[0] for each in padded]), torch.cat([each[1] for each in padded]))], None, device)
    by_batches, by_tokens = (moved(batches, weight, device) for weight in (None, tokens))
    return float((by_batches - whole).norm() / whole.norm()), float((by_tokens - whole).norm() / whole.norm())


def train(precision: str, steps: int, device: torch.device) -> tuple[float, ampwise.Engine]:
    """Return the share of right words in new sentences, given the words before each."""
    model = Translator().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0, accumulate=ACCUMULATE, weight=tokens)
    loss_fn = loss_of(model)
    for _ in range(steps):
        for batch in window(device):
            step = engine.step(loss_fn, *batch)
        if step.number % max(1, steps // 5) == 0:
            print(f"step {step.number:4}: loss {step.loss:.3f}, norm {step.grad_norm:.2f}")
    source, target = sentences(256, range(1, LONGEST + 1), device)
    with torch.no_grad(), engine.autocast():
        guesses = model(source, F.pad(target[:, :-1], (1, 0), value=START)).argmax(-1)
    return float((guesses == target)[target != PADDING].float().mean()), engine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="%(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    by_batches, by_tokens = compare(device)
    print("The gradient of a window of four micro-batches, against that of all its sentences at once, in FP32:")
    print(f"  the mean over micro-batches   {by_batches:8.1e} away")
    print(f"  the mean over tokens          {by_tokens:8.1e} away\n")
    right, engine = train(options.precision, options.steps, device)
    print(f"\n{engine.precision} on {device}: {right:.1%} of the words of new sentences are right.")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
