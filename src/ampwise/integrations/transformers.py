"""Hugging Face integration: ``AmpwiseCallback()``, a Trainer callback that watches as ``ampwise run`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampwise.integrations.training_watch import TrainingWatch
from ampwise.integrations.versions import TRANSFORMERS, require

require(TRANSFORMERS, "transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402

__all__ = ["AmpwiseCallback"]

EVALUATION_SUFFIX = "_runtime"  # the prefix is the user's choice
TRAINING_RUNTIME = "train_runtime"


class AmpwiseCallback(TrainingWatch, TrainerCallback):
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

    _name = "ampwise.integrations.transformers.AmpwiseCallback"
    _logged_already = frozenset({"ampwise/loss", "ampwise/lr", "ampwise/grad_norm"})  # under other names

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start watching: model and optimizer exist, and no batch has been processed."""
        if not self._begin(state, rank=args.process_index, world_size=args.world_size):
            return
        optimizer = given.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        self._adopt(given.get("model"), inner, getattr(optimizer, "scaler", None))
        # Callbacks get the logs after the loggers in `report_to`, so metrics must be added before.
        self._patches.replace(Trainer, "log", self._logging)

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            of_evaluation = any(name.endswith(EVALUATION_SUFFIX) and name != TRAINING_RUNTIME for name in logs)
            if self in trainer.callback_handler.callbacks and not of_evaluation:
                logs.update(self._take())
            return original(trainer, logs, *args, **kwargs)

        return log

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the record when the training ends or stops early."""
        self._end()
