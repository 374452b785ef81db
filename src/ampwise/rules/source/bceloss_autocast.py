"""Binary cross entropy on probabilities, evaluated inside autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.outline import Binding
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.statement_order import runs_before
from ampwise.check.source.walk import CodeSite
from ampwise.finding import Edit, Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP402",
    name="bceloss-autocast",
    severity=Severity.ERROR,
    summary="`nn.BCELoss` or `F.binary_cross_entropy` is evaluated inside autocast.",
    why=(
        "A sigmoid in FP16 is exactly 0 below -17.4 and exactly 1 above 8.4, so its logarithm is infinite. CUDA "
        "autocast therefore raises a RuntimeError for `binary_cross_entropy`, whatever the dtype of its inputs. "
        "`BCEWithLogitsLoss` takes the logits instead, and autocast runs it in FP32."
    ),
    fix=(
        "Use `nn.BCEWithLogitsLoss` without the sigmoid, or evaluate the loss under `torch.autocast(device_type, "
        "enabled=False)` on `.float()` inputs."
    ),
    bad='with torch.autocast("cuda"):\n    loss = F.binary_cross_entropy(torch.sigmoid(logits), y)',
    good='with torch.autocast("cuda"):\n    loss = F.binary_cross_entropy_with_logits(logits, y)',
    fixable="sometimes",
)
NEEDS = (("autocast",), ("BCELoss", "binary_cross_entropy"))

FUNCTION = "torch.nn.functional.binary_cross_entropy"
CLASSES = ("torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss", "torch.nn.modules.BCELoss")
SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")


def check(code: SourceFile) -> Iterator[Finding]:
    text = code.script.text
    if "BCELoss" not in text and "binary_cross_entropy" not in text and "autocast" not in text:
        return
    seen: set[ast.AST] = set()
    for site in code.calls:
        autocast = site.context.autocast
        if site.node in seen or autocast is None or not autocast.may_be_on:
            continue
        if not autocast.known or autocast.device in ("cpu", "xla", "mps") or _is_off_unless_asked(site.context):
            continue
        assert isinstance(site.node, ast.Call)
        frame = site.context.frame
        if frame.qualified(site.node.func) == FUNCTION:
            seen.add(site.node)
            yield RULE.at(
                code.script.place(site.node),
                "`binary_cross_entropy` raises an error under CUDA autocast",
                edits=_fixed_function(code, site.node, frame),
            )
        elif _is_bce_loss(site.node.func, frame):
            seen.add(site.node)
            yield RULE.at(
                code.script.place(site.node),
                "`BCELoss` raises an error under CUDA autocast",
                edits=_fixed_class(code, site),
                # An attribute, or an object that other files import, may have calls that are not checked.
                safe=isinstance(site.node.func, ast.Name) and not code.project.importers(code.path),
            )


def _is_off_unless_asked(context: EventContext) -> bool:
    """Return whether ``autocast(enabled=flag)`` gets a flag that the source sets to False."""
    made = context.autocast.node if context.autocast else None
    flag = argument_of(made, "enabled") if isinstance(made, ast.Call) else None
    values = [value.node for frame in context.frame.callers() for value in frame.values(flag)] if flag else []
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def _is_bce_loss(func: ast.expr, frame: Frame) -> bool:
    made = find_constructors(func, frame)
    return bool(made) and all(_makes_bce_loss(node, home) for node, home in made)


def _makes_bce_loss(node: ast.expr | None, frame: Frame) -> bool:
    return isinstance(node, ast.Call) and frame.qualified(node.func) in CLASSES


# -- fixes ------------------------------------------------------------------------------------------------


def _fixed_function(code: SourceFile, call: ast.Call, frame: Frame) -> tuple[Edit, ...]:
    """Turn ``F.binary_cross_entropy(torch.sigmoid(x), y)`` into ``F.binary_cross_entropy_with_logits(x, y)``."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "binary_cross_entropy":
        return ()
    logits = _without_sigmoid(code, call, frame)
    renamed = code.script.replace(call.func, f"{code.script.segment(call.func)}_with_logits")
    return (renamed, logits) if logits else ()


def _fixed_class(code: SourceFile, site: CodeSite) -> tuple[Edit, ...]:
    """Rename the constructor and remove every sigmoid; return nothing unless all uses are visible."""
    assert isinstance(site.node, ast.Call)
    constructors = find_constructors(site.node.func, site.context.frame)
    made, owner = constructors[0]
    name = ast.unparse(site.node.func)
    if len(constructors) != 1 or not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
        return ()
    if made.func.attr != "BCELoss" or owner.outline is not code.outline or not _is_assigned(name, made, code):
        return ()
    script = code.script
    edits = [script.replace(made.func, f"{script.segment(made.func.value)}.BCEWithLogitsLoss")]
    called = {node.func: node for node in code.nodes(ast.Call)}
    frames = {other.node: other.context.frame for other in code.calls}
    named: list[ast.Name | ast.Attribute] = [*code.nodes(ast.Name), *code.nodes(ast.Attribute)]
    for node in named:
        if not isinstance(node.ctx, ast.Load) or ast.unparse(node) != name:
            continue
        use = called.get(node)
        logits = _without_sigmoid(code, use, frames[use]) if use in frames else None
        if logits is None:
            return ()
        edits.append(logits)
    return tuple(edits)


def _is_assigned(name: str, made: ast.Call, code: SourceFile) -> bool:
    """Return whether the object is assigned to this name where it is made, and the name to nothing else."""
    bound: list[ast.Assign | ast.AnnAssign] = []
    assigned: list[ast.Assign | ast.AnnAssign] = [*code.nodes(ast.Assign), *code.nodes(ast.AnnAssign)]
    for node in assigned:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bound += [node for target in targets if ast.unparse(target) == name]
    parameters = {node.arg for node in code.nodes(ast.arg)}
    return len(bound) == 1 and _holds(bound[0].value, made) and name not in parameters


def _holds(value: ast.expr | None, made: ast.Call) -> bool:
    """Return whether ``value`` is ``made``, possibly followed by method calls such as ``.to(device)``."""
    while isinstance(value, ast.Call) and value is not made and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return value is made


def _without_sigmoid(code: SourceFile, call: ast.Call, frame: Frame) -> Edit | None:
    """Return the edit that passes the sigmoid's argument to the loss, if there is a visible sigmoid."""
    if not call.args:
        return None
    given = call.args[0]
    logits = _in_sigmoid(given, frame)
    if logits is not None:
        return code.script.replace(given, code.script.segment(logits))
    if not isinstance(given, ast.Name):
        return None
    bound = frame.function.bindings.get(given.id, [])
    uses = [node for node in ast.walk(frame.function.node) if isinstance(node, ast.Name) and node.id == given.id]
    if len(bound) != 1 or bound[0].value is None or given.id in frame.function.params:
        return None
    logits = _in_sigmoid(bound[0].value, frame)
    if logits is None:
        return None
    if len(uses) == 2:  # the assignment and this use
        text = code.script.segment(logits)
        return code.script.replace(bound[0].value, f"({text})" if "\n" in text else text)
    stays = isinstance(logits, ast.Name) and _stays(logits.id, bound[0], frame)
    is_current = runs_before(code.script, bound[0].node, given)
    return code.script.replace(given, code.script.segment(logits)) if stays and is_current else None


def _stays(name: str, since: Binding, frame: Frame) -> bool:
    """Return whether a name still holds the unchanged tensor of an earlier assignment."""
    bound = frame.function.bindings.get(name, [])
    if len(bound) != 1 or getattr(bound[0].node, "lineno", 0) > getattr(since.node, "lineno", 0):
        return False
    changed = LazyPattern(rf"\b{re.escape(name)}(\.\w+_\(|\[[^\n]*\]\s*[-+*/]?=[^=])|\binplace\b|\bout=")
    return not changed.search(frame.function.text)


def _in_sigmoid(node: ast.expr, frame: Frame) -> ast.expr | None:
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(given, ast.Starred) for given in node.args):
        return None
    func = node.func
    if frame.qualified(func) in SIGMOIDS and len(node.args) == 1:
        return node.args[0]
    if isinstance(func, ast.Attribute) and func.attr == "sigmoid" and not node.args:
        return func.value
    layers = frame.values(func) if isinstance(func, ast.Attribute | ast.Name) else []
    made = [value.frame.qualified(value.node.func) for value in layers if isinstance(value.node, ast.Call)]
    is_layer = len(made) == len(layers) > 0 and set(made) == {"torch.nn.Sigmoid"}
    return node.args[0] if is_layer and len(node.args) == 1 else None
