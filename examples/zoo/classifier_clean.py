"""An image classifier in the manner of timm: a scaler in a wrapper that clips and steps, and an average of the weights.

The loss scale is in the checkpoint, and both models are evaluated under the autocast they are trained in.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIZE, BATCH, BATCHES, EPOCHS = 4, 8, 16, 8, 3
Batch = tuple[Tensor, Tensor]


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * (SIZE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.norm(self.stem(images)))
        logits: Tensor = self.head(features.flatten(1))
        return logits


class NativeScaler:
    """Backward, clip, step and update behind one call."""

    state_dict_key = "amp_scaler"

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        parameters: Iterable[Tensor] = (),
        need_update: bool = True,
    ) -> None:
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()


class ModelEma:
    """A copy of the model whose weights follow the trained ones slowly."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        trained = model.state_dict()
        for name, value in self.module.state_dict().items():
            if value.is_floating_point():
                value.lerp_(trained[name], 1 - self.decay)
            else:
                value.copy_(trained[name])


def batches(seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
        images[:, 0] += labels.view(-1, 1, 1) - 1.5
        yield images, labels


def train_one_epoch(
    epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss_scaler: NativeScaler, ema: ModelEma
) -> float:
    model.train()
    total = 0.0
    for images, labels in batches(seed=epoch):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(images)
            loss = F.cross_entropy(output.float(), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        ema.update(model)
        total += loss.item()
    return total / BATCHES


@torch.no_grad()
def validate(model: nn.Module) -> float:
    model.eval()
    right = 0
    for images, labels in batches(seed=1000):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(images)
        right += int((output.argmax(1) == labels).sum())
    return right / (BATCHES * BATCH)


def save_checkpoint(
    path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss_scaler: NativeScaler, ema: ModelEma
) -> None:
    state = {
        "epoch": epoch,
        "state_dict": model.state_dict(),
        "state_dict_ema": ema.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        NativeScaler.state_dict_key: loss_scaler.state_dict(),
    }
    torch.save(state, path)


def main() -> None:
    torch.manual_seed(0)
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loss_scaler = NativeScaler()
    ema = ModelEma(model)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(EPOCHS):
            loss = train_one_epoch(epoch, model, optimizer, loss_scaler, ema)
            accuracy, accuracy_ema = validate(model), validate(ema.module)
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.2f}, of the average {accuracy_ema:.2f}")
            save_checkpoint(Path(folder) / "last.pth.tar", epoch, model, optimizer, loss_scaler, ema)


if __name__ == "__main__":
    main()
