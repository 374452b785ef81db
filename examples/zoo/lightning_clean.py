"""A LightningModule trained by Lightning's Trainer in BF16, with accumulation, clipping and validation."""

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
    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        accuracy = (self(x).argmax(-1) == y).float().mean()
        self.log("val_acc", accuracy, batch_size=len(y))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ToyData(pl.LightningDataModule):
    """Data that are batched already, as a tokenized corpus on disk is."""

    def setup(self, stage: str) -> None:
        x = torch.randn(16, BATCH, FEATURES)
        y = (x @ torch.randn(FEATURES, CLASSES)).argmax(-1)
        self.train, self.test = TensorDataset(x[:12], y[:12]), TensorDataset(x[12:], y[12:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=None, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=None)


def main() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    pl.seed_everything(0, verbose=False)
    module = LitClassifier()
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
    trainer.fit(module, datamodule=ToyData())
    print(f"after {trainer.global_step} steps: accuracy {float(trainer.callback_metrics['val_acc']):.2f}")


if __name__ == "__main__":
    main()
