"""A translator with attention: micro-batches added up, and a OneCycle schedule that waits when a step was skipped.

The loss scale starts so high that the first steps overflow, as they do in large models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

VOCABULARY, WIDTH, LENGTH, BATCH = 20, 32, 6, 16
ACCUMULATE, EPOCHS, BATCHES, MAX_NORM = 2, 3, 12, 1.0
Batch = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.tokens(source) + self.places))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, previous: Tensor, memory: Tensor) -> Tensor:
        state = self.tokens(previous) + self.places
        weights = (self.query(state) @ memory.mT / WIDTH**0.5).softmax(-1)
        logits: Tensor = self.out(torch.cat([state, weights @ memory], dim=-1))
        return logits


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        logits: Tensor = self.decoder(previous, self.encoder(source))
        return logits


def batches(seed: int) -> Iterator[Batch]:
    """Sentences and their translations: every token one further on, in the same order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        source = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
        yield source, source % (VOCABULARY - 1) + 1


def loss_of(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    previous = F.pad(target[:, :-1], (1, 0))
    logits = model(source, previous).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train_epoch(
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: OneCycleLR,
    scaler: torch.amp.GradScaler,
) -> float:
    model.train()
    total = 0.0
    for index, (source, target) in enumerate(batches(epoch), start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, source, target)
        scaler.scale(loss / ACCUMULATE).backward()
        total += loss.item()
        if index % ACCUMULATE:
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:  # a skipped step lowers it
            scheduler.step()
    return total / BATCHES


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    losses = []
    for source, target in batches(seed=1000):
        with torch.autocast("cpu", dtype=torch.float16):
            losses.append(loss_of(model, source, target).item())
    return sum(losses) / len(losses)


def main() -> None:
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=2e-2, total_steps=EPOCHS * BATCHES // ACCUMULATE + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for epoch in range(EPOCHS):
        loss = train_epoch(epoch, model, optimizer, scheduler, scaler)
        print(f"epoch {epoch}: loss {loss:.3f}, validation {evaluate(model):.3f}, lr {scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
