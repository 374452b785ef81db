"""A LightningModule trained by Lightning's Trainer in BF16, with accumulation and clipping.

A GradScaler was left over from the loop it was ported from, and its own evaluation runs outside Lightning's autocast.
"""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, WIDTH, CLASSES, BATCH, EPOCHS = 16, 32, 4, 32, 2
Batch = tuple[Tensor, Tensor]


class LitClassifier(pl.LightningModule):
    def __init__(self, test: list[Batch], learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.test = test
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.scaler = torch.amp.GradScaler("cpu")  # expect: AMP202

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.eval()
        right = 0
        for x, y in self.test:
            logits = self(x)  # expect: AMP501
            right += int((logits.argmax(-1) == y).sum())
        self.train()
        print(f"epoch {self.current_epoch}: accuracy {right / (len(self.test) * BATCH):.2f}")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_data() -> tuple[DataLoader[tuple[Tensor, ...]], list[Batch]]:
    """Data that are batched already, as a tokenized corpus on disk is."""
    x = torch.randn(16, BATCH, FEATURES)
    y = (x @ torch.randn(FEATURES, CLASSES)).argmax(-1)
    train = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=None, shuffle=True)
    return train, list(zip(x[12:], y[12:], strict=True))


def main() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    pl.seed_everything(0, verbose=False)
    train, test = make_data()
    module = LitClassifier(test)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train)
    print(f"{trainer.global_step} steps")


if __name__ == "__main__":
    main()
