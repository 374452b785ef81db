"""Statements that do the same inside and outside of autocast, so that they can be moved out of its ``with`` block."""
# ruff: noqa: SIM905 (long lists of names are read as text)

from __future__ import annotations

import ast

from ampwise.check.source.frame import Frame
from ampwise.check.source.names import dotted_text, method_called
from ampwise.check.source.statement_order import SCOPES
from ampwise.check.source.torch_names import CLIPS
from ampwise.check.source.tree_walk import walk

# Autocast changes matmuls, losses, and functions such as sum, norm, exp, log and pow. These are none of them.
STEP_CALLS = (
    frozenset("backward step update unscale_ zero_grad scale get_scale get_last_lr param_groups".split()) | CLIPS
)
TENSOR_METHODS = frozenset(
    "item detach cpu numpy tolist size dim numel clone mean retain_grad float double long int bool requires_grad_ "
    "parameters named_parameters state_dict is_floating_point any all".split()
)
PLAIN_FUNCTIONS = frozenset(
    "print len int float str round isinstance range enumerate zip list dict tuple set abs getattr hasattr bool type "
    "repr sorted iter next super id format join append extend setdefault get keys values items pop split strip "
    "startswith endswith replace info debug warning error add_scalar add_scalars log_metrics log_metric log_dict "
    "set_postfix set_postfix_str set_description write flush isnan isinf isfinite stop exit record synchronize "
    "elapsed_time".split()
)
PLAIN_MODULES = ("time.", "torch.cuda.", "torch.distributed.", "math.", "logging.", "wandb.", "os.", "sys.", "gc.")
PLAIN_OPERATORS = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod | ast.BitAnd | ast.BitOr


def first_that_needs_autocast(statement: ast.stmt, frame: Frame) -> ast.stmt | ast.expr | None:
    """Return the first part of a statement that may compute otherwise outside of autocast; None if there is none."""
    nodes = [node for node in walk(statement) if isinstance(node, ast.Call | ast.BinOp | ast.AugAssign | ast.With)]
    others = [node for node in walk(statement) if isinstance(node, SCOPES | ast.AsyncWith | ast.Match)]
    found = [*others, *[node for node in nodes if not _is_plain(node, frame)]]
    return min(found, key=lambda node: (node.lineno, node.col_offset), default=None)


def _is_plain(node: ast.Call | ast.BinOp | ast.AugAssign | ast.With, frame: Frame) -> bool:
    if isinstance(node, ast.With):
        return False
    if isinstance(node, ast.BinOp | ast.AugAssign):
        # `1 / x` is a reciprocal, which autocast runs in FP32.
        inverts = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Constant)
        return isinstance(node.op, PLAIN_OPERATORS) and not inverts
    method, function = method_called(node), node.func.id if isinstance(node.func, ast.Name) else ""
    if method == "update" and node.args and not isinstance(node.args[0], ast.Call | ast.Constant | ast.Dict):
        return False  # a metric of tensors
    receiver = (dotted_text(node.func) or "").rpartition(".")[0].lower()
    if method == "log" and ("log" in receiver or receiver in ("wandb", "self")):  # not of a tensor
        return frame.callee(node) is None
    if method in STEP_CALLS or method in TENSOR_METHODS or {method, function} & PLAIN_FUNCTIONS or function in CLIPS:
        return frame.callee(node) is None  # not a function of the script with the same name
    return (frame.qualified(node.func) or "").startswith(PLAIN_MODULES)
