"""Follow a function from its first statement to its last, into the functions it calls, and collect events.

The result is a ``Trace``: the events that matter to mixed precision in a tree of blocks, and every call and
simple statement with the context it runs in. Nothing is executed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

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
from ampwise.check.source.frame import Frame
from ampwise.check.source.guards import guards_of
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import ClassOutline, FunctionOutline
from ampwise.check.source.precision import autocast_of

__all__ = [
    "FOLLOWED_PER_LINE",
    "MOST_FOLLOWED",
    "MOST_STATEMENTS",
    "CodeSite",
    "CodeTrace",
    "WorkBudget",
    "trace_function",
]

DEEPEST = 5  # calls followed into calls
MOST_STATEMENTS = 1_500  # in one trace; statements of called functions count each time
MOST_CALLS = 10 * MOST_STATEMENTS
MOST_GUARDS = 150  # conditions around one statement, and early exits before it
MOST_AUTOCASTS = 16  # regions around one statement; the innermost ones are kept
MOST_FOLLOWED = 10_000  # statements of called functions, in all traces of one file
FOLLOWED_PER_LINE = 3  # added to MOST_FOLLOWED for each line of the file
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # a definition runs nothing of its body
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
JUMPS = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return", ast.Raise: "raise"}


class WorkBudget:
    """Remaining budget of work for one file."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class CodeSite:
    """Call or simple statement, and the context it runs in."""

    __slots__ = ("context", "node")

    def __init__(self, node: ast.AST, context: EventContext) -> None:
        self.node = node
        self.context = context

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

    def events(self) -> list[SourceEvent]:
        """Return all events in the order of the source, with the branches of an ``if`` one after the other."""
        return self._events

    @functools.cached_property
    def _events(self) -> list[SourceEvent]:
        return list(events_in(self.block))

    def statements_in(self, loop: Loop | None) -> list[CodeSite]:
        """Return the statements in a loop, or all of them for None."""
        return self.statements if loop is None else self._statements_by_loop.get(loop, [])

    @functools.cached_property
    def _statements_by_loop(self) -> dict[Loop, list[CodeSite]]:
        found: dict[Loop, list[CodeSite]] = {}
        for site in self.statements:
            for loop in site.context.loops:
                found.setdefault(loop, []).append(site)
        return found


def events_in(block: EventBlock) -> Iterator[SourceEvent]:
    """Yield the events of a block and of all blocks inside it."""
    for node in block.nodes:
        if isinstance(node, SourceEvent):
            yield node
        elif isinstance(node, Branch):
            yield from events_in(node.then)
            yield from events_in(node.orelse)
        elif isinstance(node, Loop | FollowedCall):
            yield from events_in(node.block)


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
            self.statement(node, context, block)
            context = _after(node, context)

    def statement(self, node: ast.stmt, context: EventContext, block: EventBlock) -> None:
        if isinstance(node, ast.If):
            self.if_(node, context, block)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self.loop(node, context, block)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self.with_(node, context, block)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.try_(node, context, block)
        elif isinstance(node, ast.Match):
            self.match(node, context, block)
        else:
            self.plain(node, context, block)

    def plain(self, node: ast.stmt, context: EventContext, block: EventBlock) -> None:
        self.result.statements.append(CodeSite(node, context))
        self.expression(node, context, block)
        block.nodes += self.recogniser.statement(node, context)
        jump = JUMPS.get(type(node))
        if jump is not None:
            block.nodes.append(Jump(jump))

    def if_(self, node: ast.If, context: EventContext, block: EventBlock) -> None:
        self.expression(node.test, context, block)
        holds, fails = guards_of(node.test, context.frame)
        branch = Branch(holds, fails, EventBlock(), EventBlock())
        self.statements(node.body, context.but(guards=context.guards + holds), branch.then)
        self.statements(node.orelse, context.but(guards=context.guards + fails), branch.orelse)
        if isinstance(node.test, ast.Constant):
            block.nodes += (branch.then if node.test.value else branch.orelse).nodes
        elif branch.then.nodes or branch.orelse.nodes:
            block.nodes.append(branch)

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, context: EventContext, block: EventBlock) -> None:
        head = node.test if isinstance(node, ast.While) else node.iter
        self.expression(head, context, block)
        loop = Loop(node, context.frame, EventBlock())
        self.statements(node.body, context.but(loops=(*context.loops, loop)), loop.block)
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
        block.nodes += [each for each in tried.nodes if not (node.handlers and _raises(each))]
        self.statements(node.orelse, context, block)
        for handler in node.handlers:  # followed, but not part of a training path
            self.statements(handler.body, context, EventBlock())
        self.statements(node.finalbody, context, block)

    def match(self, node: ast.Match, context: EventContext, block: EventBlock) -> None:
        self.expression(node.subject, context, block)
        subject = context.frame.key(node.subject) or ast.unparse(node.subject)
        for case in node.cases:
            guard = BranchGuard(f"{subject} is {ast.unparse(case.pattern)}", True, test=node.subject)
            branch = Branch((guard,), (BranchGuard(guard.text, False),), EventBlock(), EventBlock())
            self.statements(case.body, context.but(guards=(*context.guards, guard)), branch.then)
            if branch.then.nodes:
                block.nodes.append(branch)

    # -- expressions --------------------------------------------------------------------------------------

    def expression(self, node: ast.AST, context: EventContext, block: EventBlock) -> None:
        """Follow the calls of an expression, or of a simple statement, in order of evaluation."""
        if isinstance(node, ast.IfExp):
            self.choice(node, context, block)
            return
        known = context.frame.outline.order
        if node not in known:
            known[node] = []
            _collect_calls(node, known[node])
        for part in known[node]:
            if isinstance(part, ast.Call):
                self.call(part, context, block)
            elif isinstance(part, ast.IfExp):
                self.choice(part, context, block)

    def choice(self, node: ast.IfExp, context: EventContext, block: EventBlock) -> None:
        if not any(isinstance(part, ast.Call) for part in ast.walk(node)):
            return
        self.expression(node.test, context, block)
        holds, fails = guards_of(node.test, context.frame)
        branch = Branch(holds, fails, EventBlock(), EventBlock())
        self.expression(node.body, context.but(guards=context.guards + holds), branch.then)
        self.expression(node.orelse, context.but(guards=context.guards + fails), branch.orelse)
        if branch.then.nodes or branch.orelse.nodes:
            block.nodes.append(branch)

    def end(self, node: ast.AST, context: EventContext) -> None:
        if self.result.ended_at is None:
            self.result.ended_at = CodeSite(node, context)

    def call(self, node: ast.Call, context: EventContext, block: EventBlock) -> None:
        if len(self.result.calls) >= MOST_CALLS:
            self.end(node, context)
            return
        self.result.calls.append(CodeSite(node, context))
        found = self.recogniser.call(node, context)
        block.nodes += found.nodes
        if found.follow:
            self.follow(node, context, block)

    def follow(self, node: ast.Call, context: EventContext, block: EventBlock) -> None:
        target = context.frame.callee(node) or _passed_closure(node, context.frame)
        if target is None:
            block.nodes += self.recogniser.unknown(node, context)
            return
        function, owner = target
        if not self.is_worth_following(node, function, context):
            return
        if any(frame.function is function for frame in context.frame.callers()) or context.frame.depth() >= DEEPEST:
            return
        self.result.followed.add(function)
        frame = context.frame.enter(function, node, owner)
        inlined = FollowedCall(frame, EventBlock())
        self.statements(function.body, _entry_context(frame, context), inlined.block)
        if inlined.block.nodes:
            block.nodes.append(inlined)

    @staticmethod
    def is_worth_following(node: ast.Call, function: FunctionOutline, context: EventContext) -> bool:
        """Whether a function may do part of the step, a forward, or arithmetic under autocast."""
        project = context.frame.lookup
        if project.is_worth_following(function, context.frame.outline):
            return True
        if context.in_autocast and project.may_lose_precision(function):
            return True
        models = context.frame.outline.models
        return bool(context.loops) and any(dotted_text(argument) in models for argument in node.args)


def _collect_calls(node: ast.AST, found: list[ast.expr]) -> None:
    """Collect calls in order of evaluation, innermost first; a conditional expression represents the calls in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.IfExp):
            found.append(child)
        elif not isinstance(child, ast.Lambda | ast.Constant | ast.Name | ast.expr_context | ast.operator | ast.stmt):
            _collect_calls(child, found)
    if isinstance(node, ast.Call):
        found.append(node)


def _entry_context(frame: Frame, around: EventContext) -> EventContext:
    """Return the context at a function's first statement: the caller's, with what its decorators add."""
    context = around.but(frame=frame)
    for decorator in frame.function.decorators:
        context = _inside(decorator, context)
    return context


def _raises(node: object) -> bool:
    return isinstance(node, Jump) and node.kind == "raise"


def _inside(manager: ast.expr, context: EventContext) -> EventContext:
    autocast = autocast_of(manager, context.frame)
    if autocast is not None:
        context = context.but(autocasts=(*context.autocasts[1 - MOST_AUTOCASTS :], autocast))
    elif _stops_gradients(manager, context.frame):
        context = context.but(no_grad=True)
    return context


def _stops_gradients(manager: ast.expr, frame: Frame) -> bool:
    called = manager.func if isinstance(manager, ast.Call) else manager
    qualified = frame.qualified(called)
    if qualified in NO_GRAD:
        return True
    return qualified == "torch.set_grad_enabled" and ast.unparse(manager).endswith("(False)")


def _after(node: ast.stmt, context: EventContext) -> EventContext:
    """Return the context after a statement: after ``if not ready: continue``, ``ready`` holds."""
    if isinstance(node, ast.If) and not node.orelse and node.body and type(node.body[-1]) in JUMPS:
        return context.but(guards=context.guards + guards_of(node.test, context.frame)[1])
    return context


def _passed_closure(node: ast.Call, frame: Frame) -> tuple[FunctionOutline, ClassOutline | None] | None:
    """Return the closure that ``optimizer.step(closure)`` runs."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        for argument in [*node.args, *(word.value for word in node.keywords)]:
            target = frame.definition(argument) if isinstance(argument, ast.Name) else None
            if isinstance(target, FunctionOutline):
                return target, None
    return None
