"""Which bad steps are replayed, what is said of the others, and what is saved of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampwise.engine.capsules import MOST
from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.report.wording import size
from ampwise.watch.calls import Call, Calls
from ampwise.watch.following import Following
from ampwise.watch.replaying import BadOne, explain
from ampwise.watch.saying import say_if_open

__all__ = ["BadSteps"]

APART = 1000  # steps after which one is replayed again, however many there have been
MOST_SENTENCES = 8  # they are much alike


class BadSteps:
    """Told of each, as soon as it is known. capsules: a folder to save them in; weights: with those of the model."""

    def __init__(
        self,
        calls: Calls,
        follows: Following,
        failed: Callable[[Exception], None],
        *,
        capsules: Path | None = None,
        weights: bool = True,
    ) -> None:
        self._calls, self._follows, self._failed = calls, follows, failed
        self._capsules, self._with_weights = capsules, weights
        self._saved = 0
        self._counts: Counter[bool] = Counter()
        self._last: dict[bool, int] = {}
        self.after_model = False  # a step was bad whose models, replayed, are finite
        self.sentences: dict[str, None] = {}  # what was not replayed, and why; in order, each once

    def explain(self, step: BadOne) -> list[Finding]:
        """While the weights are still those that the step ran with, as far as anybody knows."""
        if not self._is_due(step):
            return []
        fresh = [call for call in self._calls if self._calls.is_fresh(call)]
        if not fresh:
            self._say_why_there_are_none(step)
            return []
        try:
            with self._follows.paused():
                told = explain(fresh, step)
        except Exception as error:  # the model's own perhaps, which ran well before
            self._failed(error)
            what = ": ".join(each for each in (type(error).__name__, str(error).rstrip(".")) if each)
            self._say(f"Step {step.number} could not be replayed: the model, run again, fails with {what}.")
            return []
        self.after_model |= told.after_model
        if told.why_not:
            self._say(told.why_not)
        if told.findings or not step.may_be_ordinary:
            return self._saved_with(told.call or fresh[-1], step, told.findings)
        return told.findings

    def came_too_late(self, step: BadOne) -> None:
        """It is known only now that nothing can be replayed any more."""
        if self._is_due(step):
            self._say(
                f"Step {step.number} could not be replayed: nothing skipped it, and the weights had changed by the "
                "time it was known to be bad."
            )

    def _is_due(self, step: BadOne) -> bool:
        """The first, the second, the fourth and so on; those that a loss scale may explain are counted apart."""
        kind = step.may_be_ordinary
        self._counts[kind] += 1
        due = self._counts[kind].bit_count() == 1 or step.number - self._last.get(kind, 0) >= APART
        if due:
            self._last[kind] = step.number
        return due

    def _say_why_there_are_none(self, step: BadOne) -> None:
        if step.may_be_ordinary:
            return
        if any(True for _ in self._calls):
            why = "the weights had changed by the time it was known to be bad"
        elif self._calls.too_large:
            why = f"what the model was given ({self._calls.too_large / 2**20:.0f} MiB) was too large to keep"
        else:
            why = "no call of a model was seen; it was compiled as a whole, or not called as a module"
        self._say(f"Step {step.number} could not be replayed: {why}.")

    def _say(self, sentence: str) -> None:
        if len(self.sentences) < MOST_SENTENCES:
            self.sentences[" ".join(sentence.split())] = None

    # Capsules

    def _saved_with(self, call: Call, step: BadOne, findings: list[Finding]) -> list[Finding]:
        """The findings, which say where the step was saved if that was asked for."""
        if self._capsules is None or self._saved >= MOST:
            return findings
        self._saved += 1
        from ampwise.trace.capsule import size_of, write

        contents = _contents(call, step, findings)
        try:
            how_large = size(size_of(contents, self._with_weights))
            say_if_open("ampwise: saving step {} in {} ({})", step.number, self._capsules, how_large)
            path = write(self._capsules, contents, weights=self._with_weights)
        except BadInput as error:
            self._say(f"Step {step.number} could not be saved: {error}")
            return findings
        where = f"{path} ({how_large})"
        return [finding.but(evidence={**finding.evidence, "capsule": where}) for finding in findings]


def _contents(call: Call, step: BadOne, findings: Sequence[Finding]) -> Any:
    from ampwise.randomness import plain_random
    from ampwise.trace.capsule import Contents
    from ampwise.trace.replay import Subject

    model = Subject(run=lambda _: None, device=call.device, models=[call.model])
    return Contents(
        args=call.args,
        kwargs=call.kwargs,
        random=plain_random(call.random),
        weights=model.parameters(),
        buffers=model.buffers(),
        precision=call.precision,
        scale=step.scale or 1.0,
        step=step.number,
        loss=step.loss,
        findings=findings,
        device=call.device.type,
    )
