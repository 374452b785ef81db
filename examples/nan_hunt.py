"""Train a small classifier of texts whose loss is NaN at step 20, and see which line caused it.

Such a mistake passes every test: a mean over the words of a text, where one text in a few hundred has no words left
after cleaning. The engine skips the step, replays it with every operation checked, and says which operation it was,
what its inputs were, and what fixes it. Training continues.

    python examples/nan_hunt.py                         the finding, and the losses around it
    python examples/nan_hunt.py --capsules capsules     the bad step is saved, too; then:
    ampwise replay capsules/step-000020 examples/nan_hunt.py:make
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

WORDS, WIDTH, LENGTH, BATCH = 200, 32, 12, 16
EMPTY_AT = 20  # the batch that has a text without words
Batch = tuple[Tensor, Tensor, Tensor]


class Classifier(nn.Module):
    """Classify texts by whether most of their words are from the first half of the vocabulary."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, text: Tensor, is_word: Tensor) -> Tensor:
        present = is_word.unsqueeze(-1).float()
        mean = (self.words(text) * present).sum(1) / present.sum(1)  # 0/0 for a text without words
        return self.head(torch.relu(self.body(mean)))  # type: ignore[no-any-return]


def make(width: int = WIDTH) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return the model and its loss, for training and for ``ampwise replay``."""
    model = Classifier(width)

    def loss_fn(text: Tensor, is_word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(text, is_word), label)

    return model, loss_fn


def batches(count: int) -> Iterator[Batch]:
    for number in range(1, count + 1):
        label = torch.randint(2, (BATCH,))
        text = torch.randint(WORDS // 2, (BATCH, LENGTH)) + label.unsqueeze(1) * (WORDS // 2)
        lengths = torch.randint(3, LENGTH + 1, (BATCH,))
        if number == EMPTY_AT:
            lengths[5] = 0
        yield text, torch.arange(LENGTH) < lengths.unsqueeze(1), label


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="%(default)s")
    parser.add_argument("--capsules", metavar="FOLDER", help="save bad steps there, for `ampwise replay`")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model, loss_fn = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    capsules = [ampwise.Capsules(options.capsules, make="nan_hunt.py:make")] if options.capsules else []
    engine = ampwise.Engine(model, optimizer, precision="fp16", clip_norm=1.0, callbacks=capsules)
    for batch in batches(options.steps):
        step = engine.step(loss_fn, *batch)
        if step.number % 10 == 0 or step.skipped:
            print(f"step {step.number:3}  loss {step.loss:.4f}{'  skipped' if step.skipped else ''}")
    for finding in engine.findings:
        print(f"{finding.rule.code} {finding.rule.name}: {finding.place}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
