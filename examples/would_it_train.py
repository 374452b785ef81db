"""Would it train in NVFP4? A small GPT on letters, in FP32 and in formats without hardware on this computer.

Every matmul, forward and backward, is computed on values rounded to the format and summed in FP32, as hardware
with the format would. Each run starts with the same weights and uses the same batches.

    python examples/would_it_train.py                                  losses in FP32, MXFP8, E4M3 and NVFP4
    python examples/would_it_train.py --precisions emulate:mxfp4 emulate:mxfp4,stochastic --steps 400
    python examples/would_it_train.py --keep head                      with a module left in FP32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

TEXT = Path(__file__).with_name("text.txt")
PRECISIONS = ("fp32", "emulate:mxfp8", "emulate:e4m3", "emulate:nvfp4")
WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 32, 2, 2, 32, 16
LAST = 10  # steps whose losses are averaged


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def encoded() -> tuple[Tensor, int]:
    """Return the text as numbers, and the number of letters."""
    text = TEXT.read_text(encoding="utf-8")
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def losses(precision: str, keep: Sequence[str], steps: int) -> list[float]:
    """Return the loss of each step of a run in this precision."""
    text, letters = encoded()
    torch.manual_seed(0)
    model = Gpt(letters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = ampwise.Policy(precision).keep("fp32", *keep) if keep else ampwise.Policy(precision)
    engine = ampwise.Engine(model, optimizer, policy, clip_norm=1.0)

    def loss_fn(given: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(model(given).flatten(0, 1), following.flatten())

    drawn = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=drawn)
        rows = text[starts + torch.arange(CONTEXT + 1)]
        found.append(engine.step(loss_fn, rows[:, :-1], rows[:, 1:]).loss)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, metavar="NAME", help="first: the reference")
    parser.add_argument("--keep", nargs="+", default=(), metavar="GLOB", help="modules that stay in FP32")
    parser.add_argument("--steps", type=int, default=60, help="%(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # matrices this small take longer with more
    reference = None
    for precision in options.precisions:
        ends = losses(precision, options.keep, options.steps)[-LAST:]
        mean = sum(ends) / len(ends)
        reference = reference or mean
        print(f"{precision:28} loss {mean:.4f}  {mean / reference - 1:+7.2%} from {options.precisions[0]}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
