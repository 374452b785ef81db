"""Lightning's callback: the watch of ``ampwise run`` over a Trainer's fit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.integrations.versions import LIGHTNING, lightning_name, require
from ampwise.integrations.watching import Watching
from ampwise.record.reader import Run

require(LIGHTNING, lightning_name())
if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = importlib.import_module(lightning_name())

__all__ = ["Watch"]


class Watch(pl.Callback):
    """``Trainer(callbacks=[Watch()])``: loss scale, skips, norms and gradient health of each step, and what is wrong.

    The numbers of docs/sinks.md go to the Trainer's loggers, through ``log`` and by its ``log_every_n_steps``; what
    was found is said on stderr when the fit ends. Gradients are looked at before they are clipped, in true units.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: write over a record there.
    every: full counts of gradients at each n-th step; None as often as one per cent of the time allows. activations:
    look at what modules put out. timing: look where time goes. sinks: as of ``Engine``. quiet: say nothing at the end.
    After the fit ``run`` has what was found: ``[seen.finding for seen in watch.run.findings]``.
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
        self._watching = Watching(
            "ampwise.lightning.Watch",
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
        """The last fit that has ended."""
        return self._watching.run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before optimizers are made."""
        if stage == "fit":
            self._watching.begin(trainer, rank=trainer.global_rank, world_size=trainer.world_size)
            self._watching.adopt(pl_module, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log what has become known, which on a GPU is the step before."""
        for name, value in self._watching.take().items():
            pl_module.log(name, value, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The fit has died."""
        self._watching.end(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The fit is over."""
        if stage == "fit":
            self._watching.end()
