from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.call_events import manages_scaling
from ampwise.check.source.cases import denies, joined
from ampwise.check.source.events import EventKind
from ampwise.check.source.half_models import trained_half_models
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import NO_AUTOCAST, ON, UNSEEN, asks_for_both, entered_by, modes_of, scalers_held
from ampwise.check.source.precision import autocast_of
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.torch_names import BF16, SCALER_NAME
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.modes import Autocast, Scaler
    from ampwise.check.source.types import SourceFile
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP302",
    name="scaler-with-bf16",
    severity=Severity.INFO,
    summary="A GradScaler is on in a mode in which autocast is BF16.",
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
NEEDS = (("caler",), ("bfloat16", "bf16"))

ABOUT_PRECISION = LazyPattern(r"fp16|float16|half|dtype|precision|bf16|scal", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    reported: set[ast.AST] = set()
    scaled = [mode for mode in modes_of(code) if mode.scaler.state in (ON, UNSEEN)]
    for mode in scaled:
        if mode.autocast.dtype != BF16 or mode.autocast.device == "cpu" or denies(mode.given, BF16):
            continue
        if any(autocast.surely_fp16 for autocast in mode.region.autocasts_with_gradients):
            continue  # a step in both needs it
        if asks_for_both(mode.given) or manages_scaling(mode.backward.receiver, mode.backward.frame):
            continue
        made, autocast = mode.scaler, mode.autocast
        # Options of the scaler that autocast does not depend on: the user turns both on, or a scaler for FP16 alone.
        apart = made.given.keys() - autocast.given.keys()
        node: ast.expr | None = None
        frame = mode.backward.frame
        if made.state == ON and made.frame is not None and not any(map(_is_about_precision, apart)):
            node, frame = made.node, made.frame
            if node is not None and frame.outline is not code.outline and not _is_judged_at_home(made, code):
                node, frame = mode.backward.node, mode.backward.frame
        elif made.state == UNSEEN and not any(SCALER_NAME.search(name) for name in mode.given):
            dtypes = {other.autocast.dtype for other in scaled if other.backward is mode.backward}
            node = mode.backward.node if dtypes <= {BF16, NO_AUTOCAST} else None
        if node is not None and frame.outline is code.outline and node not in reported:
            reported.add(node)
            place = code.script.place(node)
            line, how = spot(autocast.node, autocast.frame, place), "may be" if autocast.given else "is always"
            yield RULE.at(place, f"autocast {how} BF16 ({line}): there is nothing to scale")
    yield from _on_bf16_weights(code, reported)
    yield from _on_with_a_scaler(code, reported)
    yield from _returned_together(code, reported)
    yield from _steps_unseen(code, {mode.scaler.node for mode in modes_of(code)})


def _is_judged_at_home(made: Scaler, code: SourceFile) -> bool:
    """Whether the file that makes a scaler is checked by this rule, and sees the scaler used."""
    home = code.project.code(made.frame.outline.path) if made.frame is not None else code
    is_checked = any(word in home.script.text for word in NEEDS[1])
    return is_checked and any(mode.scaler.node is made.node for mode in modes_of(home))


def _on_bf16_weights(code: SourceFile, reported: set[ast.AST]) -> Findings:
    """Yield scalers that step an optimizer of BF16 weights, without an autocast that may be FP16."""
    steps = [event for event in code.events if event.kind == EventKind.SCALER_STEP]
    if not steps or any(mode.autocast.dtype not in (NO_AUTOCAST, BF16) for mode in modes_of(code)):
        return
    for pair in trained_half_models(code):
        step = next((step for step in steps if pair.model.dtype == BF16 and pair.is_applied_by(step)), None)
        for made in scalers_held(step.frame, step.receiver) if step is not None else ():
            is_on = made.state == ON and joined(made.given, pair.model.given) is not None
            if is_on and made.node is not None and made.frame is not None and made.frame.outline is code.outline:
                apart = made.given.keys() - pair.model.given.keys()
                if made.node not in reported and not any(map(_is_about_precision, apart)):
                    reported.add(made.node)
                    place = code.script.place(made.node)
                    line, how = pair.model.spot(place), "may be" if pair.model.given else "are"
                    yield RULE.at(place, f"the weights {how} BF16 since {line}: there is nothing to scale")


def _is_about_precision(option: str) -> bool:
    """Whether an option chooses a dtype or a scaler; ``hasattr(torch.amp, "GradScaler")`` does not."""
    return ABOUT_PRECISION.search(option) is not None and "hasattr(" not in option


def _on_with_a_scaler(code: SourceFile, reported: set[ast.AST]) -> Findings:
    """Yield ``autocast(enabled=scaler is not None, dtype=dtype)`` with a dtype that may be BF16."""
    for site in code.statements:
        region = site.context.autocast
        if region is None or region.node in reported or not region.known:
            continue
        reported.add(region.node)
        for autocast in entered_by(region):
            if autocast.dtype == BF16 and autocast.frame.outline is code.outline:
                named = [name for name, limit in autocast.given.items() if limit.among is None and "scaler" in name]
                if named:
                    yield RULE.at(
                        code.script.place(autocast.node), f"BF16 autocast is on only together with `{named[0]}`"
                    )
                    break


def _returned_together(code: SourceFile, reported: set[ast.AST]) -> Findings:
    """Yield scalers that a function returns together with an autocast, switched on also where that is BF16."""
    for function in code.outline.functions:
        if "autocast" not in function.text or "caler" not in function.text:
            continue
        frame = code.frame(function)
        for returned in function.returns:
            parts = returned.elts if isinstance(returned, ast.Tuple) else []
            contexts = [context for part in parts if (context := autocast_of(part, frame)) is not None]
            autocasts = [one for context in contexts for one in entered_by(context) if one.dtype == BF16]
            scalers = [made for part in parts for made in scalers_held(frame, part)] if autocasts else []
            pairs = [(made, one) for made in scalers for one in autocasts if made.state == ON and _meet(made, one)]
            # One that is made in a `try`, and again after it, is one scaler.
            for made, autocast in pairs[:1]:
                if made.node is not None and made.node not in reported:
                    reported.add(made.node)
                    place = code.script.place(made.node)
                    line, how = spot(autocast.node, autocast.frame, place), "may be" if autocast.given else "is always"
                    yield RULE.at(place, f"autocast {how} BF16 ({line}): there is nothing to scale")


def _meet(made: Scaler, autocast: Autocast) -> bool:
    """Whether a scaler is on where an autocast is BF16, and no option of its own decides that."""
    together = joined(made.given, autocast.given)
    apart = made.given.keys() - autocast.given.keys()
    return together is not None and not denies(together, BF16) and not any(map(_is_about_precision, apart))


def _steps_unseen(code: SourceFile, seen: set[ast.Call | None]) -> Findings:
    """Yield scalers whose steps are not visible, in a file where autocast is always BF16."""
    for made in scalers_made(code):
        if made.node in seen:
            continue
        traces = {id(trace) for _, trace in made.contexts}
        owners = {context.frame.function.owner for context, _ in made.contexts} - {None}
        near = [
            region
            for region in code.regions
            if id(region.trace) in traces or any(event.frame.function.owner in owners for event in region.events)
        ]
        autocasts = [autocast for region in near for autocast in region.autocasts]
        surely = all(autocast.known and autocast.is_surely(BF16) for autocast in autocasts)
        if not autocasts or not surely:
            continue
        # It may be created or enabled only for another dtype: `enabled=dtype == torch.float16`.
        context = made.contexts[0][0]
        asked = [guard_source(guard) for guard in context.guards]
        if made.enabled is not None:
            values = [made.enabled, *(value.node for value in context.frame.values(made.enabled))]
            asked += [ast.unparse(node) for node in values if node is not None]
        if not any(ABOUT_PRECISION.search(text) for text in asked):
            place = code.script.place(made.node)
            yield RULE.at(place, f"autocast is always BF16 ({autocasts[0].spot(place)}): there is nothing to scale")


def check_run(run: RunEvents) -> Findings:
    for made in run.scalers:
        if made.enabled and "bf16" in made.precisions and "fp16" not in made.precisions:
            yield RULE.at(made.site.place, "this GradScaler scales losses of forward passes that ran in BF16")
