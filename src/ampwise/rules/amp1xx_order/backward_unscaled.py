from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import ITS_SCALER, is_prepared
from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.scaled_losses import is_certainly_scaled, may_be_scaled
from ampwise.check.source.statement_order import is_always_bound, is_certainly_grad_scaler, statement_range
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Moment, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import ScalerStep

RULE = Rule(
    code="AMP108",
    name="backward-unscaled",
    severity=Severity.ERROR,
    summary="`loss.backward()` is called without `scaler.scale`, but `scaler.step` follows.",
    why=(
        "`scaler.step` divides the gradients by the loss scale. If the loss was never multiplied by it, the update "
        "is 65536 times too small, and FP16 gradients underflow as if there were no scaler at all."
    ),
    fix="Call `scaler.scale(loss).backward()`.",
    bad="loss.backward()\nscaler.step(optimizer)\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    fixable="sometimes",
)
NEEDS = (("caler", "Accelerator("), (".backward(",), (".step(",))

SCALES_MANUALLY = LazyPattern(r"get_scale\(|\._scale\b|\.grad\b|register_hook")
APPLIES = ("scaled backward", "opaque", "optimizer step", "zero grad", "unscale", "scaler step")


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        found = []  # the plain backward calls, each with the scaler step that applies it
        may_be_plain = False  # whether some mode has no scaler, or a disabled one
        for backward, moments in region.visits("backward"):
            # On the other paths, within an accumulation window, the gradients only add up.
            applied = [m for m in moments if any(m.later("scaler step", "optimizer step", "scaled backward", "opaque"))]
            steps = [step for moment in applied if (step := _step_of(moment, code))]
            if region.is_sampled and region.has("optimizer step"):
                continue  # a path that was not taken may apply it without the scaler
            # Next to a branch that scales, this may be the branch where the scaler is disabled.
            if region.has("scaled backward") and not all(is_certainly_scaled(step) for step in steps):
                continue
            # Without the scaler, `optimizer.step()` applies them as they are: only the other mode is wrong.
            plain = [m for m in applied if not region.has("scaled backward") and _is_applied_plainly(m)]
            if steps and len(steps) + len(plain) == len(applied) and not may_be_scaled(backward):
                found.append((backward, steps[0]))
                may_be_plain = may_be_plain or bool(plain)
        edits, doubt = _scaled(found, region, code)
        if may_be_plain and doubt:
            edits, doubt = (), None  # where the scaler is None, it has no `scale`
        for backward, step in found:
            fix = f"{RULE.fix} Not a safe fix: {doubt}." if doubt else None
            if not edits:
                fix = RULE.without_edit("not every backward of this step has the scaler and a plain loss at hand")
            yield RULE.at(
                backward.place,
                f"the scaler unscales these gradients in {step.spot(backward)}, but they were never scaled",
                fix="Call `accelerator.backward(loss)`, which scales it." if step.key == ITS_SCALER else fix,
                edits=edits,
                safe=doubt is None,
            )


def _step_of(moment: Moment, code: SourceFile) -> SourceEvent | None:
    """Return the scaler step that applies this backward, if nothing else may have touched the gradients."""
    for event in moment.later(*APPLIES):
        if event.kind == "scaler step":
            if _may_be_mixed(moment, event):
                return None
            return event if event.key != ITS_SCALER or _is_its_own(event, code) else None
        if event.kind != "unscale" or event.key == ANYTHING:
            return None
    return None


def _is_applied_plainly(moment: Moment) -> bool:
    """Whether an optimizer's own step applies this backward, on a path where the scaler is absent or disabled."""
    first = next(iter(moment.later(*APPLIES)), None)
    asked = [text for text, holds in moment.path.decided.items() if not holds]
    return first is not None and first.kind == "optimizer step" and any("scaler" in text.lower() for text in asked)


def _may_be_mixed(moment: Moment, step: SourceEvent) -> bool:
    """Whether the step may apply scaled gradients, too: they come before this backward, and nothing clears them."""
    for event in moment.earlier("scaled backward", "opaque", "zero grad"):
        if event.kind != "zero grad":
            return True
        if step.other is not None and event.key == step.other:
            return False  # the other backward was that of another optimizer, as in a GAN
    return False


def _is_its_own(step: SourceEvent, code: SourceFile) -> bool:
    """Whether an accelerator certainly unscales in a step, and no other backward of the file is scaled by it."""
    scales = any(event.kind == "scaled backward" and event.key == ITS_SCALER for event in code.events)
    return is_prepared(step.receiver, code) and not scales


def _scaled(
    found: list[tuple[SourceEvent, SourceEvent]], region: Region, code: SourceFile
) -> tuple[tuple[Edit, ...], str | None]:
    """Return edits that wrap every loss of the step in ``scaler.scale``, and why they may be unsafe.

    No edits unless they cover all backward calls: scaled and unscaled gradients do not mix.
    """
    if any(step.key == ITS_SCALER for _, step in found):
        return (), None
    scalers = {dotted_text(step.receiver) for _, step in found}
    scaler = scalers.pop() if len(scalers) == 1 else None
    is_all = {backward.node for backward, _ in found} == {event.node for event in region.events_of("backward")}
    is_all = is_all and len({backward.frame.outline for backward, _ in found}) == 1
    # Each is `loss.backward()`, in the same function as the scaler.
    can_be_wrapped = all(b.receiver is b.value and step.frame is b.frame for b, step in found)
    if scaler is None or not is_all or not can_be_wrapped:
        return (), None
    script = found[0][0].frame.outline.script
    losses = dict.fromkeys(backward.receiver for backward, _ in found)
    edits = tuple(script.replace(loss, f"{scaler}.scale({script.segment(loss)})") for loss in losses)
    for backward, step in found:
        if not is_certainly_grad_scaler(step, code):
            return edits, "it is unclear whether the scaler is always a GradScaler"
        between = statement_range(backward, step)
        surely_steps = between is not None and not between.may_be_left and not between.rebinds(scaler)
        if not surely_steps and not is_always_bound(step):
            return edits, "the scaler may not exist yet at the backward"
        if SCALES_MANUALLY.search(script.text):
            return edits, "the gradients may be scaled manually elsewhere"
    return edits, None


def check_event(step: ScalerStep) -> Findings:
    for backward in step.unscaled:
        what = "part of the loss" if backward.partly else "the loss"
        yield RULE.at(
            backward.site.place,
            f"{what} is not scaled, but `scaler.step` at {step.site.short} divides its gradients by the loss scale",
        )
