from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scalers import scalers_in, scalers_made
from ampwise.check.source.torch_names import BF16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Region, SourceFile
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP302",
    name="scaler-with-bf16",
    severity=Severity.INFO,
    summary="A GradScaler is used although autocast is always BF16.",
    why=(
        "BF16 has the exponent range of FP32: nothing underflows that FP32 would keep, so loss scaling has no effect. "
        "The scaler costs a pass over all gradients and a sync each step, and hides a NaN as one more skipped step."
    ),
    fix="Remove the scaler: `loss.backward()` and `optimizer.step()`; or `GradScaler(enabled=dtype == torch.float16)`.",
    bad=(
        'scaler = torch.amp.GradScaler("cuda")\nwith torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "    loss = loss_fn(model(x), y)\nscaler.scale(loss).backward()"
    ),
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)\nloss.backward()',
)
NEEDS = (("GradScaler",), ("bfloat16", "bf16"))

CHECKS_DTYPE = LazyPattern(r"fp16|float16|half|dtype|precision|bf16", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    scaled: dict[ast.Call, list[Region]] = {}  # by the call that creates a scaler: where it steps an optimizer
    for region in code.regions:
        steps = region.events_of("scaler step")
        for call in dict.fromkeys(call for event in steps for call in scalers_in(event.receiver, event.frame)):
            scaled.setdefault(call, []).append(region)
    for made in scalers_made(code):
        # The steps that it scales, or all if its use is not visible.
        regions = scaled.get(made.node) or code.regions
        autocasts = [autocast for region in regions for autocast in region.autocasts]
        surely = all(autocast.known and autocast.is_surely(BF16) for autocast in autocasts)
        if not autocasts or not surely:
            continue
        # It may be created or enabled only for another dtype: `enabled=dtype == torch.float16`.
        context = made.contexts[0][0]
        asked = [guard_source(guard) for guard in context.guards]
        if made.enabled is not None:
            values = [made.enabled, *(value.node for value in context.frame.values(made.enabled))]
            asked += [ast.unparse(node) for node in values if node is not None]
        if not any(CHECKS_DTYPE.search(text) for text in asked):
            place = code.script.place(made.node)
            yield RULE.at(place, f"autocast is always BF16 ({autocasts[0].spot(place)}): there is nothing to scale")


def check_run(run: RunEvents) -> Findings:
    for made in run.scalers:
        if made.enabled and "bf16" in made.precisions and "fp16" not in made.precisions:
            yield RULE.at(made.site.place, "this GradScaler scales losses of forward passes that ran in BF16")
