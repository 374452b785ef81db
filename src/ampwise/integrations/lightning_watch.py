"""Lightning callback that watches a Trainer's fit as ``ampwise run`` does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.integrations.training_watch import TrainingWatch
from ampwise.integrations.versions import LIGHTNING, lightning_name, require
from ampwise.runs.reader import Run

require(LIGHTNING, lightning_name())
if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = importlib.import_module(lightning_name())

__all__ = ["Watch"]


class Watch(pl.Callback):
    """Callback for ``Trainer(callbacks=[Watch()])``: loss scale, skips, norms, gradient health, and findings.

    The metrics of docs/sinks.md go to the Trainer's loggers, through ``log`` and its ``log_every_n_steps``; findings
    are printed to stderr when the fit ends. Gradients are measured unscaled, before they are clipped.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: overwrite a record there.
    every: full gradient histograms at every n-th step; None: as often as 1% of the time allows. activations: watch the
    outputs of modules. timing: measure where time goes. sinks: as for ``Engine``. quiet: no summary at the end. After
    the fit, ``run`` has the findings: ``[seen.finding for seen in watch.run.findings]``.
    """

    def __init__(
        self,
        output: str | Path | None = None,
        *,
        force: bool = False,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        sinks: Sequence[str | Callable[[Any], None]] = (),
        quiet: bool = False,
    ) -> None:
        self._watching = TrainingWatch(
            "ampwise.integrations.lightning.Watch",
            output,
            force=force,
            every=every,
            activations=activations,
            timing=timing,
            sinks=sinks,
            quiet=quiet,
        )

    @property
    def run(self) -> Run | None:
        """Record of the last fit that ended."""
        return self._watching.run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start watching, before optimizers are made."""
        if stage == "fit":
            self._watching.begin(trainer, rank=trainer.global_rank, world_size=trainer.world_size)
            self._watching.adopt(pl_module, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log new metrics; on a GPU these are of the previous step."""
        for name, value in self._watching.take().items():
            pl_module.log(name, value, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the record of a fit that raised."""
        self._watching.end(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the record when the fit ends."""
        if stage == "fit":
            self._watching.end()
