"""Code of a script as it is put into ``make``: without devices, downloads, worker processes and precision."""

from __future__ import annotations

import ast
import copy
from typing import TypeVar

from ampwise.trace.names_in_code import DEFINITIONS, call_name, changed_names, root_name

DEVICE_WORDS = ("device", "gpu", "cuda", "rank", "mps")
DTYPE_WORDS = ("dtype", "torch.float", "torch.bfloat", "torch.long")
SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
Node = TypeVar("Node", bound=ast.AST)


def rewritten(node: Node) -> Node:
    """A copy of a statement or expression to be put into ``make``; functions and classes stay as they are."""
    # Python has one ``ast.Load`` for all trees. Some libraries hang theirs on it, which would be copied, too.
    clone = copy.deepcopy(node, {id(each): each for each in ast.walk(node) if isinstance(each, SHARED)})
    if isinstance(clone, DEFINITIONS):
        return clone
    return ast.fix_missing_locations(_Rewrite().visit(clone))  # type: ignore[no-any-return]


class _Rewrite(ast.NodeTransformer):
    """``self.x`` becomes ``x``, and a device the CPU: ampwise moves the model and the batch."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if _sets_device(node) and not changed_names(node):
            text = ast.unparse(node.value)
            is_object = any(word in text for word in ("torch.device", "accelerator", ".device"))
            node.value = ast.parse("torch.device('cpu')" if is_object else "'cpu'", mode="eval").body
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        inner = [each for each in (*node.body, *node.orelse) if not isinstance(each, ast.Pass)]
        if inner and all(_sets_device(each) for each in inner):
            return self.visit(inner[0])  # type: ignore[no-any-return]
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = call_name(node)
        if isinstance(node.func, ast.Attribute) and name in ("cuda", "pin_memory"):
            return node.func.value
        if isinstance(node.func, ast.Attribute) and name == "to":
            node.args = [each for each in node.args if not _is_device(each)]
            node.keywords = [each for each in node.keywords if each.arg not in ("device", "non_blocking")]
            if not node.args and not node.keywords:
                return node.func.value
        if name in ("tqdm", "track") and node.args:
            return node.args[0]
        if name == "device" and node.args:
            node.args, node.keywords = [ast.Constant("cpu")], []
        values: dict[str | None, int | None] = {"download": False, "num_workers": 0}
        if root_name(node.func) in ("torchvision", "models"):
            values |= {"pretrained": False, "weights": None}
        dropped = {"persistent_workers", "prefetch_factor", "pin_memory"}
        dropped |= {"help", "metavar"} if name == "add_argument" else set()
        node.keywords = [
            ast.keyword(word.arg, ast.Constant(values[word.arg])) if word.arg in values else word
            for word in node.keywords
            if word.arg not in dropped
        ]
        return node


def _is_device(node: ast.expr) -> bool:
    text = ast.unparse(node).lower()
    is_index = isinstance(node, ast.Constant) and isinstance(node.value, int)
    is_named = any(word in text for word in DEVICE_WORDS) or text.strip("'\"") == "cpu"
    return (is_index or is_named) and not any(word in text for word in DTYPE_WORDS)


def _sets_device(stmt: ast.stmt) -> bool:
    """Whether it chooses a device: ``device = "cuda" if torch.cuda.is_available() else "cpu"``."""
    if not isinstance(stmt, ast.Assign) or not isinstance(stmt.targets[0], ast.Name | ast.Attribute):
        return False
    value = ast.unparse(stmt.value).lower()
    chooses = any(word in value for word in ("cuda", "mps", "accelerator", "gpu", "rank", "device("))
    return chooses and ast.unparse(stmt.targets[0]).lower().endswith("device")
