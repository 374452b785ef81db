from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.half_models import half_models_held, trained_half_models
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.precision import argument_of, dtypes_of
from ampwise.check.source.torch_names import BF16, FP16
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP408",
    name="half-ema",
    severity=Severity.WARNING,
    summary="A moving average of the weights, or a sum, is kept in half precision.",
    why=(
        "An update with decay 0.999 moves an average by a thousandth of its distance to the weight. BF16 drops a "
        "change below 0.2 % of a value, FP16 one below 0.02 %: in BF16 an average moves only where the weight is more "
        "than twice as far, in FP16 by a quarter; with decay 0.9999 hardly anything moves at all. A sum in BF16 "
        "no longer grows once it is 256 to 512 times as large as what is added."
    ),
    fix="Keep it in FP32; cast a copy of it for evaluation or export.",
    bad="ema = copy.deepcopy(model).to(torch.bfloat16)\nupdate_ema(ema, model, decay=0.9999)",
    good="ema = copy.deepcopy(model).float()\nupdate_ema(ema, model, decay=0.9999)",
)
NEEDS = (("ema", "+="), (".half(", "float16"))
ZEROS = frozenset(("torch.tensor", "torch.zeros", "torch.zeros_like", "torch.as_tensor"))

EMA = LazyPattern(r"(^|_)ema($|_|\d)", re.IGNORECASE)
# An average that this file changes; a model that was averaged by another script may be cast.
UPDATES = LazyPattern(  # each branch begins with a letter, which is fast; so `\b` comes second, as a lookbehind
    r"update_(?<!\wupdate_)(ema|average|moving_average)\(|ema_update(?<!\wema_update)\(|step_ema(?<!\wstep_ema)\(|"
    r"_ema_update\(|ema(?<!\wema)(_\w+)?(\.\w+)?\.(update|step|update_parameters)\(|"
    r"_ema(?<=\w_ema)\.(update|step|update_parameters)\(|\.lerp_\(|"
    r"\.mul_\(\s*((self\.)?(\w*decay|beta|momentum|alpha)\b|0?\.9)"
)
# Functions that use an average, or a copy of it, for something else than the next update.
ASIDE = LazyPattern(r"eval|test|valid|infer|predict|export|save|convert|generat|sampl|bench|onnx|visual")
CASTS_BACK = LazyPattern(r"\.float\(\)|float32")  # in the constructor of an average
KEEPS_DTYPE = frozenset(("to", "cuda", "eval", "train", "requires_grad_"))
CASTS = {"half": FP16, "bfloat16": BF16}
NAMES = {FP16: "FP16", BF16: "BF16"}
MOVED = 0.5  # of the values, by all updates between two looks: an average in FP32 changes nearly all


def check_source(code: SourceFile) -> Findings:
    yield from _sums_in_half(code)
    if not UPDATES.search(code.script.text):
        return
    statements: list[ast.Assign | ast.Expr] = [*code.nodes(ast.Assign), *code.nodes(ast.Expr)]
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        named = [name for target in targets if (name := dotted_text(target)) is not None]
        function = code.function_at(statement)
        cast, dtype, module = _cast_to_half(statement.value, code.frame(function))
        if cast is None or dtype is None or ASIDE.search(function.name.lower()):
            continue
        source = dotted_text(module) or ""
        average = next((name for name in named or [source] if EMA.search(name.rpartition(".")[2])), None)
        # `half_ema = copy.deepcopy(ema).half()` is a copy for evaluation.
        is_copy = bool(named) and source not in named and any(EMA.search(name) for name in _names_in(module))
        if average is not None and not is_copy:
            place = code.script.place(cast)
            yield RULE.at(place, f"`{average}` is kept in {NAMES[dtype]}, which drops most updates of an average")
    yield from _copies_of_half_models(code)


def _sums_in_half(code: SourceFile) -> Findings:
    """Yield the zeros in half precision to which a loop adds: ``total = torch.zeros((), dtype=torch.bfloat16)``."""
    adds = [node for node in code.nodes(ast.AugAssign) if isinstance(node.op, ast.Add)]
    for statement in code.nodes(ast.Assign) if adds else ():
        made, function = statement.value, code.function_at(statement)
        frame = code.frame(function)
        name = dotted_text(statement.targets[0])
        dtype = argument_of(made, "dtype") if isinstance(made, ast.Call) else None
        if dtype is None or not isinstance(made, ast.Call) or frame.qualified(made.func) not in ZEROS:
            continue
        first = made.args[0] if made.args else None
        is_zero = last_name(made.func).startswith("zeros") or (isinstance(first, ast.Constant) and first.value == 0)
        known = dtypes_of(dtype, frame) or frozenset()
        half = next((each for each in (FP16, BF16) if known == frozenset([each])), None)
        added = [each for each in adds if dotted_text(each.target) == name and code.function_at(each) is function]
        if half and is_zero and any(_is_repeated(each, statement, code) for each in added):
            yield RULE.at(
                code.script.place(made), f"`{name}` is added up in {NAMES[half]}, which soon drops what is added"
            )


def _is_repeated(addition: ast.AugAssign, zero: ast.Assign, code: SourceFile) -> bool:
    """Whether a loop around an addition, and not around the zero, may add many times."""
    outer: ast.AST = addition
    while (outer := code.script.parents[outer]) is not code.function_at(addition).node:
        if isinstance(outer, ast.For | ast.While | ast.AsyncFor) and zero not in walk(outer):
            return True
    return False


def _copies_of_half_models(code: SourceFile) -> Findings:
    """Yield averages that begin as copies of a half model: ``ema = copy.deepcopy(model)``, ``ema = EMA(model)``."""
    trained = {pair.model.node for pair in trained_half_models(code)}
    for site in code.statements:
        node, frame = site.node, site.context.frame
        call = node.value if isinstance(node, ast.Assign) else None
        while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in KEEPS_DTYPE:
            call = call.func.value
        if not isinstance(node, ast.Assign) or not isinstance(call, ast.Call) or not call.args:
            continue
        target = (dotted_text(node.targets[0]) or "").rpartition(".")[2]
        made_by = last_name(call.func)
        if not EMA.search(target) or not (made_by == "deepcopy" or "EMA" in made_by or "Ema" in made_by):
            continue
        made_here = frame.callee(call)
        if made_here is not None and CASTS_BACK.search(made_here[0].text):
            continue
        for model in half_models_held(call.args[0], frame, code):
            if model.given and model.node not in trained:
                continue  # half only in modes in which it is not trained
            later = model.context.frame.function is frame.function and model.node.lineno > call.lineno
            if not model.part and not later:
                since = model.spot(code.script.place(call))
                yield RULE.at(
                    code.script.place(call),
                    f"`{target}` is kept in {NAMES[model.dtype]}, the dtype of the model since {since}, "
                    "which drops most updates of an average",
                )
                break


def check_learning(facts: Learning) -> Findings:
    learns = any(use.compared > use.unchanged for use in facts.optimizers)
    for average in facts.averages:
        if learns and average.moved < MOVED * average.values:
            yield RULE.at(
                average.site.place,
                f"this {average.model} in {average.precision.upper()} was updated in place {average.updates} times "
                f"while another model was trained, and {1 - average.moved / average.values:.0%} of its values have "
                "not changed: the updates are rounded away",
                evidence={"times": average.updates, "values": average.values, "moved": average.moved},
            )


def _cast_to_half(node: ast.expr, frame: Frame) -> tuple[ast.Call | None, str | None, ast.expr]:
    """Return the last cast in ``deepcopy(model).half().cuda()``, its dtype, and the expression that is cast."""
    found: ast.Call | None = None
    dtype: str | None = None
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and frame.qualified(node.func) is None:
        method = method_called(node)
        if found is None and method in ("half", "bfloat16", "to", "float", "double"):
            asked = [dtypes_of(part, frame) for part in arguments_given(node)] if method == "to" else []
            known = frozenset().union(*[dtypes for dtypes in asked if dtypes]) & {FP16, BF16, "float32", "float64"}
            if method != "to" or known:
                found, dtype = node, CASTS.get(method) or next((each for each in (FP16, BF16) if known == {each}), None)
        node = node.func.value
    return found, dtype, node


def _names_in(node: ast.expr) -> list[str]:
    return [
        part.id if isinstance(part, ast.Name) else part.attr
        for part in walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    ]
