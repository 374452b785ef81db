from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import Backward

RULE = Rule(
    code="AMP111",
    name="backward-in-autocast",
    severity=Severity.WARNING,
    summary="`backward()` is called inside the autocast region.",
    why=(
        "Backward operations run in the dtype of their forward operation, whether autocast is on or not. Autocast "
        "then only affects operations that have no recorded dtype: custom functions, hooks and double backward get "
        "casts they were not written for. torch recommends against it."
    ),
    fix="End the `with` block after the loss, and call `backward()` outside it.",
    bad='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\n    scaler.scale(loss).backward()',
    good='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\nscaler.scale(loss).backward()',
)
NEEDS = (("autocast",), (".backward(",))


def check_source(code: SourceFile) -> Findings:
    seen = set()
    for event in code.events:
        autocast = event.context.autocast
        if event.kind not in ("backward", "scaled backward") or autocast is None or event.node in seen:
            continue
        if autocast.known and autocast.may_be_on:
            seen.add(event.node)
            yield RULE.at(
                event.place, f"this backward() runs inside the autocast region of {autocast.spot(event.place)}"
            )


def check_event(backward: Backward) -> Findings:
    if backward.autocast is not None:
        yield RULE.at(
            backward.site.place, f"`backward` is called inside an autocast region in {backward.autocast.upper()}"
        )
