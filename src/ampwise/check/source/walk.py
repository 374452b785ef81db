"""Follow a program as if it ran, from a function into the functions that it calls.

The result is a ``CodeTrace``: events in the order in which they happen, in blocks, and every call and
simple statement with the context it runs in. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampwise.check.source.call_events import EventRecogniser
from ampwise.check.source.events import (
    Branch,
    BranchGuard,
    EventBlock,
    EventContext,
    FollowedCall,
    Jump,
    Loop,
    SourceEvent,
)
from ampwise.check.source.frame import Callee, Frame
from ampwise.check.source.guards import guards_of
from ampwise.check.source.names import arguments_given, code_of
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import autocast_of, entered
from ampwise.check.source.tree_walk import children, walk

DEEPEST = 8  # calls followed into calls
MOST_STATEMENTS = 5_000  # in one trace; statements of called functions count each time
MOST_CALLS = 5 * MOST_STATEMENTS
MOST_GUARDS = 150  # conditions around one statement, and early exits before it
MOST_AUTOCASTS = 16  # regions around one statement; the innermost ones are kept
MOST_FOLLOWED = 10_000  # statements of called functions, in all traces of one file
FOLLOWED_PER_LINE = 3  # added to MOST_FOLLOWED for each line of the file
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # a definition runs nothing of its body
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
JUMPS = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return", ast.Raise: "raise"}
WITHOUT_CALLS = (ast.Name, ast.Constant, ast.Lambda, ast.stmt)


@dataclass(slots=True)
class WorkBudget:
    """Remaining budget of work for one file."""

    left: int


@dataclass(slots=True, eq=False)
class CodeSite:
    """Call or simple statement, and the context it runs in."""

    node: ast.AST
    context: EventContext

    @property
    def call(self) -> ast.Call:
        """The node of a site that is known to be a call."""
        assert isinstance(self.node, ast.Call)
        return self.node


class CodeTrace:
    """Events, calls and statements of one function and of the functions it calls."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.block = EventBlock()
        self.calls: list[CodeSite] = []
        self.statements: list[CodeSite] = []
        self.followed: set[FunctionOutline] = set()  # called functions that were followed
        self.ended_at: CodeSite | None = None  # where a limit was reached; code after it was not followed
        self._events: list[SourceEvent] | None = None
        self._by_loop: dict[Loop, list[CodeSite]] | None = None

    def events(self) -> list[SourceEvent]:
        """Return all events in the order of the source, with the branches of an ``if`` one after the other."""
        if self._events is None:
            self._events = events_in(self.block)
        return self._events

    def statements_in(self, loop: Loop | None) -> list[CodeSite]:
        """Return the statements in a loop, or all of them for None."""
        if loop is None:
            return self.statements
        if self._by_loop is None:
            self._by_loop = {}
            for site in self.statements:
                for outer in site.context.loops:
                    self._by_loop.setdefault(outer, []).append(site)
        return self._by_loop.get(loop, [])


def events_in(block: EventBlock) -> list[SourceEvent]:
    """Return the events of a block and of all blocks inside it."""
    found: list[SourceEvent] = []
    for node in block.nodes:
        if isinstance(node, SourceEvent):
            found.append(node)
        elif isinstance(node, Branch):
            found += events_in(node.then)
            found += events_in(node.orelse)
        elif not isinstance(node, Jump):
            found += events_in(node.block)
    return found


def trace_function(frame: Frame, budget: WorkBudget | None = None) -> CodeTrace:
    """Follow one function as if the program started there; ``budget`` limits the statements of called functions."""
    result = CodeTrace(frame)
    walker = _Walker(result, budget or WorkBudget(MOST_FOLLOWED))
    walker.statements(frame.function.body, _entry_context(frame, EventContext(frame)), result.block)
    return result


class _Walker:
    def __init__(self, result: CodeTrace, budget: WorkBudget) -> None:
        self.result, self.budget = result, budget
        self.recogniser = EventRecogniser()
        self.left = MOST_STATEMENTS

    # -- statements ---------------------------------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt], context: EventContext, block: EventBlock) -> None:
        for node in body:
            if isinstance(node, DEFINITIONS):
                continue
            self.left -= 1
            self.budget.left -= context.frame.caller is not None
            if self.left < 0 or self.budget.left < 0 or len(context.guards) > MOST_GUARDS:
                self.end(node, context)
                return
            follow = _COMPOUND.get(type(node))
            if follow is not None:
                context = follow(self, node, context, block) or context
                continue
            self.result.statements.append(CodeSite(node, context))
            self.expression(node, context, block)
            if isinstance(node, ast.Assign | ast.AugAssign):
                block.nodes += self.recogniser.statement(node, context)
            elif type(node) in JUMPS:
                block.nodes.append(Jump(JUMPS[type(node)]))

    def if_(self, node: ast.If, context: EventContext, block: EventBlock) -> EventContext:
        """Follow both branches; return the context after them: after ``if not ready: continue``, ``ready`` holds."""
        self.expression(node.test, context, block)
        branch = _branch(node.test, context)
        self.statements(node.body, _guarded(context, branch.then_guards), branch.then)
        self.statements(node.orelse, _guarded(context, branch.else_guards), branch.orelse)
        if isinstance(node.test, ast.Constant):
            block.nodes += (branch.then if node.test.value else branch.orelse).nodes
        elif branch.then.nodes or branch.orelse.nodes:
            block.nodes.append(branch)
        ends = not node.orelse and node.body and type(node.body[-1]) in JUMPS
        return _guarded(context, branch.else_guards) if ends else context

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, context: EventContext, block: EventBlock) -> None:
        self.expression(node.test if isinstance(node, ast.While) else node.iter, context, block)
        loop = Loop(node, context.frame, EventBlock())
        self.statements(node.body, replace(context, loops=(*context.loops, loop)), loop.block)
        if loop.block.nodes:
            block.nodes.append(loop)
        self.statements(node.orelse, context, block)

    def with_(self, node: ast.With | ast.AsyncWith, context: EventContext, block: EventBlock) -> None:
        for item in node.items:
            self.expression(item.context_expr, context, block)
            context = _inside(item.context_expr, context)
        self.statements(node.body, context, block)

    def try_(self, node: ast.Try | ast.TryStar, context: EventContext, block: EventBlock) -> None:
        tried = EventBlock()
        self.statements(node.body, context, tried)
        # A raise in the body is assumed to be caught here, so that the code after it is reached.
        catches = bool(node.handlers)
        block.nodes += [
            each for each in tried.nodes if not (catches and isinstance(each, Jump) and each.kind == "raise")
        ]
        self.statements(node.orelse, context, block)
        for handler in node.handlers:  # followed, but not part of a training path
            self.statements(handler.body, context, EventBlock())
        self.statements(node.finalbody, context, block)

    def match(self, node: ast.Match, context: EventContext, block: EventBlock) -> None:
        self.expression(node.subject, context, block)
        subject = context.frame.key(node.subject) or code_of(node.subject)
        for case in node.cases:
            guard = BranchGuard(f"{subject} is {code_of(case.pattern)}", True, test=node.subject)
            branch = Branch((guard,), (BranchGuard(guard.text, False),), EventBlock(), EventBlock())
            self.statements(case.body, _guarded(context, (guard,)), branch.then)
            if branch.then.nodes:
                block.nodes.append(branch)

    def end(self, node: ast.AST, context: EventContext) -> None:
        if self.result.ended_at is None:
            self.result.ended_at = CodeSite(node, context)

    # -- expressions --------------------------------------------------------------------------------------

    def expression(self, node: ast.AST, context: EventContext, block: EventBlock) -> None:
        """Follow the calls of an expression, or of a simple statement, in order of evaluation."""
        known = context.frame.outline.order
        if node not in known:
            known[node] = _calls_in(node)
        for part in known[node]:
            if isinstance(part, ast.Call):
                self.call(part, context, block)
            elif isinstance(part, ast.IfExp) and any(isinstance(below, ast.Call) for below in walk(part)):
                self.expression(part.test, context, block)
                branch = _branch(part.test, context)
                self.expression(part.body, _guarded(context, branch.then_guards), branch.then)
                self.expression(part.orelse, _guarded(context, branch.else_guards), branch.orelse)
                if branch.then.nodes or branch.orelse.nodes:
                    block.nodes.append(branch)

    def call(self, node: ast.Call, context: EventContext, block: EventBlock) -> None:
        if len(self.result.calls) >= MOST_CALLS:
            self.end(node, context)
            return
        self.result.calls.append(CodeSite(node, context))
        events, follow = self.recogniser.call(node, context)
        block.nodes += events
        if not follow:
            return
        frame = context.frame
        target = frame.callee(node) or _passed_closure(node, frame)
        if target is None:
            block.nodes += self.recogniser.unknown(node, context)
            return
        function, owner = target
        frames = frame.callers()
        if not frame.lookup.is_worth_following(function, node, context) or len(frames) > DEEPEST:
            return
        if any(outer.function is function for outer in frames):
            return
        self.result.followed.add(function)
        inside = frame.enter(function, node, owner)
        inlined = FollowedCall(inside, EventBlock())
        self.statements(function.body, _entry_context(inside, context), inlined.block)
        if inlined.block.nodes:
            block.nodes.append(inlined)


_COMPOUND: dict[type[ast.stmt], Callable[..., EventContext | None]] = {
    ast.If: _Walker.if_,
    **dict.fromkeys((ast.For, ast.AsyncFor, ast.While), _Walker.loop),
    **dict.fromkeys((ast.With, ast.AsyncWith), _Walker.with_),
    **dict.fromkeys((ast.Try, ast.TryStar), _Walker.try_),
    ast.Match: _Walker.match,
}


def _branch(test: ast.expr, context: EventContext) -> Branch:
    return Branch(*guards_of(test, context.frame), EventBlock(), EventBlock())


def _guarded(context: EventContext, guards: tuple[BranchGuard, ...]) -> EventContext:
    return EventContext(context.frame, context.autocasts, context.loops, context.guards + guards, context.no_grad)


def _calls_in(root: ast.AST) -> list[ast.expr]:
    """Return calls in order of evaluation, innermost first; a conditional expression represents the calls in it."""
    found: list[ast.expr] = []
    pending = [root]
    while pending:  # each node before its children, and these from the last to the first: reversed in the end
        node = pending.pop()
        if isinstance(node, ast.IfExp):
            found.append(node)
            continue
        if isinstance(node, ast.Call):
            found.append(node)
        pending += [child for child in children(node) if not isinstance(child, WITHOUT_CALLS)]
    found.reverse()
    return found


def _entry_context(frame: Frame, around: EventContext) -> EventContext:
    """Return the context at a function's first statement: the caller's, with what its decorators add."""
    context = replace(around, frame=frame)
    for decorator in frame.function.decorators:
        context = _inside(decorator, context)
    return context


def _inside(manager: ast.expr, context: EventContext) -> EventContext:
    """Return the context inside ``with manager:``."""
    manager = entered(manager)
    autocast = autocast_of(manager, context.frame)
    if autocast is not None:
        return replace(context, autocasts=(*context.autocasts[1 - MOST_AUTOCASTS :], autocast))
    qualified = context.frame.qualified(manager.func if isinstance(manager, ast.Call) else manager)
    is_switch = qualified == "torch.set_grad_enabled" and code_of(manager).endswith("(False)")
    return replace(context, no_grad=True) if is_switch or qualified in NO_GRAD else context


def _passed_closure(node: ast.Call, frame: Frame) -> Callee | None:
    """Return the closure that ``optimizer.step(closure)`` runs."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        for argument in arguments_given(node):
            target = frame.definition(argument) if isinstance(argument, ast.Name) else None
            if isinstance(target, FunctionOutline):
                return target, None
    return None
