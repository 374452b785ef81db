from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import last_name
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import (
    HALF,
    HALVES,
    KEEPS,
    LAYERS_IN_SINGLE,
    LIKELY_HALF,
    PART,
    SCORES,
    TAKES_SINGLE,
    layer_called,
    tensor_dtypes,
    torch_operation,
)
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AutocastContext, CodeSite, Frame, SourceFile

RULE = Rule(
    code="AMP406",
    name="autocast-disabled-without-cast",
    severity=Severity.WARNING,
    summary="Autocast is disabled, but the tensors used inside are still in half precision.",
    why=(
        "`autocast(enabled=False)` does not cast anything: tensors made under autocast stay in FP16 (11 bits, up to "
        "65504) or BF16 (8 bits), and now even the operations that autocast would run in FP32, such as exp, log, sum "
        "and the losses, run in it."
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
NEEDS = (("autocast",), ("enabled=False", "False)", "enabled = False"))

COMPUTES_A_LOSS = TAKES_SINGLE | {"binary_cross_entropy"}  # which autocast runs in FP32, or not at all
CRITERION = LazyPattern(r"criterion")
LOSS_CLASS = LazyPattern(r"(Loss|Criterion)$")
CASTS = LazyPattern(r"\.(float|double|to|type|type_as|bfloat16)\(|float32|float64|dtype|\bcast|upcast")


def check_source(code: SourceFile) -> Findings:
    if "enabled" not in code.script.text and "autocast(False" not in code.script.text:
        return
    blocks: dict[AutocastContext, list[CodeSite]] = {}  # of `autocast(enabled=False)`, with their statements
    for site in code.statements:
        for autocast in site.context.autocasts:
            if autocast.enabled is False and not autocast.optional:
                blocks.setdefault(autocast, []).append(site)
    reported: set[ast.AST] = set()
    for disabled, sites in blocks.items():
        if disabled.frame.outline is not code.outline or disabled.node in reported:
            continue
        if any(CASTS.search(ast.unparse(site.node)) for site in sites):
            continue
        inside = (site for site in sites if site.context.autocast is disabled)
        found = next(((site, *made) for site in inside if (made := _computed_in_half(site, disabled, code))), None)
        if found is not None:
            reported.add(disabled.node)
            site, name, dtype = found
            place = code.script.place(disabled.node)
            line = spot(site.node, site.context.frame, place)
            yield RULE.at(place, f"`{name}` was made in {dtype} and is not cast, so {line} computes in {dtype}")


def _computed_in_half(site: CodeSite, disabled: AutocastContext, code: SourceFile) -> tuple[str, str] | None:
    """Return an outer half-precision tensor that a loss, or another operation of autocast's FP32 list, gets here.

    A criterion that we cannot see counts as a loss, as does an object of a class that is called a loss; a function of
    that kind, imported by name, often casts by itself.
    """
    context, frame, dtypes = site.context, site.context.frame, tensor_dtypes(code)
    for node in walk(site.node):
        if not isinstance(node, ast.Call):
            continue
        is_criterion = frame.qualified(node.func) is None and frame.callee(node) is None and _is_loss(node.func, frame)
        if layer_called(node, frame) in LAYERS_IN_SINGLE or is_criterion:
            tensor: ast.expr | None = node.args[0] if node.args else None
        else:
            operation = torch_operation(node, frame)
            tensor = operation[1] if operation and operation[0] in COMPUTES_A_LOSS else None
        while isinstance(tensor, ast.Call) and (inner := torch_operation(tensor, frame)) and inner[0] in KEEPS:
            tensor = inner[1]  # binary_cross_entropy(torch.sigmoid(scores), y)
        if isinstance(tensor, ast.Name):
            values = reaching_values(tensor, frame)
            made_in = [dtypes.context_of(*value) for value in values]
            from_outside = all(there is not None and disabled not in there.autocasts for there in made_in)
            dtype = dtypes.dtype(tensor, context) if from_outside else None
            if dtype is None and from_outside and SCORES.search(tensor.id):
                # fake_out, features = discriminator(x)
                part = tensor_dtypes(code, any_mode=True).dtype(tensor, context)
                dtype = HALF if part == PART[LIKELY_HALF] else None
            if dtype in HALVES:
                return tensor.id, HALVES[dtype]
    return None


def _is_loss(func: ast.expr, frame: Frame) -> bool:
    """Whether a callable is a criterion, by its name or by the class that it was made of."""
    makers = [made for made, _ in find_constructors(func, frame) if isinstance(made, ast.Call) and made is not func]
    named = bool(makers) and all(LOSS_CLASS.search(last_name(made.func)) for made in makers)
    return named or CRITERION.search(last_name(func)) is not None
