"""Autocast switched off around tensors that stay in half."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Context
from ampwise.source.halves import (
    HALF,
    LAYERS_IN_SINGLE,
    LIKELY_HALF,
    TAKES_SINGLE,
    halves_of,
    layer_called,
    method_or_function,
)
from ampwise.source.pattern import Pattern
from ampwise.source.precision import Autocast
from ampwise.source.project import Code
from ampwise.source.reaching import reaching
from ampwise.source.spots import spot
from ampwise.source.vocabulary import SAYS_FP16
from ampwise.source.walk import Site

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP406",
    name="autocast-disabled-without-cast",
    severity=Severity.WARNING,
    summary="Autocast is switched off, but the tensors computed with are still in half.",
    why=(
        "`autocast(enabled=False)` casts nothing: tensors made under the autocast around it stay in FP16, and now "
        "even the operations that autocast would have run in FP32, such as exp, log, sum and the losses, run in FP16."
    ),
    fix="Cast what comes from outside: `x = x.float()`.",
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

CASTS = Pattern(r"\.(float|double|to|type|type_as|bfloat16)\(|float32|float64|dtype|\bcast|upcast")


def check(code: Code) -> Iterator[Finding]:
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
                yield RULE.at(place, f"`{name}` was made in FP16 and is not cast, so {line} computes in FP16")
                break


def _disabled_blocks(code: Code) -> Iterator[tuple[Autocast, list[Site]]]:
    """The blocks under ``autocast(enabled=False)`` inside an FP16 autocast, with the statements in them."""
    blocks: dict[int, tuple[Autocast, list[Site]]] = {}
    for site in code.statements:
        autocasts = site.context.autocasts
        for outer, inner in itertools.pairwise(autocasts):
            if inner.enabled is False and not inner.optional and outer.surely_fp16:
                blocks.setdefault(id(inner), (inner, []))[1].append(site)
    yield from (block for block in blocks.values() if block[0].frame.outline is code.outline)


def _computed_in_half(site: Site, disabled: Autocast, code: Code) -> str | None:
    """The name of a half tensor from outside that an operation of autocast's FP32 list gets here."""
    if site.context.autocast is not disabled:
        return None
    for node in ast.walk(site.node):
        if not isinstance(node, ast.Call):
            continue
        if layer_called(node, site.context.frame) in LAYERS_IN_SINGLE:
            tensor: ast.expr | None = node.args[0] if node.args else None
        else:
            operation = method_or_function(node, site.context.frame)
            tensor = operation[1] if operation and operation[0] in TAKES_SINGLE else None
        if isinstance(tensor, ast.Name) and _is_half_from_outside(tensor, site.context, disabled, code):
            return tensor.id
    return None


def _is_half_from_outside(name: ast.Name, context: Context, disabled: Autocast, code: Code) -> bool:
    halves = halves_of(code)
    values = reaching(name, context.frame)
    around = [halves.contexts.get((id(value.node), id(value.frame))) for value in values]
    outside = all(there is not None and disabled not in there.autocasts for there in around)
    return outside and halves.dtype(name, context) in (HALF, LIKELY_HALF)
