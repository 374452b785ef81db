"""Save an engine's bad steps for ``ampwise replay``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.terminal import say
from ampwise.report.formatting import format_bytes
from ampwise.trace.replay import ReplayStep
from ampwise.train.random_state import to_plain_random

if TYPE_CHECKING:
    from ampwise.trace.bad_steps import BadStepRecord, KeptBatch

__all__ = ["MAX_CAPSULES", "SHARED_CAPSULES", "Capsules", "checked_capsules"]

MAX_CAPSULES = 4  # per run: further bad steps usually have the same cause

# Where engines without capsules of their own save bad steps; set by ``ampwise watch``.
SHARED_CAPSULES: list[Capsules] = []


class Capsules:
    """Where an engine saves bad steps, and how to rebuild the model for a replay.

    build: name of the function that makes the model and the loss function, "train:make" or "train.py:make"; it is
        called with ``arguments`` and returns both. ``ampwise replay --build`` must name it again: loading a capsule
        alone never calls a function.
    weights: save the model's weights; without them, a replay uses the weights that the function makes.

    >>> capsules = Capsules("capsules", build="train:make", arguments={"width": 64}, weights=False)
    >>> capsules
    <Capsules in capsules, built by train:make, without weights>
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        build: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        weights: bool = True,
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise BadInput(f"Capsules({folder!r}): expected a folder, such as Capsules('capsules').")
        if not isinstance(arguments, Mapping | None) or not all(isinstance(name, str) for name in arguments or ()):
            raise BadInput(f"Capsules(arguments={arguments!r}): expected a dict by name, such as {{'width': 64}}.")
        if build is not None and (not isinstance(build, str) or not all(build.partition(":"))):
            raise BadInput(f'Capsules(build={build!r}): expected the name of a function, "module:function".')
        if arguments:
            from ampwise.trace.capsule.builder import checked_arguments

            checked_arguments(arguments)  # now, rather than at the first bad step
        self._folder, self.build, self._arguments = Path(folder), build, dict(arguments or {})
        self._weights = weights
        self._saved = 0

    def __repr__(self) -> str:
        build = f", built by {self.build}" if self.build else ""
        return f"<Capsules in {self._folder}{build}{'' if self._weights else ', without weights'}>"

    def save(
        self,
        subject: ReplayStep,
        bad: BadStepRecord,
        kept: KeptBatch,
        policy: Mapping[str, Any],
        found: Sequence[Finding],
    ) -> Path | None:
        """Save a step as it began, and return the path; None if there are enough, or (with a message) on failure."""
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
            build=self.build,
            build_args=self._arguments,
            findings=found,
            evaluating=subject.evaluating(),
            device=subject.device.type,
        )
        try:
            how_large = format_bytes(size_of(contents, self._weights))
            say("ampwise: saving step {} in {} ({})", bad.number, next_path(self._folder, contents), how_large)
            return write(self._folder, contents, weights=self._weights)
        except (BadInput, OSError) as error:
            say("ampwise: step {} could not be saved: {}", bad.number, error)
            return None


def checked_capsules(given: Any) -> Capsules | None:
    if given is None or isinstance(given, Capsules):
        return given
    if isinstance(given, str | os.PathLike):
        return Capsules(given)
    raise BadInput(f"Engine(capsules={given!r}): expected a folder or ampwise.Capsules(folder, build=...).")
