"""Functional dropout that evaluation mode does not switch off, found in the code of a model that draws random "
"numbers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import functional

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner
from ampwise.trace.names_in_code import call_name

__all__ = ["functional_dropout"]

NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
MODULES = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")
WITH_TRAINING = 3  # positional arguments
ATTENTION = "scaled_dot_product_attention"
DROPOUT_P = 4  # its position among the arguments of attention


def functional_dropout(model: nn.Module) -> Iterator[tuple[CallSite, str]]:
    """Yield the calls in the model's own classes whose dropout does not depend on the mode, and what each is.

    These are functional dropout without ``training``, and attention with a ``dropout_p`` that is not 0.
    """
    modules: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        modules.setdefault(type(module), []).append(module)
    for kind, instances in modules.items():
        file = inspect.getsourcefile(kind) if kind.__module__ != "builtins" else None
        if file is None or code_owner(file) != "own":
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            continue
        names = vars(inspect.getmodule(kind)) if inspect.getmodule(kind) is not None else {}
        made = _made_in_forward(tree)
        for call in _unguarded_calls(tree):
            site = CallSite(file=file, line=first + call.lineno - 1, function=kind.__name__)
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            name = call_name(call) if call in made else _functional_name(call.func, names)
            if name == ATTENTION:
                share = given.get("dropout_p", call.args[DROPOUT_P] if len(call.args) > DROPOUT_P else None)
                if any((_number(share, each) or 0) > 0 for each in instances):
                    yield site, f"`{name}` with `dropout_p={ast.unparse(share)}`, in {kind.__name__}"  # type: ignore[arg-type]
            elif name in MODULES:
                yield site, f"`{name}` is made in `forward`, always in training mode, in {kind.__name__}"
            elif name and len(call.args) < WITH_TRAINING and not given.keys() & {"training", None}:
                share = given.get("p", call.args[1] if len(call.args) > 1 else None)
                if any(_number(share, each) != 0 for each in instances):
                    yield site, f"`{name}` without `training=`, in {kind.__name__}"


def _made_in_forward(tree: ast.AST) -> list[ast.Call]:
    """Return the calls that make a dropout module and call it at once: ``nn.Dropout(0.5)(x)``."""
    forward = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    calls = [node.func for each in forward for node in ast.walk(each) if isinstance(node, ast.Call)]
    return [each for each in calls if isinstance(each, ast.Call) and call_name(each) in MODULES]


def _unguarded_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that are in no branch of an ``if`` on ``training``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.IfExp) and "training" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _unguarded_calls(node)


def _functional_name(func: ast.expr, names: dict[str, Any]) -> str:
    """Return the name of the function of ``torch.nn.functional`` that is called; empty for others."""
    text = ast.unparse(func)
    if not text.endswith((*NAMES, ATTENTION)):
        return ""
    found: Any = names
    for part in text.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return next((name for name in (*NAMES, ATTENTION) if found is getattr(functional, name)), "")


def _number(value: ast.expr | None, module: nn.Module) -> float | None:
    """Return the value of a constant, or of an attribute of the module: ``self.dropout``, ``self.drop.p``."""
    if isinstance(value, ast.Constant):
        found: Any = value.value
    else:
        path = ast.unparse(value).split(".") if isinstance(value, ast.Attribute) else []
        found = module if path[:1] == ["self"] else None
        for part in path[1:]:
            found = getattr(found, part, None)
    return float(found) if isinstance(found, int | float) else None
