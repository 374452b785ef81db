"""The callback for Hugging Face's Trainer: the watch of ``ampwise run`` over its ``train()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampwise.integrations.versions import TRANSFORMERS, require
from ampwise.integrations.watching import Watching
from ampwise.record.reader import Run
from ampwise.watch.patches import Patches

require(TRANSFORMERS, "transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402

__all__ = ["AmpwiseCallback"]

THEIRS = ("ampwise/loss", "ampwise/lr", "ampwise/grad_norm")  # which the Trainer logs itself, by other names
OF_EVALUATION = "_runtime"  # by whatever prefix: the user may choose it
OF_THE_END = "train_runtime"


class AmpwiseCallback(TrainerCallback):
    """``Trainer(..., callbacks=[AmpwiseCallback()])``: loss scale, skips and gradient health, and what is wrong.

    Gradients are looked at before they are clipped, in true units: ``on_pre_optimizer_step`` would see them after.
    The numbers of docs/sinks.md go into the Trainer's own logs, each once, and with those to whatever ``report_to``
    names and into ``state.log_history``; loss, learning rate and norm the Trainer logs itself. What was found is said
    on stderr when the training ends.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: write over a record there.
    every: full counts of gradients at each n-th step; None as often as one per cent of the time allows. activations:
    look at what modules put out. timing: look where time goes. sinks: as of ``Engine``. quiet: say nothing at the end.
    After the training ``run`` has what was found.
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
        self._watching = Watching(
            "ampwise.transformers.AmpwiseCallback",
            output,
            force=force,
            every=every,
            activations=activations,
            timing=timing,
            sinks=sinks,
            quiet=quiet,
            but=THEIRS,
            when_ended=self._patches.undo,
        )

    @property
    def run(self) -> Run | None:
        """The last training that has ended."""
        return self._watching.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model and the optimizer are there, and no batch was seen."""
        if not self._watching.begin(state, rank=args.process_index, world_size=args.world_size):
            return
        optimizer = given.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        self._watching.adopt(given.get("model"), inner, getattr(optimizer, "scaler", None))
        # A callback is told of logs after `report_to` was: what is to go there has to be in them before.
        self._patches.replace(Trainer, "log", self._logging)

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if self in trainer.callback_handler.callbacks and not _are_of_evaluation(logs):
                logs.update(self._watching.take())
            return original(trainer, logs, *args, **kwargs)

        return log

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The training is over, well or by an early stop."""
        self._watching.end()


def _are_of_evaluation(logs: dict[str, float]) -> bool:
    return any(name.endswith(OF_EVALUATION) and name != OF_THE_END for name in logs)
