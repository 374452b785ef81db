from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.half_models import half_models
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.steps import STEPS
from ampwise.check.source.torch_names import BF16, FP16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AutocastContext, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import ForwardCall, OptimizerStep, ScalerStep

    Forwards = dict[SourceEvent, tuple[str, AutocastContext]]  # with their dtype and autocast

RULE = Rule(
    code="AMP307",
    name="mixed-half-dtypes",
    severity=Severity.WARNING,
    summary="One training step computes partly in FP16 and partly in BF16.",
    why=(
        "A value that passes from one to the other loses twice: FP16 overflows above 65504 where BF16 does not, and "
        "BF16 drops three of FP16's significant bits. Such a step has the range of FP16 and the precision of BF16, "
        "and still needs a GradScaler."
    ),
    fix="Use one 16-bit dtype: BF16 if the GPU has tensor cores for it, otherwise FP16 with a GradScaler.",
    bad='model.bfloat16()\nwith torch.autocast("cuda", dtype=torch.float16):\n    loss = model(x).sum()',
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = model(x).sum()',
)
NEEDS = (("bfloat16",), ("autocast", "float16", ".half("), (".backward(",))

FP16_NAMED = LazyPattern(r"torch\.half|(?<!b)float16|\.half\(")


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if "autocast" not in text or "bfloat16" not in text or "backward(" not in text or not FP16_NAMED.search(text):
        return
    reported: set[object] = set()
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        forwards = _forwards(region)
        found = []
        for event, (dtype, autocast) in forwards.items():
            model = half_models(code).get(event.key or "")
            if model is not None and {model.dtype, dtype} == {FP16, BF16}:
                since = model.spot(event.place)
                found.append((autocast, f"{dtype} autocast over a model that has been {model.dtype} since {since}"))
        for autocast, message in [*found, *_two_autocasts(region, forwards)]:
            if autocast.node not in reported:
                reported.add(autocast.node)
                yield RULE.at(autocast.frame.outline.script.place(autocast.node), message)


def _forwards(region: Region) -> Forwards:
    """Return the training forwards under an autocast whose dtype is certain."""
    found = {}
    for event in region.events_of("forward"):
        autocast = event.context.autocast
        if autocast is None or event.context.no_grad or not autocast.known or autocast.optional:
            continue
        for dtype in (FP16, BF16) if autocast.may_be_on and autocast.dtype_given else ():
            if autocast.is_surely(dtype):
                found[event] = (dtype, autocast)
    return found


def _two_autocasts(region: Region, forwards: Forwards) -> Iterator[tuple[AutocastContext, str]]:
    """Yield pairs of forwards on one path, before the same step, under autocasts of different dtypes."""
    for path in region.paths:
        first: SourceEvent | None = None
        is_mixed = False
        for event in path.events:
            if event.kind in STEPS:
                first, is_mixed = None, False
            elif event in forwards and not is_mixed:
                first = first or event
                dtype, autocast = forwards[event]
                is_mixed = dtype != forwards[first][0]
                if is_mixed:
                    line = first.spot(event)
                    yield autocast, f"{dtype} here, but {forwards[first][0]} in {line}, in the same step"


def check_event(event: ForwardCall | OptimizerStep | ScalerStep) -> Findings:
    if hasattr(event, "mixed_forward"):  # a step
        if not event.mixed_forward and {"fp16", "bf16"} <= set(getattr(event, "precisions", ())):
            yield RULE.at(event.site.place, "autocast was set to FP16 and to BF16 within this step")
    elif event.other_half is not None:
        yield RULE.at(
            event.site.place,
            f"{event.model} runs in {event.precision.upper()} here, in a step that also ran in "
            f"{event.other_half.upper()}",
        )
