"""Gradients that the script asks about while they are not finite, and that a step then uses as finite ones."""

from __future__ import annotations

import ast
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.trace.names_in_code import FUNCTIONS, free_names, tree_of
from ampwise.trace.replay import is_finite
from ampwise.watch.inspection import parameters_of
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.tracker import CallTracker

__all__ = ["CleanedGradients"]


@dataclass(frozen=True, slots=True)
class _Question:
    """A question such as ``torch.isnan(gradient)`` whose answer was that something is not finite."""

    site: CallSite
    parameter: weakref.ref[Tensor] | None  # whose gradient it is; None: one that a backward pass is computing


class CleanedGradients:
    """Note where gradients that are not finite are replaced by numbers."""

    def __init__(self, facts: Learning, tracker: CallTracker) -> None:
        self._facts, self._tracker = facts, tracker
        self._asked: list[_Question] = []  # in the running step

    def parameter_of(self, gradient: Tensor) -> Tensor | None:
        """Return the parameter of an optimizer that has this gradient, or one in the same memory."""
        place = gradient.data_ptr()
        for optimizer, _ in self._tracker.optimizers.pairs():
            for each in parameters_of(optimizer):
                if each.grad is gradient or (each.grad is not None and each.grad.data_ptr() == place):
                    return each  # type: ignore[no-any-return]
        return None

    def is_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is the gradient of a parameter of an optimizer, or is being computed as one."""
        return torch._C._current_autograd_node() is not None or self.parameter_of(tensor) is not None

    def asked(self, tensor: Tensor) -> None:
        """Note a question about a tensor that is not finite, if it is a gradient."""
        site = calling_site()
        if torch._C._current_autograd_node() is not None:
            if _returns_something(site):  # a hook that only reports returns nothing
                self._asked.append(_Question(site, None))
        elif (parameter := self.parameter_of(tensor)) is not None:
            self._asked.append(_Question(site, weakref.ref(parameter)))

    def forget(self) -> None:
        """Forget the questions, as their gradients are dropped or added to."""
        self._asked = []

    def step_begins(self, optimizer: Any, step: int) -> None:
        """See which of the gradients that were asked about are finite now."""
        last = {(each.parameter, each.site.function): each for each in self._asked}  # the others may report it only
        self._asked = []
        for each in last.values():
            parameter = None if each.parameter is None else each.parameter()
            used = parameters_of(optimizer) if each.parameter is None else [parameter]
            gradients = [one.grad for one in used if one is not None and one.grad is not None]
            if gradients and all(map(is_finite, gradients)):
                self.replaced(_line_of_replacement(each.site), "gradient", step)

    def replaced(self, site: CallSite, what: str, step: int) -> None:
        """Note that a line replaces NaN or infinities of a loss or a gradient."""
        self._facts.nan_replaced.setdefault(site, CountedCalls(step=step, what=what)).times += 1


def _function_around(site: CallSite) -> ast.AST | None:
    """Return the innermost function or lambda around a line."""
    tree = None if site.file is None or site.line is None else tree_of(site.file)
    if tree is None or site.line is None:
        return None
    line = site.line
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*FUNCTIONS, ast.Lambda)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _returns_something(site: CallSite) -> bool:
    function = _function_around(site)
    if isinstance(function, ast.Lambda):
        return True
    returned = [] if function is None else [each for each in ast.walk(function) if isinstance(each, ast.Return)]
    return any(each.value is not None for each in returned)


def _line_of_replacement(question: CallSite) -> CallSite:
    """Return the statement that uses the answer, where that has a name: ``bad = g.isnan()`` and ``g[bad] = 0``."""
    tree = None if question.file is None else tree_of(question.file)
    for block in _blocks(tree) if tree is not None else ():
        for number, statement in enumerate(block):
            if not isinstance(statement, ast.Assign) or statement.lineno != question.line:
                continue
            names = {each.id for each in statement.targets if isinstance(each, ast.Name)}
            using = next((each for each in block[number + 1 :] if free_names(each) & names), None)
            if using is not None and not isinstance(using, ast.If):
                return CallSite(file=question.file, line=using.lineno, function=question.function)
    return question


def _blocks(tree: ast.Module) -> list[list[ast.stmt]]:
    return [
        block
        for node in ast.walk(tree)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list)
    ]
