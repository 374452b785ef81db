"""Search for the layers of a small classifier that can train in FP8, and see the one that cannot.

One layer subtracts nearly equal numbers, and so has few digits left; in E4M3 there are none. The search tries formats
on parts of the model, without any hardware for FP8, and says what it found, why, and what it would gain. Then a few
steps are trained with the result, and in FP32.

    python examples/search_policy.py                      what was found, and losses in both
    python examples/search_policy.py --formats mxfp8,bf16,fp32
    ampwise search examples/search_policy.py:make         the same from the command line
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

WIDTH, CLASSES, BATCH, STEPS = 32, 4, 64, 10


class Classifier(nn.Module):
    """Sequence of layers; the third has two halves that nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        odd = self.layers[2].weight
        assert isinstance(odd, Tensor)
        with torch.no_grad():
            odd[:, WIDTH:] = -odd[:, :WIDTH] * (1 + 0.02 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            given = F.layer_norm(x, (WIDTH,))
            x = x + torch.tanh(F.layer_norm(layer(torch.cat([given, given], -1)), (WIDTH,)))
        return self.head(x)  # type: ignore[no-any-return]


def make() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, a batch and the loss, for this program and for ``ampwise search``."""
    model = Classifier()

    def loss_fn(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), labels)

    return model, batch(), loss_fn


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, WIDTH)
    return x, x[:, :CLASSES].argmax(-1)


def trained(found: ampwise.SearchResult | None, steps: int) -> list[float]:
    """Return the losses of the first steps, with the search's result or in FP32."""
    torch.manual_seed(1)
    model, _, loss_fn = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with nullcontext() if found is None else found.apply(model):
        engine = ampwise.Engine(model, optimizer, precision="fp32" if found is None else found.policy)
        return [engine.step(loss_fn, *batch()).loss for _ in range(steps)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="e4m3,bf16,fp32", help="to choose from (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="for loss and gradients, as a share (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="to train afterwards (%(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model, first, loss_fn = make()
    found = ampwise.search(
        loss_fn,
        [first, *(batch() for _ in range(3))],
        tolerance=options.tolerance,
        formats=options.formats.split(","),
        model=model,
        gpu="h200",
    )
    print(found)
    print(f"\n{found.policy!r}, and emulated: {dict(found.narrow)}\n")
    losses = zip(trained(None, options.steps), trained(found, options.steps), strict=True)
    for step, (wide, narrow) in enumerate(losses, start=1):
        print(f"step {step:3}  loss {wide:.4f} in FP32, {narrow:.4f} as found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
