from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning, WideClip

RULE = Rule(
    code="AMP620",
    name="unoptimized-parameters",
    severity=Severity.WARNING,
    summary="Parameters get gradients, and no optimizer has them.",
    why=(
        "The backward pass computes their gradients in every step, and nothing uses them: they keep the values of "
        "their initialisation. Nobody clears these gradients either. Usual causes: a module or a loss with parameters "
        "that was forgotten when the optimizer was made, a layer that was added afterwards, a filter by name that "
        "leaves too much out, "
        "`self.w = nn.Parameter(x).float()`, which is a new tensor and no parameter of the module."
    ),
    fix="Give them to the optimizer, or freeze them with `requires_grad_(False)`, which also saves their gradients.",
    bad="criterion = ArcFace(64, 10)  # has a weight\noptimizer = SGD(model.parameters(), lr=0.1)",
    good=(
        "criterion = ArcFace(64, 10)  # has a weight\noptimizer = SGD([*model.parameters(), *criterion.parameters()], "
        "lr=0.1)"
    ),
    consequence_of=("AMP621",),
)

NOTABLE = 0.9  # of the limit: a clip this much too hard is worth a number
SPREAD_TO = ("AMP607", "AMP609", "AMP613", "AMP902")  # what a clip by a norm of NaN leads to
IN_CLIP = replace(RULE, severity=Severity.ERROR)  # what they do to the clip harms the parameters that are trained
STEPS = 10  # passes between the first and the last gradient


def check_learning(facts: Learning) -> Findings:
    if not facts.ended:  # a second optimizer may be made for them
        return
    groups = [each for each in facts.outside if not each.fixed and each.passes >= STEPS]
    trained = [use for use in facts.optimizers if use.steps and use.empty < use.followed]
    if not groups or not trained:
        return
    first = trained[0]
    place = (first.made_at if first.made_at.file else first.step_site).place
    for group in groups:
        names = listed(group.names) if any(group.names) else f"{len(group.names)} of no module"
        model = f" of {group.model}" if group.model else ""
        have = f"; optimizers have the {group.held} others of this model" if group.held else ""
        evidence: dict[str, object] = {"parameters": len(group.names), "model": group.model, "held": group.held}
        in_clip, spread = "", False
        if group.clip is not None:
            in_clip, spread = f"; {_in_clip(group.clip, len(group.names))}", group.clip.spread > 0
            if spread:
                evidence |= {"times": group.clip.spread, "links": {"explains": list(SPREAD_TO)}}
        until = f"steps {group.first_step} to {group.last_step}" if group.last_step > group.first_step else ""
        since = until or f"from step {group.first_step} on"
        converted = (
            ""
            if group.converted_at is None
            else "; this line makes a plain tensor, which the module does not register"
            if group.is_plain
            else "; what this line assigns is made of a parameter, and the module does not register it"
        )
        is_serious = group.clip is not None and (spread or _is_left(group.clip) or group.clip.scaled)
        yield (IN_CLIP if is_serious else RULE).at(
            (place if group.converted_at is None else group.converted_at.place).but(
                parameter=_full_name(group.names[0], group.model),
                step=group.clip.first_bad if spread and group.clip is not None else None,
            ),
            f"{names}{model} got gradients in all {group.samples} backward passes that were looked at "
            f"({since}), did not change, and no optimizer has them{have}{converted}{in_clip}",
            evidence=evidence,
        )


def _full_name(name: str, model: str) -> str | None:
    """Return a name that says which parameter it is, also for the `weight` of a module of its own."""
    return f"{model}.{name}" if name and model and "." not in name else name or None


def _is_left(clip: WideClip) -> bool:
    return clip.kept > 0 and not clip.cleared


def _in_clip(clip: WideClip, parameters: int) -> str:
    """Say what the gradients do to the norm that is clipped."""
    its, is_part = ("its gradient is", "is") if parameters == 1 else ("their gradients are", "are")
    never = " nor ".join(what for what, holds in (("never zeroed", _is_left(clip)), ("unscaled", clip.scaled)) if holds)
    never = never if never.startswith("never") or not never else f"never {never}"
    said = f"{its} {f'{never}, and {is_part} ' if never else ''}part of the norm that you clip"
    where = f" at {clip.site.in_text}" if clip.site.file else ""
    if clip.spread:
        return f"{said}{where}: not finite since step {clip.first_bad}, which the clip spread to all gradients"
    if not clip.effective or clip.effective[0] > clip.limit * NOTABLE:
        return f"{said}{where}"
    low, high = (f"{limit:.2g}" for limit in clip.effective)
    return f"{said}{where}: effective clip {low if low == high else f'{low} to {high}'} instead of {clip.limit:g}"
