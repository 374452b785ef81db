"""FP16 and BF16 in one training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event
from ampwise.source.half_models import half_models
from ampwise.source.pattern import Pattern
from ampwise.source.precision import Autocast
from ampwise.source.project import Code
from ampwise.source.steps import STEPS, Region
from ampwise.source.vocabulary import BF16, FP16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP307",
    name="mixed-half-dtypes",
    severity=Severity.WARNING,
    summary="One training step computes partly in FP16, partly in BF16.",
    why=(
        "What passes from one to the other loses twice: FP16 overflows above 65504 where BF16 does not, and BF16 drops "
        "three of FP16's significant bits. Such a step has the range of the one and the precision of the other, and "
        "still needs a GradScaler."
    ),
    fix="Use one half dtype: BF16 where the GPU has it in its matrix units, else FP16 with a GradScaler.",
    bad='model.bfloat16()\nwith torch.autocast("cuda", dtype=torch.float16):\n    loss = model(x).sum()',
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = model(x).sum()',
)
NEEDS = (("bfloat16",), ("autocast", "float16", ".half("), (".backward(",))


FP16_NAMED = Pattern(r"torch\.half|(?<!b)float16|\.half\(")


def check(code: Code) -> Iterator[Finding]:
    text = code.script.text
    if "autocast" not in text or "bfloat16" not in text or "backward(" not in text or not FP16_NAMED.search(text):
        return
    reported: set[object] = set()
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        for autocast, message in [*_against_the_model(code, region), *_two_autocasts(region)]:
            if autocast.node not in reported:
                reported.add(autocast.node)
                yield RULE.at(autocast.frame.outline.script.place(autocast.node), message)


def _against_the_model(code: Code, region: Region) -> Iterator[tuple[Autocast, str]]:
    """A forward of a half model under an autocast of the other dtype."""
    models = half_models(code)
    for event, dtype, autocast in _forwards(region):
        model = models.get(event.key or "")
        if model is not None and {model.dtype, dtype} == {FP16, BF16}:
            since = model.spot(event.place)
            yield autocast, f"{dtype} autocast over a model that is {model.dtype} since {since}"


def _two_autocasts(region: Region) -> Iterator[tuple[Autocast, str]]:
    """Two forwards on one path, each under an autocast of its own dtype."""
    forwards = {event: (dtype, autocast) for event, dtype, autocast in _forwards(region)}
    for events in (step for path in region.paths for step in _steps(path.events)):
        passed = [event for event in events if event in forwards]
        if {forwards[event][0] for event in passed} == {FP16, BF16}:
            first = forwards[passed[0]][0]
            other = next(event for event in passed if forwards[event][0] != first)
            dtype, autocast = forwards[other]
            yield autocast, f"{dtype} here, but {first} in {passed[0].spot(other)}, in the same step"


def _steps(events: Iterable[Event]) -> Iterator[list[Event]]:
    """A path, cut after each step of an optimizer."""
    found: list[Event] = []
    for event in events:
        found.append(event)
        if event.kind in STEPS:
            yield found
            found = []
    yield found


def _forwards(region: Region) -> Iterator[tuple[Event, str, Autocast]]:
    """The forwards that are trained through, under an autocast whose dtype is beyond doubt."""
    for event in region.events:
        autocast = event.context.autocast
        if event.kind != "forward" or autocast is None or event.context.no_grad:
            continue
        sure = autocast.known and autocast.may_be_on and not autocast.optional
        for dtype in (FP16, BF16):
            if sure and autocast.dtype_given and autocast.is_surely(dtype):
                yield event, dtype, autocast
