"""Lightning's quick start, an autoencoder, on random data. Changed: the line that creates the Trainer."""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise.integrations.lightning import Precision, Watch


class LitAutoEncoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)).float(), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def main() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    pl.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(torch.rand(32, 8, 28 * 28)), batch_size=None)
    trainer = pl.Trainer(
        max_epochs=1,
        gradient_clip_val=1.0,
        plugins=[Precision("fp16")], callbacks=[Watch()],  # was: precision="16-mixed", which raises with a fused one
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LitAutoEncoder(), loader)
    print(f"{trainer.global_step} steps, loss {float(trainer.callback_metrics['train_loss']):.3f}")


if __name__ == "__main__":
    main()
