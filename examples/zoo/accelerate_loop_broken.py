"""A loop ported to Accelerate and BF16.

The GradScaler was kept, which BF16 has no use for, and the model's own zero_grad throws the first micro-batches away:
that of the prepared optimizer would have waited for the step.
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, WIDTH, CLASSES, BATCH, EPOCHS = 16, 32, 4, 32, 2


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(F.relu(self.hidden(x))))
        return logits


def get_dataloaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Data that are batched already, as a tokenized corpus on disk is."""
    x = torch.randn(16, BATCH, FEATURES)
    y = (x @ torch.randn(FEATURES, CLASSES)).argmax(-1)
    train, test = TensorDataset(x[:12], y[:12]), TensorDataset(x[12:], y[12:])
    return DataLoader(train, batch_size=None, shuffle=True), DataLoader(test, batch_size=None)


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    right, seen = 0, 0
    for x, y in loader:
        with torch.no_grad():
            logits = model(x)
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), y))
        right, seen = right + int((predictions == references).sum()), seen + len(references)
    return right / seen


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    train_loader, test_loader = get_dataloaders()
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")  # expect: AMP302
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(EPOCHS):
            model.train()
            for x, y in train_loader:
                with accelerator.accumulate(model):
                    model.zero_grad()  # expect: AMP206
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(scaler.scale(loss))
                    if accelerator.sync_gradients:
                        scaler.unscale_(optimizer)
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
            scheduler.step()
            accuracy = evaluate(accelerator, model, test_loader)
            accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.2f}")
            state = {"model": accelerator.get_state_dict(model), "optimizer": optimizer.state_dict()}
            accelerator.save(state | {"scaler": scaler.state_dict()}, f"{folder}/epoch_{epoch}.pt")


if __name__ == "__main__":
    main()
