"""Save an engine's bad steps for ``ampwise replay``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.log import log
from ampwise.finding.terminal import shortened
from ampwise.report.formatting import format_bytes
from ampwise.trace.replay import ReplayStep
from ampwise.train.callback import Callback
from ampwise.train.random_state import to_plain_random

if TYPE_CHECKING:
    from ampwise.trace.bad_steps import BadStepRecord, KeptBatch
    from ampwise.train.engine import Engine

__all__ = ["MAX_CAPSULES", "SHARED_CAPSULES", "Capsules"]

MAX_CAPSULES = 4  # per run: further bad steps usually have the same cause

# Where engines without capsules of their own save bad steps; set by ``ampwise watch``.
SHARED_CAPSULES: list[Capsules] = []


class Capsules(Callback):
    """Callback that saves an engine's bad steps for ``ampwise replay``: ``Engine(..., callbacks=[Capsules("bad")])``.

    Args:
        folder: where to save them; created if needed. At most four per run.
        make: name of the function that makes the model and the loss function, "train:make" or "train.py:make"; it is
            called with ``arguments`` and returns both. ``ampwise replay`` must be given its name again: loading a
            capsule alone never calls a function.
        arguments: keyword arguments of that function.
        weights: save the model's weights; without them, a replay uses the weights that the function makes.

    Raises:
        BadInput: an argument does not fit.

    >>> Capsules("capsules", make="train:make", arguments={"width": 64}, weights=False)
    <Capsules in capsules, made by train:make, without weights>
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        make: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        weights: bool = True,
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise BadInput(f"Capsules({folder!r}): expected a folder, such as Capsules('capsules').")
        if not isinstance(arguments, Mapping | None) or not all(isinstance(name, str) for name in arguments or ()):
            raise BadInput(f"Capsules(arguments={arguments!r}): expected a dict by name, such as {{'width': 64}}.")
        if make is not None and (not isinstance(make, str) or not all(make.partition(":"))):
            raise BadInput(f'Capsules(make={make!r}): expected the name of a function, such as "train.py:make".')
        if arguments:
            from ampwise.trace.capsule.builder import checked_arguments

            checked_arguments(arguments)  # now, rather than at the first bad step
        self._folder, self.make, self._arguments = Path(folder), make, dict(arguments or {})
        self._weights = weights
        self._saved = 0

    def on_attach(self, engine: Engine) -> None:
        if not engine.traces:
            raise BadInput("Engine(trace=False, callbacks=[Capsules(...)]): saving bad steps needs trace=True.")

    def __repr__(self) -> str:
        made = f", made by {self.make}" if self.make else ""
        return shortened(f"<Capsules in {self._folder}{made}{'' if self._weights else ', without weights'}>")

    def save(
        self,
        subject: ReplayStep,
        bad: BadStepRecord,
        kept: KeptBatch,
        policy: Mapping[str, Any],
        found: Sequence[Finding],
    ) -> Path | None:
        """Save a step as it began, and return the path; None if there are enough, or (with a message) on failure.

        Args:
            subject: what to replay.
            bad: the step.
            kept: its micro-batch.
            policy: of the engine.
            found: findings about it.
        """
        if self._saved >= MAX_CAPSULES:
            return None
        self._saved += 1
        from ampwise.trace.capsule import CapsuleContents, next_path, size_of, write

        contents = CapsuleContents(
            args=kept.batch.args,
            kwargs=kept.batch.kwargs,
            random=to_plain_random(kept.random),
            weights=subject.parameters(),
            buffers=subject.buffers(),
            precision=bad.precision,
            policy=policy,
            scale=bad.scale,
            step=bad.number,
            loss=subject.loss,
            build=self.make,
            build_args=self._arguments,
            findings=found,
            evaluating=subject.evaluating(),
            device=subject.device.type,
        )
        try:
            how_large = format_bytes(size_of(contents, self._weights))
            log("info", "saving step {} in {} ({})", bad.number, next_path(self._folder, contents), how_large)
            return write(self._folder, contents, weights=self._weights)
        except (BadInput, OSError) as error:
            log("warning", "step {} could not be saved: {}", bad.number, error)
            return None
