"""Autocast disabled around tensors that stay in half precision."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from ampwise.check.source.events import EventContext
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.precision import AutocastContext
from ampwise.check.source.project import SourceFile
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import (
    HALF,
    LAYERS_IN_SINGLE,
    LIKELY_HALF,
    TAKES_SINGLE,
    layer_called,
    tensor_dtypes,
    torch_operation,
)
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.check.source.walk import CodeSite
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP406",
    name="autocast-disabled-without-cast",
    severity=Severity.WARNING,
    summary="Autocast is disabled, but the tensors used inside are still in half precision.",
    why=(
        "`autocast(enabled=False)` does not cast anything: tensors produced under the outer autocast stay in FP16, "
        "and now even the operations that autocast would run in FP32, such as exp, log, sum and the losses, run in "
        "FP16."
    ),
    fix="Cast the tensors that come from outside: `x = x.float()`.",
    bad=(
        'with torch.autocast("cuda"):\n    z = linear(x)\n    with torch.autocast("cuda", enabled=False):\n'
        "        loss = torch.logsumexp(z, 1).mean()"
    ),
    good=(
        'with torch.autocast("cuda"):\n    z = linear(x)\n    with torch.autocast("cuda", enabled=False):\n'
        "        loss = torch.logsumexp(z.float(), 1).mean()"
    ),
)
NEEDS = (
    ("autocast",),
    SAYS_FP16,
    ("enabled=False", "False)", "enabled = False"),
)

CASTS = LazyPattern(r"\.(float|double|to|type|type_as|bfloat16)\(|float32|float64|dtype|\bcast|upcast")


def check(code: SourceFile) -> Iterator[Finding]:
    if "enabled" not in code.script.text and "autocast(False" not in code.script.text:
        return
    reported: set[ast.AST] = set()
    for disabled, sites in _disabled_blocks(code):
        if disabled.node in reported or any(CASTS.search(ast.unparse(site.node)) for site in sites):
            continue
        for site in sites:
            name = _computed_in_half(site, disabled, code)
            if name is not None:
                reported.add(disabled.node)
                place = code.script.place(disabled.node)
                line = spot(site.node, site.context.frame, place)
                yield RULE.at(place, f"`{name}` is FP16 and is not cast, so {line} computes in FP16")
                break


def _disabled_blocks(code: SourceFile) -> Iterator[tuple[AutocastContext, list[CodeSite]]]:
    """Yield the ``autocast(enabled=False)`` blocks inside an FP16 autocast, with their statements."""
    blocks: dict[int, tuple[AutocastContext, list[CodeSite]]] = {}
    for site in code.statements:
        autocasts = site.context.autocasts
        for outer, inner in itertools.pairwise(autocasts):
            if inner.enabled is False and not inner.optional and outer.surely_fp16:
                blocks.setdefault(id(inner), (inner, []))[1].append(site)
    yield from (block for block in blocks.values() if block[0].frame.outline is code.outline)


def _computed_in_half(site: CodeSite, disabled: AutocastContext, code: SourceFile) -> str | None:
    """Return the name of an outer half-precision tensor that is passed here to an operation on autocast's FP32 list."""
    if site.context.autocast is not disabled:
        return None
    for node in ast.walk(site.node):
        if not isinstance(node, ast.Call):
            continue
        if layer_called(node, site.context.frame) in LAYERS_IN_SINGLE:
            tensor: ast.expr | None = node.args[0] if node.args else None
        else:
            operation = torch_operation(node, site.context.frame)
            tensor = operation[1] if operation and operation[0] in TAKES_SINGLE else None
        if isinstance(tensor, ast.Name) and _is_half_from_outside(tensor, site.context, disabled, code):
            return tensor.id
    return None


def _is_half_from_outside(name: ast.Name, context: EventContext, disabled: AutocastContext, code: SourceFile) -> bool:
    halves = tensor_dtypes(code)
    values = reaching_values(name, context.frame)
    around = [halves.contexts.get((id(value.node), id(value.frame))) for value in values]
    outside = all(there is not None and disabled not in there.autocasts for there in around)
    return outside and halves.dtype(name, context) in (HALF, LIKELY_HALF)
