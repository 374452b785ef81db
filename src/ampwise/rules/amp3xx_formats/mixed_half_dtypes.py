from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.cases import joined
from ampwise.check.source.events import EventKind
from ampwise.check.source.half_models import half_models
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import NO_AUTOCAST, autocasts_in, modes_of
from ampwise.check.source.sharding import sharded_models
from ampwise.check.source.steps import BACKWARDS, STEPS
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
    summary="A script computes partly in FP16 and partly in BF16: in one step, or training and evaluation.",
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

DEFAULT_DTYPE = LazyPattern(r"autocast\((?![^)\n]*dtype)")  # FP16 on a GPU
FP16_NAMED = LazyPattern(r"torch\.half|(?<!b)float16|\.half\(")


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    may_be_fp16 = FP16_NAMED.search(text) or DEFAULT_DTYPE.search(text)
    if "autocast" not in text or "bfloat16" not in text or "backward(" not in text or not may_be_fp16:
        return
    reported: set[object] = set()
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        forwards = _forwards(region)
        found = []
        for event, (dtype, autocast) in forwards.items():
            for model in half_models(code).get(event.key or "", ()):
                if {model.dtype, dtype} == {FP16, BF16} and not model.given:
                    since = model.spot(event.place)
                    found.append((autocast, f"{dtype} autocast over a model that has been {model.dtype} since {since}"))
            policy = sharded_models(code).get(event.key or "")
            if policy is not None and {policy.dtype("param_dtype"), dtype} == {FP16, BF16}:
                message = f"{dtype} autocast over a model that FSDP runs in {policy.dtype('param_dtype')}"
                found.append((autocast, f"{message} (`param_dtype` in {policy.spot(event.place)})"))
        found += _default_over_bf16(region, code)
        for autocast, message in [*found, *_two_autocasts(region, forwards)]:
            if autocast.node not in reported:
                reported.add(autocast.node)
                yield RULE.at(autocast.frame.outline.script.place(autocast.node), message)
    yield from _evaluated_in_another(code, reported)


def _default_over_bf16(region: Region, code: SourceFile) -> Iterator[tuple[AutocastContext, str]]:
    """Yield autocasts without a dtype, FP16 on a GPU, over models that are BF16 by then, or by the same option."""
    for event in region.events_of("forward"):
        autocast = event.context.autocast
        if autocast is None or autocast.dtype_given or not autocast.known or event.context.no_grad:
            continue
        for one in autocasts_in(event.context):
            for model in half_models(code).get(event.key or "", ()) if one.dtype == FP16 else ():
                both = joined(model.given, one.given)
                if model.dtype == BF16 and both is not None and one.given.keys() <= model.given.keys():
                    since = model.spot(event.place)
                    yield autocast, f"autocast without a dtype is FP16, over a model that is BF16 since {since}"


def _evaluated_in_another(code: SourceFile, reported: set[object]) -> Findings:
    """Yield evaluations of a model in the other half dtype than the one that it is trained in."""
    trained: dict[str, dict[str, SourceEvent]] = {}  # by model: its dtypes, each with a forward
    for mode in modes_of(code):
        if mode.forward.key is not None and mode.autocast.dtype != NO_AUTOCAST:
            trained.setdefault(mode.forward.key, {})[mode.autocast.dtype] = mode.forward
    for event in code.events:
        autocast = event.context.autocast
        dtypes = trained.get(event.key or "", {}) if event.kind == EventKind.FORWARD and event.context.no_grad else {}
        if autocast is None or len(dtypes) != 1 or not autocast.known:
            continue
        if not autocast.dtype_given and autocast.device != "cuda":
            continue
        ((dtype, forward),) = dtypes.items()
        here = {one.dtype for one in autocasts_in(event.context)} - {NO_AUTOCAST}
        if len(here) == 1 and here | {dtype} == {FP16, BF16} and autocast.node not in reported:
            reported.add(autocast.node)
            place = autocast.frame.outline.script.place(autocast.node)
            line = spot(forward.node, forward.frame, place)
            message = f"evaluated in {here.pop()}, but trained in {dtype} ({line})"
            yield RULE.at(place, message)


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
        is_mixed = went_back = False
        for event in path.events:
            went_back = went_back or event.kind in BACKWARDS
            if event.kind in STEPS or (event.kind == EventKind.ZERO_GRAD and went_back):
                first, is_mixed, went_back = None, False, False
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
        return
    halves = {event.precision, event.gathered}
    if halves == {"fp16", "bf16"}:  # FSDP2's policy, and autocast
        inside = str(event.gathered).upper()
        yield RULE.at(
            event.site.place,
            f"{event.model} runs under {event.precision.upper()} autocast, but FSDP gathers its weights and casts its "
            f"inputs to {inside} (`param_dtype`)",
            fix=f"Remove the autocast: with `MixedPrecisionPolicy(param_dtype=...)` FSDP does all casts. Or make "
            f"both {event.precision.upper()}.",
        )
    elif event.other_half is not None:
        yield RULE.at(
            event.site.place,
            f"{event.model} runs in {event.precision.upper()} here, in a step that also ran in "
            f"{event.other_half.upper()}",
        )
