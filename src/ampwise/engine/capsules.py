"""Bad steps that an engine saves, for ``ampwise replay``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.printers.terminal import say
from ampwise.randomness import plain_random
from ampwise.report.wording import size
from ampwise.trace.replay import Subject

if TYPE_CHECKING:
    from ampwise.engine.bad_steps import Bad
    from ampwise.engine.passes import Pass

__all__ = ["FOR_ALL", "Capsules", "checked_capsules"]

MOST = 4  # of a run: whoever has more of them has one cause

FOR_ALL: list[Capsules] = []  # where the steps of engines go that have none of their own: a watch's


class Capsules:
    """Where an engine saves steps that went bad, and how they are built again elsewhere.

    build: the function that makes the model and the loss function, by name: "train:make" or "train.py:make", which is
        called with ``arguments`` and returns both. ``ampwise replay --build`` names it again: a capsule alone has
        nothing called.
    weights: save those of the model; without, they are what the function makes.

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
            raise BadInput(f"Capsules({folder!r}): a folder is expected, such as Capsules('capsules').")
        if not isinstance(arguments, Mapping | None) or not all(isinstance(name, str) for name in arguments or ()):
            raise BadInput(f"Capsules(arguments={arguments!r}): a dict by name is expected, such as {{'width': 64}}.")
        if build is not None and (not isinstance(build, str) or not all(build.partition(":"))):
            raise BadInput(f'Capsules(build={build!r}): a function is expected by name: "module:function".')
        if arguments:
            from ampwise.trace.capsule.arguments import checked_arguments

            checked_arguments(arguments)  # now, and not when the step has gone bad
        self._folder, self.build, self._arguments = Path(folder), build, dict(arguments or {})
        self._weights = weights
        self._saved = 0

    def __repr__(self) -> str:
        build = f", built by {self.build}" if self.build else ""
        return f"<Capsules in {self._folder}{build}{'' if self._weights else ', without weights'}>"

    def save(
        self, subject: Subject, bad: Bad, kept: Pass, policy: Mapping[str, Any], found: Sequence[Finding]
    ) -> Path | None:
        """Save a step as it began; None if there are enough, or it cannot be saved, which is said."""
        if self._saved >= MOST:
            return None
        self._saved += 1
        from ampwise.trace.capsule import Contents, next_path, size_of, write

        contents = Contents(
            args=kept.args,
            kwargs=kept.kwargs,
            random=plain_random(kept.random),
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
            how_large = size(size_of(contents, self._weights))
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
    raise BadInput(f"Engine(capsules={given!r}): a folder is expected, or ampwise.Capsules(folder, build=...).")
