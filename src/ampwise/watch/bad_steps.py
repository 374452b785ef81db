"""Decide which bad steps are replayed, say why others are not, and save them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.report.formatting import format_bytes
from ampwise.trace.capsule.saving import MAX_CAPSULES
from ampwise.watch.followed_thread import FollowedThread
from ampwise.watch.model_calls import ModelCall, ModelCalls
from ampwise.watch.stderr import say_on_stderr
from ampwise.watch.step_replay import StepToReplay, replay_step

__all__ = ["BadStepReplays"]

APART = 1000  # steps after which another is replayed, however many there were
MOST_SENTENCES = 8  # they are similar


class BadStepReplays:
    """Replay bad steps. capsules: a folder to save them in; weights: save the model's weights, too."""

    def __init__(
        self,
        calls: ModelCalls,
        follows: FollowedThread,
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
        self.after_model = False  # a bad step was replayed, and its models are finite
        self.sentences: dict[str, None] = {}  # on steps that were not replayed; in order, each once

    def explain(self, step: StepToReplay) -> list[Finding]:
        """Replay a step while the weights are still those it ran with. Return the findings."""
        if not self._is_due(step):
            return []
        fresh = [call for call in self._calls if self._calls.is_fresh(call)]
        if not fresh:
            self._explain_missing_calls(step)
            return []
        try:
            with self._follows.paused():
                result = replay_step(fresh, step)
        except Exception as error:  # perhaps the model's own
            self._failed(error)
            what = ": ".join(each for each in (type(error).__name__, str(error).rstrip(".")) if each)
            self._add_sentence(f"Step {step.number} could not be replayed: running the model again failed with {what}.")
            return []
        self.after_model |= result.after_model
        if result.why_not:
            self._add_sentence(result.why_not)
        if result.findings or not step.may_be_ordinary:
            return self._saved_with(result.call or fresh[-1], step, result.findings)
        return result.findings

    def came_too_late(self, step: StepToReplay) -> None:
        """Note that a step was found to be bad only after its weights had changed."""
        if self._is_due(step):
            self._add_sentence(
                f"Step {step.number} could not be replayed: it was not skipped, and the weights had changed by the "
                "time it was known to be bad."
            )

    def _is_due(self, step: StepToReplay) -> bool:
        """Return whether to replay the step: the 1st, 2nd, 4th ... Those a loss scale may explain count separately."""
        kind = step.may_be_ordinary
        self._counts[kind] += 1
        due = self._counts[kind].bit_count() == 1 or step.number - self._last.get(kind, 0) >= APART
        if due:
            self._last[kind] = step.number
        return due

    def _explain_missing_calls(self, step: StepToReplay) -> None:
        if step.may_be_ordinary:
            return
        if any(True for _ in self._calls):
            why = "the weights had changed by the time it was known to be bad"
        elif self._calls.too_large:
            why = f"the model's input ({self._calls.too_large / 2**20:.0f} MiB) was too large to keep"
        else:
            why = "no call of a model was seen; the step is compiled as a whole, or the model is not called as a module"
        self._add_sentence(f"Step {step.number} could not be replayed: {why}.")

    def _add_sentence(self, sentence: str) -> None:
        if len(self.sentences) < MOST_SENTENCES:
            self.sentences[" ".join(sentence.split())] = None

    # Capsules

    def _saved_with(self, call: ModelCall, step: StepToReplay, findings: list[Finding]) -> list[Finding]:
        """Save the step if requested, and return the findings with the path of the capsule."""
        if self._capsules is None or self._saved >= MAX_CAPSULES:
            return findings
        self._saved += 1
        from ampwise.trace.capsule import size_of, write

        contents = _contents(call, step, findings)
        try:
            how_large = format_bytes(size_of(contents, self._with_weights))
            say_on_stderr("ampwise: saving step {} in {} ({})", step.number, self._capsules, how_large)
            path = write(self._capsules, contents, weights=self._with_weights)
        except BadInput as error:
            self._add_sentence(f"Step {step.number} could not be saved: {error}")
            return findings
        where = f"{path} ({how_large})"
        return [finding.but(evidence={**finding.evidence, "capsule": where}) for finding in findings]


def _contents(call: ModelCall, step: StepToReplay, findings: Sequence[Finding]) -> Any:
    from ampwise.trace.capsule import CapsuleContents
    from ampwise.trace.replay import ReplayStep
    from ampwise.train.random_state import to_plain_random

    model = ReplayStep(run=lambda _: None, device=call.device, models=[call.model])
    return CapsuleContents(
        args=call.args,
        kwargs=call.kwargs,
        random=to_plain_random(call.random),
        weights=model.parameters(),
        buffers=model.buffers(),
        precision=call.precision,
        scale=step.scale or 1.0,
        step=step.number,
        loss=step.loss,
        findings=findings,
        device=call.device.type,
    )
