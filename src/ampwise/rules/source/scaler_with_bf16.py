"""A GradScaler for BF16, which needs none."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.pattern import Pattern
from ampwise.source.precision import Autocast
from ampwise.source.project import Code
from ampwise.source.questions import question
from ampwise.source.scalers import MadeScaler, scalers_held, scalers_made
from ampwise.source.steps import Region
from ampwise.source.vocabulary import BF16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP302",
    name="scaler-with-bf16",
    severity=Severity.INFO,
    summary="A GradScaler beside autocast that is always BF16.",
    why=(
        "BF16 has the exponents of FP32: nothing underflows that FP32 would keep, so there is nothing for a loss "
        "scale to rescue. The scaler costs a pass over all gradients and a wait each step, and hides a NaN as "
        "one more skipped step."
    ),
    fix="Remove the scaler: `loss.backward()` and `optimizer.step()`; or `GradScaler(enabled=dtype == torch.float16)`.",
    bad=(
        'scaler = torch.amp.GradScaler("cuda")\nwith torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "    loss = loss_fn(model(x), y)\nscaler.scale(loss).backward()"
    ),
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)\nloss.backward()',
)
NEEDS = (("GradScaler",), ("bfloat16", "bf16"))

ASKS_FOR_DTYPE = Pattern(r"fp16|float16|half|dtype|precision|bf16", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    for made in scalers_made(code):
        autocasts = _autocasts_of(made, code)
        surely = all(autocast.known and autocast.is_surely(BF16) for autocast in autocasts)
        if autocasts and surely and not _depends_on_dtype(made):
            place = code.script.place(made.node)
            yield RULE.at(place, f"autocast is always BF16 ({autocasts[0].spot(place)}): there is nothing to scale")


def _autocasts_of(made: MadeScaler, code: Code) -> list[Autocast]:
    """The autocast regions of the steps that this scaler scales; of all steps, when it is used out of sight."""
    scaled = _regions_by_scaler(code).get(made.node, [])
    return [autocast for region in scaled or code.regions for autocast in region.autocasts]


@functools.lru_cache(maxsize=1)
def _regions_by_scaler(code: Code) -> dict[ast.Call, list[Region]]:
    """The steps in which each scaler, by the call that makes it, steps an optimizer."""
    found: dict[ast.Call, list[Region]] = {}
    for region in code.regions:
        steps = [event for event in region.events if event.kind == "scaler step"]
        for made in dict.fromkeys(made for event in steps for made in scalers_held(event.receiver, event.frame)):
            found.setdefault(made, []).append(region)
    return found


def _depends_on_dtype(made: MadeScaler) -> bool:
    """Made, or switched on, only where another dtype was chosen: ``enabled=dtype == torch.float16``."""
    context = made.contexts[0][0]
    asked = [question(guard) for guard in context.guards]
    if made.enabled is not None:
        values = context.frame.values(made.enabled)
        asked += [ast.unparse(node) for node in (made.enabled, *(value.node for value in values)) if node is not None]
    return any(ASKS_FOR_DTYPE.search(text) for text in asked)
