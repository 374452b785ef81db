from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
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
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AutocastContext, CodeSite, SourceFile

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
NEEDS = (("autocast",), SAYS_FP16, ("enabled=False", "False)", "enabled = False"))

CASTS = LazyPattern(r"\.(float|double|to|type|type_as|bfloat16)\(|float32|float64|dtype|\bcast|upcast")


def check_source(code: SourceFile) -> Findings:
    if "enabled" not in code.script.text and "autocast(False" not in code.script.text:
        return
    # The `autocast(enabled=False)` blocks inside an FP16 autocast, with their statements.
    blocks: dict[int, tuple[AutocastContext, list[CodeSite]]] = {}
    for site in code.statements:
        for outer, inner in itertools.pairwise(site.context.autocasts):
            if inner.enabled is False and not inner.optional and outer.surely_fp16:
                blocks.setdefault(id(inner), (inner, []))[1].append(site)
    reported: set[ast.AST] = set()
    for disabled, sites in blocks.values():
        if disabled.frame.outline is not code.outline or disabled.node in reported:
            continue
        if any(CASTS.search(ast.unparse(site.node)) for site in sites):
            continue
        inside = (site for site in sites if site.context.autocast is disabled)
        found = next(((site, name) for site in inside if (name := _computed_in_half(site, disabled, code))), None)
        if found is not None:
            reported.add(disabled.node)
            place = code.script.place(disabled.node)
            line = spot(found[0].node, found[0].context.frame, place)
            yield RULE.at(place, f"`{found[1]}` is FP16 and is not cast, so {line} computes in FP16")


def _computed_in_half(site: CodeSite, disabled: AutocastContext, code: SourceFile) -> str | None:
    """Return the name of an outer half-precision tensor that is passed here to an operation on autocast's FP32 list."""
    context, frame, dtypes = site.context, site.context.frame, tensor_dtypes(code)
    for node in ast.walk(site.node):
        if not isinstance(node, ast.Call):
            continue
        if layer_called(node, frame) in LAYERS_IN_SINGLE:
            tensor: ast.expr | None = node.args[0] if node.args else None
        else:
            operation = torch_operation(node, frame)
            tensor = operation[1] if operation and operation[0] in TAKES_SINGLE else None
        if isinstance(tensor, ast.Name):
            values = reaching_values(tensor, frame)
            made_in = [dtypes.contexts.get((id(value.node), id(value.frame))) for value in values]
            from_outside = all(there is not None and disabled not in there.autocasts for there in made_in)
            if from_outside and dtypes.dtype(tensor, context) in (HALF, LIKELY_HALF):
                return tensor.id
    return None
