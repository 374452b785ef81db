from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import method_called
from ampwise.check.source.precision import argument_of, literal_bool
from ampwise.check.source.statement_order import runs_before
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile
    from ampwise.watch.run_events import ScriptFailed

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
        "Use `nn.BCEWithLogitsLoss` without the sigmoid. Or compute the loss on `.float()` inputs under "
        "`torch.autocast(device_type, enabled=False)`."
    ),
    bad='with torch.autocast("cuda"):\n    loss = F.binary_cross_entropy(torch.sigmoid(logits), y)',
    good='with torch.autocast("cuda"):\n    loss = F.binary_cross_entropy_with_logits(logits, y)',
    fixable="sometimes",
)
NEEDS = (("autocast",), ("BCELoss", "binary_cross_entropy"))

FUNCTION = "torch.nn.functional.binary_cross_entropy"
CLASSES = ("torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss", "torch.nn.modules.BCELoss")
SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")


def check_source(code: SourceFile) -> Findings:
    seen: set[ast.AST] = set()
    for site in code.calls:
        call, frame, autocast = site.call, site.context.frame, site.context.autocast
        if call in seen or autocast is None or not autocast.may_be_on:
            continue
        if not autocast.known or autocast.device in ("cpu", "xla", "mps"):
            continue
        # `autocast(enabled=flag)` with a flag that the source sets to False is off unless someone asks for it.
        flag = argument_of(autocast.node, "enabled") if isinstance(autocast.node, ast.Call) else None
        flags = [value.node for caller in frame.callers() for value in caller.values(flag)] if flag else []
        if any(literal_bool(value) is False for value in flags):
            continue
        is_function = frame.qualified(call.func) == FUNCTION
        made = [] if is_function else find_constructors(call.func, frame)
        is_loss = bool(made) and all(isinstance(m, ast.Call) and home.qualified(m.func) in CLASSES for m, home in made)
        if is_function or is_loss:
            seen.add(call)
            edits = _fixed_function(code, call, frame) if is_function else _fixed_class(code, call, made)
            yield RULE.at(
                code.script.place(call),
                f"`{'binary_cross_entropy' if is_function else 'BCELoss'}` raises an error under CUDA autocast",
                fix=None
                if edits
                else RULE.without_edit("the sigmoid is not in this call, or the loss has other calls"),
                edits=edits,
                # An attribute, or an object that other files import, may have calls that are not checked.
                safe=is_function or (isinstance(call.func, ast.Name) and not code.project.importers(code.path)),
            )


def _fixed_function(code: SourceFile, call: ast.Call, frame: Frame) -> tuple[Edit, ...]:
    """Turn ``F.binary_cross_entropy(torch.sigmoid(x), y)`` into ``F.binary_cross_entropy_with_logits(x, y)``."""
    if method_called(call) != "binary_cross_entropy":
        return ()
    logits = _without_sigmoid(code, call, frame)
    renamed = code.script.replace(call.func, f"{code.script.segment(call.func)}_with_logits")
    return (renamed, logits) if logits else ()


def _fixed_class(
    code: SourceFile, call: ast.Call, constructors: list[tuple[ast.expr | None, Frame]]
) -> tuple[Edit, ...]:
    """Rename the constructor and remove every sigmoid; return nothing unless all uses are visible."""
    made, owner = constructors[0]
    name = ast.unparse(call.func)
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
        if isinstance(node.ctx, ast.Load) and ast.unparse(node) == name:
            use = called.get(node)
            logits = _without_sigmoid(code, use, frames[use]) if use in frames else None
            if logits is None:
                return ()
            edits.append(logits)
    return tuple(edits)


def _is_assigned(name: str, made: ast.Call, code: SourceFile) -> bool:
    """Return whether the object is assigned to this name where it is made, and the name to nothing else."""
    values = [value for target, value in code.assignments if ast.unparse(target) == name]
    value = values[0] if len(values) == 1 else None
    while isinstance(value, ast.Call) and value is not made and isinstance(value.func, ast.Attribute):
        value = value.func.value  # the object of a method such as `.to(device)`
    return value is made and name not in {node.arg for node in code.nodes(ast.arg)}


def _without_sigmoid(code: SourceFile, call: ast.Call, frame: Frame) -> Edit | None:
    """Return the edit that passes the sigmoid's argument to the loss, if there is a visible sigmoid."""
    script, function = code.script, frame.function
    given = call.args[0] if call.args else None
    logits = _in_sigmoid(given, frame)
    if given is not None and logits is not None:
        return script.replace(given, script.segment(logits))
    if not isinstance(given, ast.Name) or given.id in function.params:
        return None
    bound = function.bindings.get(given.id, [])
    value = bound[0].value if len(bound) == 1 else None
    logits = _in_sigmoid(value, frame)
    if value is None or logits is None:
        return None
    uses = [node for node in walk(function.node) if isinstance(node, ast.Name) and node.id == given.id]
    if len(uses) == 2:  # the assignment and this use
        text = script.segment(logits)
        return script.replace(value, f"({text})" if "\n" in text else text)
    is_current = runs_before(script, bound[0].node, given)
    made = function.bindings.get(logits.id, []) if isinstance(logits, ast.Name) and is_current else []
    if len(made) != 1 or getattr(made[0].node, "lineno", 0) > getattr(bound[0].node, "lineno", 0):
        return None
    # The logits must still be what the sigmoid got.
    name = re.escape(script.segment(logits))
    changes = LazyPattern(rf"\b{name}(\.\w+_\(|\[[^\n]*\]\s*[-+*/]?=[^=])|\binplace\b|\bout=")
    return None if changes.search(function.text) else script.replace(given, script.segment(logits))


def _in_sigmoid(node: ast.expr | None, frame: Frame) -> ast.expr | None:
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(given, ast.Starred) for given in node.args):
        return None
    func = node.func
    if isinstance(func, ast.Attribute) and func.attr == "sigmoid" and not node.args:
        return func.value
    is_layer = isinstance(func, ast.Attribute | ast.Name) and frame.makers(func) == {"torch.nn.Sigmoid"}
    is_sigmoid = is_layer or frame.qualified(func) in SIGMOIDS
    return node.args[0] if is_sigmoid and len(node.args) == 1 else None


def check_event(death: ScriptFailed) -> Findings:
    if "unsafe to autocast" in death.message:
        yield RULE.at(
            death.site.place, "torch raises an error for `binary_cross_entropy` under autocast: the script ended here"
        )
