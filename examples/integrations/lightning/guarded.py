"""A Lightning fit with broken batches. Added: the guard, which leaves them out; a killed fit can be started again."""

from __future__ import annotations

import logging
import tempfile
import warnings

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise.integrations.lightning import GuardCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    pl.seed_everything(0, verbose=False)
    x = torch.randn(512, 8)
    y = x.sum(1, keepdim=True)
    x[40:64] = torch.nan
    with tempfile.TemporaryDirectory() as folder:
        guard = GuardCallback(folder, snapshot_every=4)  # the added line: in a real run, a folder that stays
        trainer = pl.Trainer(
            max_epochs=1,
            callbacks=[guard],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression(), DataLoader(TensorDataset(x, y), batch_size=8))
    assert guard.guard is not None
    print(f"{trainer.global_step} steps, passed over: {guard.guard.passed_over}")


if __name__ == "__main__":
    main()
