"""A GAN: two networks, two optimizers, one scaler that is updated once when both have stepped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LATENT, WIDTH, POINTS, BATCH, STEPS = 8, 32, 2, 64, 30


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, POINTS))

    def forward(self, noise: Tensor) -> Tensor:
        points: Tensor = self.net(noise)
        return points


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(POINTS, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.net(points)
        return scores.flatten()


def real_points() -> Tensor:
    """Points on a circle, a little off it."""
    angle = torch.rand(BATCH) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(BATCH, POINTS)


def main() -> None:
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    scaler = torch.amp.GradScaler("cpu")
    ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)

    for step in range(STEPS):
        # The discriminator learns to tell real points from made ones.
        optimizer_d.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = generator(torch.randn(BATCH, LATENT))
            score_real = discriminator(real_points())
            score_fake = discriminator(fake.detach())
            loss_d = criterion(score_real.float(), ones) + criterion(score_fake.float(), zeros)
        scaler.scale(loss_d).backward()
        scaler.step(optimizer_d)

        # The generator learns to fool it; what its backward leaves in the discriminator is thrown away above.
        optimizer_g.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss_g = criterion(discriminator(fake).float(), ones)
        scaler.scale(loss_g).backward()
        scaler.step(optimizer_g)
        scaler.update()

        if step % 10 == 0:
            print(f"[{step}/{STEPS}] loss_d {loss_d.item():.4f} loss_g {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
