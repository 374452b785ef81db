"""One GradScaler passed to several processes or threads."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.frame import Frame
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.scalers import scalers_in
from ampwise.check.source.walk import CodeSite
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP203",
    name="shared-scaler",
    severity=Severity.WARNING,
    summary="One GradScaler is passed to several processes or threads.",
    why=(
        "Between `unscale_` and `update`, a scaler records which optimizers it has seen and whether it found inf. "
        "Threads that share one corrupt this state. Processes each get a copy: the parent's scaler never changes, so "
        "it saves or prints only the initial scale."
    ),
    fix="Create the GradScaler in the function that each process or thread runs.",
    bad='scaler = torch.amp.GradScaler("cuda")\nmp.spawn(train, args=(model, scaler), nprocs=4)',
    good=(
        'def train(rank, model):\n    scaler = torch.amp.GradScaler("cuda")\n\n\n'
        "mp.spawn(train, args=(model,), nprocs=4)"
    ),
)
NEEDS = (("GradScaler",), ("spawn", "Process", "Thread"))

SPAWN = frozenset(("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"))
STARTED_ONE_BY_ONE = frozenset(
    ("torch.multiprocessing.Process", "multiprocessing.Process", "multiprocessing.context.Process", "threading.Thread")
)


def check(code: SourceFile) -> Iterator[Finding]:
    text = code.script.text
    if "GradScaler(" not in text or not any(word in text for word in ("spawn", "Process", "Thread", "start_processes")):
        return
    reported = set()
    for site, scaler, kind in _passed_scalers(code):
        if site.node not in reported:
            reported.add(site.node)
            yield RULE.at(code.script.place(scaler), f"every {kind} gets the same GradScaler")


def _passed_scalers(code: SourceFile) -> Iterator[tuple[CodeSite, ast.expr, str]]:
    given: dict[str, list[tuple[CodeSite, ast.expr, str]]] = {}
    for site in code.calls:
        assert isinstance(site.node, ast.Call)
        kind = _starts(site.node, site.context.frame)
        scaler = _scaler_in_arguments(site.node, site) if kind else None
        if scaler is None:
            continue
        key = site.context.frame.key(scaler) or ast.unparse(scaler)
        if kind != "spawned process" and not site.context.loops and not _in_comprehension(site.node, code):
            given.setdefault(key, []).append((site, scaler, kind))
        else:
            yield site, scaler, kind
    for starts in given.values():
        if len({site.node for site, _, _ in starts}) > 1:
            yield from starts[1:2]


def _starts(call: ast.Call, frame: Frame) -> str:
    """Return what a call starts: processes, a process, a thread, or nothing."""
    qualified = frame.qualified(call.func) or ""
    if qualified in SPAWN:
        count = argument_of(call, "nprocs", 2)
        alone = count is None or (isinstance(count, ast.Constant) and count.value == 1)
        return "" if alone else "spawned process"
    if qualified in STARTED_ONE_BY_ONE or _of_a_context(call, frame):
        return "thread" if qualified.endswith("Thread") else "process"
    return ""


def _of_a_context(call: ast.Call, frame: Frame) -> bool:
    """Return whether the call is ``mp.get_context("spawn").Process(...)``, with the context possibly held in a name."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "Process":
        return False
    made = (value.node for value in frame.values(call.func.value))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_context") for node in made)


def _scaler_in_arguments(call: ast.Call, site: CodeSite) -> ast.expr | None:
    """Return the scaler among the arguments of the started function, if its constructor call is visible."""
    frame = site.context.frame
    positional = argument_of(call, "args", 1 if frame.qualified(call.func) in SPAWN else 3)
    named = argument_of(call, "kwargs", 4)
    parts: list[ast.expr] = []
    if isinstance(positional, ast.Tuple | ast.List):
        parts += positional.elts
    if isinstance(named, ast.Dict):
        parts += named.values
    return next((part for part in parts if isinstance(part, ast.Name | ast.Attribute) and _is_one(part, site)), None)


def _is_one(node: ast.expr, site: CodeSite) -> bool:
    """Return whether ``node`` holds one scaler, not one created for each process that a loop starts."""
    made = scalers_in(node, site.context.frame)
    return bool(made) and not any(call in _calls_in(loop.node) for loop in site.context.loops for call in made)


@functools.lru_cache(maxsize=32)  # the loops around one call
def _calls_in(scope: ast.AST) -> set[ast.AST]:
    return {node for node in ast.walk(scope) if isinstance(node, ast.Call)}


def _in_comprehension(call: ast.Call, code: SourceFile) -> bool:
    return call in _comprehended(code.script.statement(call))


@functools.lru_cache(maxsize=1)
def _comprehended(statement: ast.stmt) -> set[ast.AST]:
    """Return the calls that a comprehension in a statement makes per element."""
    around = (node for node in ast.walk(statement) if isinstance(node, ast.ListComp | ast.GeneratorExp))
    return {part for node in around for part in _calls_in(node.elt)}
