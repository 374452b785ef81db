from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.questions import guard_source
from ampwise.check.source.steps import BACKWARDS, STEPS
from ampwise.check.source.torch_names import OPTIMIZER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, Loop, Region, SourceEvent, SourceFile
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP208",
    name="missing-zero-grad",
    severity=Severity.ERROR,
    summary="A training loop never clears the gradients.",
    why=(
        "`backward()` adds to the gradients that are there. If nothing clears them, each step applies the sum over all "
        "batches since the start: after n steps about n times the gradient. In mixed precision one inf also stays for "
        "ever: the scaler then skips every later step."
    ),
    fix="Call `optimizer.zero_grad()` before each backward, or after each step.",
    bad=(
        "for x, y in loader:\n    scaler.scale(loss_fn(model(x), y)).backward()\n    scaler.step(optimizer)\n"
        "    scaler.update()"
    ),
    good=(
        "for x, y in loader:\n    optimizer.zero_grad()\n    scaler.scale(loss_fn(model(x), y)).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
)
NEEDS = ((".backward(",), (".step(",), ("autocast", "caler", "float16", ".half("))

# Ways to clear gradients other than a call of ``zero_grad``, whose place is known.
CLEARS = LazyPattern(
    r"reset_?grads?\b|clear_?grads?\b|zero_grad\w|zero_grad\s*=|set_to_none|\.zero_\(|\.grad\s*=(?!=)|grad\.data\s*=|"
    r"del .*\.grad"
)
GATHERS = frozenset(("list", "tuple", "chain", "itertools"))
SELDOM = 4  # steps on a sum of used gradients for each other one
KEPT = 10  # steps whose gradients were never cleared
MODE = LazyPattern(r"amp\b|scaler|fp16|half|mixed|precision", re.IGNORECASE)
KNOWN = LazyPattern(
    r"(^|\.)(Adam\w*|SGD\w*|RAdam|Ranger\w*|Lookahead|LAMB|Lamb|LARS|Lion|Adafactor|AdaBelief|NovoGrad)$"
)


def check_source(code: SourceFile) -> Findings:
    if CLEARS.search(code.script.text):
        return
    called = {
        event.node.func for event in code.events if event.kind == "zero grad" and isinstance(event.node, ast.Call)
    }
    if any(node.attr == "zero_grad" and node not in called for node in code.nodes(ast.Attribute)):
        return  # in code that was not followed, or passed on as a function
    for region in code.visible_regions:
        loop = region.loop
        if loop is None or not region.has(*BACKWARDS) or not region.has(*STEPS) or region.has("opaque"):
            continue
        cleared = [event for event in region.trace.events() if event.kind == "zero grad"]
        if _may_clear_elsewhere(region):
            continue
        for step in region.events_of(*STEPS):
            own = [event for event in cleared if not _in_another_mode(event, step)]
            left = _never_cleared(step, own) if own else ""
            if left is None:
                continue
            what = f"the gradients of `{left}` are never" if left else "no gradient is ever"
            if step.context.loops[-1] is loop and _is_plain_optimizer(step) and not _is_made_in(loop, step):
                yield RULE.at(step.place, f"{what} cleared in this loop: each step applies the sum so far")
                break


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        if use.kept >= KEPT and use.cleared and use.cleared * SELDOM <= use.kept and not use.closures:
            yield RULE.at(
                use.backward_site.place,
                f"in {use.kept} of {use.kept + use.cleared} steps that were looked at, this pass added to the "
                "gradients that the step before had used: they are cleared too seldom",
                evidence={"times": use.kept},
            )
        elif use.kept >= KEPT and not use.cleared and not use.closures:
            yield RULE.at(
                use.backward_site.place,
                f"in all {use.kept} steps that were looked at, this pass added to the gradients that the step before "
                "had used: they are never cleared, and each step applies the sum since the start",
                evidence={"times": use.kept},
            )


def _never_cleared(step: SourceEvent, cleared: list[SourceEvent]) -> str | None:
    """Return the module whose parameters a step applies, and that no ``zero_grad`` clears; None if unknown, or none."""
    applied = _modules_of(_optimizer(step), step.frame)
    covered: dict[str, ast.expr] = {}
    for event in cleared:
        is_optimizer = event.frame.role(event.receiver) == OPTIMIZER
        modules = _modules_of(event.receiver, event.frame) if is_optimizer else {event.key or "": event.receiver}
        if modules is None or "" in modules:
            return None
        covered |= modules
    for key, module in (applied or {}).items():
        related = any(_may_contain(key, module, other, node, step.frame) for other, node in covered.items())
        if not related:
            return dotted_text(module)
    return None


def _modules_of(optimizer: ast.expr, frame: Frame) -> dict[str, ast.expr] | None:
    """Return the modules, by key, all of whose parameters an optimizer gets; None if it may get others."""
    made = [(value, home) for value, home in frame.values(optimizer)]
    call, home = made[0] if len(made) == 1 else (None, frame)
    given = argument_of(call, "params", 0) if isinstance(call, ast.Call) else None
    held = home.values(given) if given is not None else []
    if len(held) != 1 or held[0].node is None:
        return None
    node, home = held[0]
    found: dict[str, ast.expr] = {}
    names = {part for part in walk(node) if isinstance(part, ast.Name) and part.id not in GATHERS}
    for part in walk(node):
        if isinstance(part, ast.Call) and method_called(part) == "parameters" and isinstance(part.func, ast.Attribute):
            key = home.key(part.func.value)
            names -= set(walk(part.func.value))
            if key is None:
                return None
            found[key] = part.func.value
    return found if found and not names else None


def _may_contain(key: str, module: ast.expr, other: str, node: ast.expr, frame: Frame) -> bool:
    """Whether two names may be of one module, of a module and its part, or of a module and what wraps it."""
    if _is_part(key, other) or _is_part(other, key):
        return True
    for one, name in ((module, other), (node, key)):
        for value, home in frame.values(one):
            parts = walk(value) if value is not None and value is not one else ()
            keys = [home.key(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)]
            if any(each is not None and (_is_part(each, name) or _is_part(name, each)) for each in keys):
                return True
    return False


def _is_part(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _optimizer(step: SourceEvent) -> ast.expr:
    assert isinstance(step.node, ast.Call)
    if step.value is not None:
        return step.value
    return step.node.args[0] if step.kind == "scaler step" and step.node.args else step.receiver


def _in_another_mode(clear: SourceEvent, step: SourceEvent) -> bool:
    """Return whether the gradients are cleared only without mixed precision: in the ``else`` of ``if use_amp:``."""
    decided = {guard.text: guard.holds for guard in step.context.guards}
    opposite = [guard for guard in clear.context.guards if decided.get(guard.text, guard.holds) != guard.holds]
    return any(MODE.search(guard_source(guard)) for guard in opposite)


def _may_clear_elsewhere(region: Region) -> bool:
    """Return whether the loop calls a function we cannot see that gets the object itself, or belongs to it."""
    for site in region.trace.calls:
        if region.loop not in site.context.loops or not isinstance(site.node, ast.Call):
            continue
        frame, func = site.context.frame, site.node.func
        own = frame.function.self_name
        if own is None or frame.callee(site.node) is not None:
            continue
        receiver = func.value if isinstance(func, ast.Attribute) else func
        is_method = isinstance(receiver, ast.Name) and receiver.id == own
        owner = frame.class_of(receiver) if is_method else None
        if is_method and isinstance(func, ast.Attribute) and not (owner and frame.attribute_bindings(owner, func.attr)):
            return True  # self.after_step(), of a base class
        if any(isinstance(given, ast.Name) and given.id == own for given in arguments_given(site.node)):
            return True  # callback.on_batch_end(self)
    return False


def _is_made_in(loop: Loop, step: SourceEvent) -> bool:
    """Return whether each pass makes an optimizer of its own for new tensors, which have no gradient yet."""
    made = [value for value, _ in step.frame.values(_optimizer(step)) if isinstance(value, ast.Call)]
    inside = [call for call in made if loop.node.lineno <= call.lineno <= (loop.node.end_lineno or 0)]
    given = [call.args[0] for call in inside if call.args]
    return bool(given) and not any(method_called(part) in ("parameters", "named_parameters") for part in given)


def _is_plain_optimizer(step: SourceEvent) -> bool:
    """Return whether it is a well-known optimizer, or unknown: a class of someone else may clear in its ``step``."""
    made = [(value, frame) for value, frame in step.frame.values(_optimizer(step)) if isinstance(value, ast.Call)]
    names = [frame.qualified(call.func) or last_name(call.func) for call, frame in made]
    return all(name.startswith("torch.optim.") or KNOWN.search(name) for name in names)
