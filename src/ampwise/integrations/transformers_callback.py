"""Callback for Hugging Face's Trainer that watches ``train()`` as ``ampwise run`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampwise.integrations.training_watch import TrainingWatch
from ampwise.integrations.versions import TRANSFORMERS, require
from ampwise.runs.reader import Run
from ampwise.watch.patches import Patches

require(TRANSFORMERS, "transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402

__all__ = ["AmpwiseCallback"]

LOGGED_BY_TRAINER = ("ampwise/loss", "ampwise/lr", "ampwise/grad_norm")  # under other names
EVALUATION_SUFFIX = "_runtime"  # the prefix is the user's choice
TRAINING_RUNTIME = "train_runtime"


class AmpwiseCallback(TrainerCallback):
    """Callback for ``Trainer(..., callbacks=[AmpwiseCallback()])``: loss scale, skips, gradient health, and findings.

    Gradients are measured unscaled, before they are clipped; ``on_pre_optimizer_step`` would see them after clipping.
    The metrics of docs/sinks.md go into the Trainer's own logs, each once, and from there to the loggers in
    ``report_to`` and to ``state.log_history``; the Trainer logs loss, learning rate and norm itself. Findings are
    printed to stderr when the training ends.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: overwrite a record there.
    every: full gradient histograms at every n-th step; None: as often as 1% of the time allows. activations: watch the
    outputs of modules. timing: measure where time goes. sinks: as for ``Engine``. quiet: no summary at the end. After
    the training, ``run`` has the findings.
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
        self._patches = Patches()
        self._watching = TrainingWatch(
            "ampwise.integrations.transformers.AmpwiseCallback",
            output,
            force=force,
            every=every,
            activations=activations,
            timing=timing,
            sinks=sinks,
            quiet=quiet,
            but=LOGGED_BY_TRAINER,
            when_ended=self._patches.undo,
        )

    @property
    def run(self) -> Run | None:
        """Record of the last training that ended."""
        return self._watching.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start watching: model and optimizer exist, and no batch has been processed."""
        if not self._watching.begin(state, rank=args.process_index, world_size=args.world_size):
            return
        optimizer = given.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        self._watching.adopt(given.get("model"), inner, getattr(optimizer, "scaler", None))
        # Callbacks get the logs after the loggers in `report_to`, so metrics must be added before.
        self._patches.replace(Trainer, "log", self._logging)

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if self in trainer.callback_handler.callbacks and not _are_of_evaluation(logs):
                logs.update(self._watching.take())
            return original(trainer, logs, *args, **kwargs)

        return log

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the record when the training ends or stops early."""
        self._watching.end()


def _are_of_evaluation(logs: dict[str, float]) -> bool:
    return any(name.endswith(EVALUATION_SUFFIX) and name != TRAINING_RUNTIME for name in logs)
