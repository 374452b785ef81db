from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.half_models import only_named_main
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import literal_bool
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import CodeSite, FunctionOutline, SourceFile

RULE = Rule(
    code="AMP311",
    name="tf32-off",
    severity=Severity.INFO,
    summary="TF32 is disabled for FP32 matmuls or convolutions.",
    why=(
        "From Ampere on, FP32 matmuls and convolutions can run on the tensor cores as TF32: the range of FP32 with 10 "
        "explicit mantissa bits, at several times the speed. It is off by default for matmuls and on for cuDNN "
        "convolutions. It also speeds up what autocast leaves in FP32."
    ),
    fix='Call `torch.set_float32_matmul_precision("high")`, and keep the default of `torch.backends.cudnn.allow_tf32`.',
    bad="torch.backends.cuda.matmul.allow_tf32 = False\ntorch.backends.cudnn.allow_tf32 = False",
    good='torch.set_float32_matmul_precision("high")',
    on_by_default=False,
)
NEEDS = (("allow_tf32", "float32_matmul_precision", "fp32_precision"),)

SWITCHES = frozenset(("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"))
SETTER = "torch.set_float32_matmul_precision"
ABOUT_TF32 = LazyPattern(r"allow_tf32|set_float32_matmul_precision|fp32_precision")
ON_PURPOSE = LazyPattern(
    r"determin|reprod|seed|test|bench|compar|verif|accura|precis|numeric|exact|stabil|debug|nan|bug"
)


def check_source(code: SourceFile) -> Findings:
    if not ABOUT_TF32.search(code.script.text) or "backward(" not in code.script.text:
        return
    if ON_PURPOSE.search(code.path.rpartition("/")[2].lower()):
        return
    trains = any(event.kind in ("backward", "scaled backward") for event in code.events)
    switches = [(site, _switches(site)) for site in code.statements]
    if not trains or any(on for _, on in switches):
        return
    contexts: dict[ast.AST, list[CodeSite]] = {}
    for site in (site for site, on in switches if on is False):
        contexts.setdefault(site.node, []).append(site)
    for node, sites in contexts.items():
        if not any(_has_a_reason(site, code) for site in sites):
            yield RULE.at(code.script.place(node), "FP32 matmuls run several times slower without TF32")


def _switches(site: CodeSite) -> bool | None:
    """Return False for a statement that disables TF32, True for one that may enable it, None for others."""
    node, frame = site.node, site.context.frame
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and frame.outline.imports.qualified(target) in SWITCHES:
                return literal_bool(node.value) is not False
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if frame.qualified(call.func) == SETTER and call.args:
            return not (isinstance(call.args[0], ast.Constant) and call.args[0].value == "highest")
    return None


def _has_a_reason(site: CodeSite, code: SourceFile) -> bool:
    """Return whether a condition decides it, the function is about reproducibility, or a comment gives a reason."""
    functions = [frame.function for frame in site.context.frame.callers()]
    if not only_named_main(site.context) or any(ON_PURPOSE.search(function.name.lower()) for function in functions):
        return True
    lines, line = code.script.lines, getattr(site.node, "lineno", 1)
    comment = lines[line - 1].partition("#")[2]
    above = lines[line - 2] if line > 1 and lines[line - 2].lstrip().startswith("#") else ""
    return _makes_deterministic(functions[0]) or bool(ON_PURPOSE.search(f"{comment} {above}".lower()))


@functools.lru_cache(maxsize=8)  # called for every switch of a function
def _makes_deterministic(function: FunctionOutline) -> bool:
    beside = (node for node in function.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    return any("deterministic" in ast.unparse(node) for node in beside)
