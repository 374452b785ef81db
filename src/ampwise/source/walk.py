"""Follow a function from its first statement to its last, into the functions it calls, and note what happens.

The result is a ``Trace``: the events that matter to mixed precision in a tree of blocks, and every call and
plain statement with the context it runs in. Nothing is executed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from ampwise.source.calls import Recogniser
from ampwise.source.events import Block, Branch, Context, Event, Guard, Inlined, Jump, Loop
from ampwise.source.frame import Frame
from ampwise.source.guards import guards_of
from ampwise.source.names import dotted_text
from ampwise.source.outline import Class, Function
from ampwise.source.precision import autocast_of

__all__ = ["FOLLOWED_PER_LINE", "MOST_FOLLOWED", "MOST_STATEMENTS", "Budget", "Site", "Trace", "trace"]

DEEPEST = 5  # calls followed into calls
MOST_STATEMENTS = 1_500  # in one trace, inlined ones counted each time
MOST_CALLS = 10 * MOST_STATEMENTS
MOST_GUARDS = 150  # tests around one statement, and ends before it
MOST_AUTOCASTS = 16  # regions around one statement; the innermost decide
MOST_FOLLOWED = 10_000  # statements of called functions, in all traces of one file,
FOLLOWED_PER_LINE = 3  # and as many more for each of its lines
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # nothing happens there yet
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
JUMPS = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return", ast.Raise: "raise"}


class Budget:
    """How much may still be done for one file."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Site:
    """A call or a plain statement, and the context it runs in."""

    __slots__ = ("context", "node")

    def __init__(self, node: ast.AST, context: Context) -> None:
        self.node = node
        self.context = context


class Trace:
    """All that was seen from one function on."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.block = Block()
        self.calls: list[Site] = []
        self.statements: list[Site] = []
        self.followed: set[Function] = set()  # the functions it went into
        self.ended_at: Site | None = None  # where a limit was met: what comes after was not looked at

    def events(self) -> list[Event]:
        """Every event, in the order of the source, branches one after the other."""
        return self._events

    @functools.cached_property
    def _events(self) -> list[Event]:
        return list(events_in(self.block))

    def statements_in(self, loop: Loop | None) -> list[Site]:
        """The statements in a loop; without one, all of them."""
        return self.statements if loop is None else self._statements_by_loop.get(loop, [])

    @functools.cached_property
    def _statements_by_loop(self) -> dict[Loop, list[Site]]:
        found: dict[Loop, list[Site]] = {}
        for site in self.statements:
            for loop in site.context.loops:
                found.setdefault(loop, []).append(site)
        return found


def events_in(block: Block) -> Iterator[Event]:
    """The events of a block and of all blocks inside it."""
    for node in block.nodes:
        if isinstance(node, Event):
            yield node
        elif isinstance(node, Branch):
            yield from events_in(node.then)
            yield from events_in(node.orelse)
        elif isinstance(node, Loop | Inlined):
            yield from events_in(node.block)


def trace(frame: Frame, budget: Budget | None = None) -> Trace:
    """Follow one function as if the program started there; ``budget`` is what is left for called functions."""
    result = Trace(frame)
    walker = _Walker(result, budget or Budget(MOST_FOLLOWED))
    walker.statements(frame.function.body, _entry_context(frame, Context(frame)), result.block)
    return result


class _Walker:
    def __init__(self, result: Trace, budget: Budget) -> None:
        self.result, self.budget = result, budget
        self.recogniser = Recogniser()
        self.left = MOST_STATEMENTS

    # -- statements ---------------------------------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt], context: Context, block: Block) -> None:
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

    def statement(self, node: ast.stmt, context: Context, block: Block) -> None:
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

    def plain(self, node: ast.stmt, context: Context, block: Block) -> None:
        self.result.statements.append(Site(node, context))
        self.expression(node, context, block)
        block.nodes += self.recogniser.statement(node, context)
        jump = JUMPS.get(type(node))
        if jump is not None:
            block.nodes.append(Jump(jump))

    def if_(self, node: ast.If, context: Context, block: Block) -> None:
        self.expression(node.test, context, block)
        holds, fails = guards_of(node.test, context.frame)
        branch = Branch(holds, fails, Block(), Block())
        self.statements(node.body, context.but(guards=context.guards + holds), branch.then)
        self.statements(node.orelse, context.but(guards=context.guards + fails), branch.orelse)
        if isinstance(node.test, ast.Constant):
            block.nodes += (branch.then if node.test.value else branch.orelse).nodes
        elif branch.then.nodes or branch.orelse.nodes:
            block.nodes.append(branch)

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, context: Context, block: Block) -> None:
        head = node.test if isinstance(node, ast.While) else node.iter
        self.expression(head, context, block)
        loop = Loop(node, context.frame, Block())
        self.statements(node.body, context.but(loops=(*context.loops, loop)), loop.block)
        if loop.block.nodes:
            block.nodes.append(loop)
        self.statements(node.orelse, context, block)

    def with_(self, node: ast.With | ast.AsyncWith, context: Context, block: Block) -> None:
        for item in node.items:
            self.expression(item.context_expr, context, block)
            context = _inside(item.context_expr, context)
        self.statements(node.body, context, block)

    def try_(self, node: ast.Try | ast.TryStar, context: Context, block: Block) -> None:
        tried = Block()
        self.statements(node.body, context, tried)
        # What is raised here is taken to be caught here: what follows is reached.
        block.nodes += [each for each in tried.nodes if not (node.handlers and _raises(each))]
        self.statements(node.orelse, context, block)
        for handler in node.handlers:  # seen, but not a way that training goes
            self.statements(handler.body, context, Block())
        self.statements(node.finalbody, context, block)

    def match(self, node: ast.Match, context: Context, block: Block) -> None:
        self.expression(node.subject, context, block)
        subject = context.frame.key(node.subject) or ast.unparse(node.subject)
        for case in node.cases:
            guard = Guard(f"{subject} is {ast.unparse(case.pattern)}", True, test=node.subject)
            branch = Branch((guard,), (Guard(guard.text, False),), Block(), Block())
            self.statements(case.body, context.but(guards=(*context.guards, guard)), branch.then)
            if branch.then.nodes:
                block.nodes.append(branch)

    # -- expressions --------------------------------------------------------------------------------------

    def expression(self, node: ast.AST, context: Context, block: Block) -> None:
        """Go through the calls of an expression, or of a plain statement, in the order they are made."""
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

    def choice(self, node: ast.IfExp, context: Context, block: Block) -> None:
        if not any(isinstance(part, ast.Call) for part in ast.walk(node)):
            return
        self.expression(node.test, context, block)
        holds, fails = guards_of(node.test, context.frame)
        branch = Branch(holds, fails, Block(), Block())
        self.expression(node.body, context.but(guards=context.guards + holds), branch.then)
        self.expression(node.orelse, context.but(guards=context.guards + fails), branch.orelse)
        if branch.then.nodes or branch.orelse.nodes:
            block.nodes.append(branch)

    def end(self, node: ast.AST, context: Context) -> None:
        if self.result.ended_at is None:
            self.result.ended_at = Site(node, context)

    def call(self, node: ast.Call, context: Context, block: Block) -> None:
        if len(self.result.calls) >= MOST_CALLS:
            self.end(node, context)
            return
        self.result.calls.append(Site(node, context))
        found = self.recogniser.call(node, context)
        block.nodes += found.nodes
        if found.follow:
            self.follow(node, context, block)

    def follow(self, node: ast.Call, context: Context, block: Block) -> None:
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
        inlined = Inlined(frame, Block())
        self.statements(function.body, _entry_context(frame, context), inlined.block)
        if inlined.block.nodes:
            block.nodes.append(inlined)

    @staticmethod
    def is_worth_following(node: ast.Call, function: Function, context: Context) -> bool:
        """Only where something of the step can happen, or a forward, or arithmetic under autocast."""
        project = context.frame.lookup
        if project.is_worth_following(function, context.frame.outline):
            return True
        if context.in_autocast and project.computes(function):
            return True
        models = context.frame.outline.models
        return bool(context.loops) and any(dotted_text(argument) in models for argument in node.args)


def _collect_calls(node: ast.AST, found: list[ast.expr]) -> None:
    """Calls, innermost first as they are evaluated; a conditional expression stands for the calls in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.IfExp):
            found.append(child)
        elif not isinstance(child, ast.Lambda | ast.Constant | ast.Name | ast.expr_context | ast.operator | ast.stmt):
            _collect_calls(child, found)
    if isinstance(node, ast.Call):
        found.append(node)


def _entry_context(frame: Frame, around: Context) -> Context:
    """The context at a function's first statement: the caller's, with what its decorators add."""
    context = around.but(frame=frame)
    for decorator in frame.function.decorators:
        context = _inside(decorator, context)
    return context


def _raises(node: object) -> bool:
    return isinstance(node, Jump) and node.kind == "raise"


def _inside(manager: ast.expr, context: Context) -> Context:
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


def _after(node: ast.stmt, context: Context) -> Context:
    """After ``if not ready: continue`` the rest of the block runs only when ready."""
    if isinstance(node, ast.If) and not node.orelse and node.body and type(node.body[-1]) in JUMPS:
        return context.but(guards=context.guards + guards_of(node.test, context.frame)[1])
    return context


def _passed_closure(node: ast.Call, frame: Frame) -> tuple[Function, Class | None] | None:
    """``optimizer.step(closure)`` runs closure."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        for argument in [*node.args, *(word.value for word in node.keywords)]:
            target = frame.definition(argument) if isinstance(argument, ast.Name) else None
            if isinstance(target, Function):
                return target, None
    return None
