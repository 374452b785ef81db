"""Score patches by the small difference of two large numbers: what it is in 16 bits, and what to keep in FP32.

An encoder reads the patches of an image with a query. One head scores what can be left out of a patch, another what
is particular in it, and the patch with the largest difference is the answer. Only the difference is in the loss, so
nothing limits what both scores have in common: here it is 5,000. There FP16 has steps of 4 and BF16 of 32, and a
difference of ten is mostly rounding. Three runs start from the same weights, on the same batches: in FP32, in 16 bits,
and in 16 bits with the two heads in FP32.

    python examples/relevance.py                        in FP16, some seconds on a CPU; a GPU is used if there is one
    python examples/relevance.py --precision bf16
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

FEATURES, PATCHES, BATCH, COMMON = 8, 6, 16, 5000.0
HEADS = ("compress", "particularize")
LESSON = """
Lesson: keep the subtraction of nearly equal numbers in FP32, and the layers that compute them: their rounding
errors remain when the rest cancels. These are two small heads; the body of the model runs in 16 bits."""


class RelevanceScorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.encoder = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2 * FEATURES)
        self.compress = nn.Linear(2 * FEATURES, 1)
        nn.init.constant_(self.compress.bias, COMMON)
        self.particularize = copy.deepcopy(self.compress)

    def forward(self, patches: Tensor, query: Tensor) -> Tensor:
        encoded = F.relu(self.encoder(patches * self.query(query).unsqueeze(1)))
        tension: Tensor = self.particularize(encoded) - self.compress(encoded)
        return tension.squeeze(-1)


def batch(seed: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return patches, a noisy copy of one of them as a query, and its index."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, PATCHES, FEATURES, generator=generator)
    wanted = torch.randint(PATCHES, (count,), generator=generator)
    query = patches[torch.arange(count), wanted] + 0.3 * torch.randn(count, FEATURES, generator=generator)
    return patches.to(device), query.to(device), wanted.to(device)


def train(precision: str | ampwise.Policy, steps: int, device: torch.device) -> tuple[float, float, float]:
    """Return loss and accuracy on new images, and the largest error of the scores against FP64."""
    torch.manual_seed(0)
    model = RelevanceScorer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0)

    def loss_fn(patches: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(patches, query).float(), wanted)

    for number in range(steps):
        engine.step(loss_fn, *batch(number, BATCH, device))
    patches, query, wanted = batch(10**6, 256, device)
    with torch.no_grad():
        with engine.autocast():
            scores = model(patches, query).float()
        exact = copy.deepcopy(model).double()(patches.double(), query.double())
    right = (scores.argmax(1) == wanted).float().mean().item()
    return F.cross_entropy(scores, wanted).item(), right, (scores - exact).abs().max().item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="%(default)s")
    parser.add_argument("--precision", default="fp16", help="fp16, bf16 (%(default)s)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = ampwise.Policy(options.precision).keep("fp32", *HEADS)
    ways: dict[str, str | ampwise.Policy] = {
        "all in fp32": "fp32",
        f"all in {options.precision}": options.precision,
        f"{options.precision}, heads in fp32": kept,
    }
    print(f"{options.steps} steps on {device}; a choice among {PATCHES} patches\n")
    print(f"{'':24} loss    right   scores are off by up to")
    for name, precision in ways.items():
        loss, right, off = train(precision, options.steps, device)
        print(f"{name:22} {loss:6.3f} {right:8.1%} {off:17.4f}")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
