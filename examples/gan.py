"""Train a GAN: two networks, two optimizers, two engines, each with its own loss scale and skipped steps.

The generator learns to put points on a ring, and the discriminator to tell them from points that really are on it. The
generator's loss scale starts far too high, as it may for a large model: its first steps are skipped until it fits,
and the discriminator is not affected.

    python examples/gan.py                              in FP16, some seconds on a CPU; a GPU is used if there is one
    python examples/gan.py --precision bf16             no loss scale, nothing skipped
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

LATENT, WIDTH, BATCH, RADIUS = 2, 24, 48, 1.0
TOO_HIGH = 2.0**24
LESSON = """
Lesson: use one engine for each network with its own step. With one scaler for both, an overflow of one halves
the scale of the other, and an `update` after each optimizer step makes it grow twice as fast."""


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2)),
        *(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)),
        nn.Linear(WIDTH, outputs),
    )


def ring(count: int, device: torch.device) -> Tensor:
    """Return points on a ring, with some noise."""
    angle = torch.rand(count, device=device) * 2 * torch.pi
    points = RADIUS * torch.stack([angle.cos(), angle.sin()], 1)
    return points + 0.03 * torch.randn_like(points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gan:
    generator: nn.Module
    discriminator: nn.Module
    device: torch.device

    def made(self, count: int) -> Tensor:
        points: Tensor = self.generator(torch.randn(count, LATENT, device=self.device))
        return points

    def judged(self, points: Tensor) -> Tensor:
        """Return logits in FP32: on a CPU, autocast would leave the losses in 16 bits."""
        logits: Tensor = self.discriminator(points)
        return logits.float()

    def tell_apart(self, real: Tensor) -> Tensor:
        """Return the discriminator's loss; softplus is the cross-entropy with logits, as autocast refuses BCELoss."""
        with torch.no_grad():  # the generator learns nothing here
            made = self.made(len(real))
        return F.softplus(-self.judged(real)).mean() + F.softplus(self.judged(made)).mean()

    def fool(self, count: int) -> Tensor:
        """Return the generator's loss; the gradients it adds to the discriminator are zeroed before that one's step."""
        return F.softplus(-self.judged(self.made(count))).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=7e-3, betas=(0.0, 0.99))


def train(gan: Gan, precision: str, steps: int) -> tuple[ampwise.Engine, ampwise.Engine]:
    telling = ampwise.Engine(gan.discriminator, adam(gan.discriminator), precision, clip_norm=1.0)
    fooling = ampwise.Engine(
        gan.generator, adam(gan.generator), precision, clip_norm=1.0, scaling={"init_scale": TOO_HIGH}
    )
    print("step   discriminator's loss, scale     generator's loss, scale")
    for number in range(1, steps + 1):
        d = telling.step(gan.tell_apart, ring(BATCH, gan.device))
        g = fooling.step(gan.fool, BATCH)
        if number % max(1, steps // 8) == 0 or number == 1:
            skipped = "  skipped" if g.skipped else ""
            print(f"{number:4} {d.loss:18.3f} {d.scale:10.0f} {g.loss:17.3f} {g.scale:10.0f}{skipped}")
    return telling, fooling


@torch.no_grad()
def off_the_ring(gan: Gan) -> float:
    """Return the mean distance of generated points from the ring."""
    return float((gan.made(1000).norm(dim=1) - RADIUS).abs().mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="%(default)s")
    parser.add_argument("--precision", default="fp16", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gan = Gan(generator=network(LATENT, 2).to(device), discriminator=network(2, 1).to(device), device=device)
    before = off_the_ring(gan)
    telling, fooling = train(gan, options.precision, options.steps)
    after = off_the_ring(gan)
    print(f"\n{fooling.precision} on {device}: points were {before:.2f} off the ring, and are {after:.2f} off it now.")
    print(f"Steps skipped: {telling.skipped_steps} of the discriminator, {fooling.skipped_steps} of the generator.")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
