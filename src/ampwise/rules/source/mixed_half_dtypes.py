"""FP16 and BF16 in one training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.half_models import half_models
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import AutocastContext
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import STEPS, Region
from ampwise.check.source.torch_names import BF16, FP16
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

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


def check(code: SourceFile) -> Iterator[Finding]:
    text = code.script.text
    if "autocast" not in text or "bfloat16" not in text or "backward(" not in text or not FP16_NAMED.search(text):
        return
    reported: set[object] = set()
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        for autocast, message in [*_model_and_autocast(code, region), *_two_autocasts(region)]:
            if autocast.node not in reported:
                reported.add(autocast.node)
                yield RULE.at(autocast.frame.outline.script.place(autocast.node), message)


def _model_and_autocast(code: SourceFile, region: Region) -> Iterator[tuple[AutocastContext, str]]:
    """Yield forwards of a half-precision model under an autocast of the other dtype."""
    models = half_models(code)
    for event, dtype, autocast in _forwards(region):
        model = models.get(event.key or "")
        if model is not None and {model.dtype, dtype} == {FP16, BF16}:
            since = model.spot(event.place)
            yield autocast, f"{dtype} autocast over a model that has been {model.dtype} since {since}"


def _two_autocasts(region: Region) -> Iterator[tuple[AutocastContext, str]]:
    """Yield pairs of forwards on one path under autocasts of different dtypes."""
    forwards = {event: (dtype, autocast) for event, dtype, autocast in _forwards(region)}
    for events in (step for path in region.paths for step in _steps(path.events)):
        passed = [event for event in events if event in forwards]
        if {forwards[event][0] for event in passed} == {FP16, BF16}:
            first = forwards[passed[0]][0]
            other = next(event for event in passed if forwards[event][0] != first)
            dtype, autocast = forwards[other]
            yield autocast, f"{dtype} here, but {first} in {passed[0].spot(other)}, in the same step"


def _steps(events: Iterable[SourceEvent]) -> Iterator[list[SourceEvent]]:
    """Split a path after each optimizer step."""
    found: list[SourceEvent] = []
    for event in events:
        found.append(event)
        if event.kind in STEPS:
            yield found
            found = []
    yield found


def _forwards(region: Region) -> Iterator[tuple[SourceEvent, str, AutocastContext]]:
    """Yield the training forwards under an autocast whose dtype is certain."""
    for event in region.events:
        autocast = event.context.autocast
        if event.kind != "forward" or autocast is None or event.context.no_grad:
            continue
        sure = autocast.known and autocast.may_be_on and not autocast.optional
        for dtype in (FP16, BF16):
            if sure and autocast.dtype_given and autocast.is_surely(dtype):
                yield event, dtype, autocast
