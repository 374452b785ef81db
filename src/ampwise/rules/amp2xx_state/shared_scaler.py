from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.scalers import scalers_in
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import CodeSite, Frame, SourceFile
    from ampwise.watch.run_events import ScalerStep

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


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if "GradScaler(" not in text or not any(word in text for word in ("spawn", "Process", "Thread", "start_processes")):
        return
    found: dict[ast.Call, tuple[ast.expr, str]] = {}  # by the call that passes it: the scaler, and what is started
    single: dict[str, list[tuple[ast.Call, ast.expr, str]]] = {}  # the same for single starts, by scaler
    for site in code.calls:
        call, frame = site.call, site.context.frame
        kind = _starts(call, frame)
        scaler = _scaler_in_arguments(site) if kind else None
        if scaler is None:
            continue
        comprehensions = (
            node for node in walk(code.script.statement(call)) if isinstance(node, ast.ListComp | ast.GeneratorExp)
        )
        repeats = site.context.loops or any(call in _calls_in(node.elt) for node in comprehensions)
        if kind == "spawned process" or repeats:
            found.setdefault(call, (scaler, kind))
        else:
            single.setdefault(frame.key(scaler) or ast.unparse(scaler), []).append((call, scaler, kind))
    for starts in single.values():
        if len({call for call, _, _ in starts}) > 1:
            call, scaler, kind = starts[1]
            found.setdefault(call, (scaler, kind))
    for scaler, kind in found.values():
        yield RULE.at(code.script.place(scaler), f"every {kind} gets the same GradScaler")


def _starts(call: ast.Call, frame: Frame) -> str:
    """Return what a call starts: processes, a process, a thread, or nothing."""
    qualified = frame.qualified(call.func) or ""
    if qualified in SPAWN:
        count = argument_of(call, "nprocs", 2)
        return "" if count is None or literal_number(count) == 1 else "spawned process"
    if qualified in STARTED_ONE_BY_ONE:
        return "thread" if qualified.endswith("Thread") else "process"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "Process":
        # Of `mp.get_context("spawn").Process(...)`, with the context possibly held in a name.
        made = (value.node for value in frame.values(call.func.value))
        if any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_context") for node in made):
            return "process"
    return ""


def _scaler_in_arguments(site: CodeSite) -> ast.expr | None:
    """Return the scaler among the arguments of the started function, if its constructor call is visible.

    One that is created for each process, in a loop that starts them, is not shared.
    """
    call, frame = site.call, site.context.frame
    positional = argument_of(call, "args", 1 if frame.qualified(call.func) in SPAWN else 3)
    named = argument_of(call, "kwargs", 4)
    parts = [*positional.elts] if isinstance(positional, ast.Tuple | ast.List) else []
    parts += named.values if isinstance(named, ast.Dict) else []
    for part in parts:
        made = scalers_in(part, frame) if isinstance(part, ast.Name | ast.Attribute) else []
        if made and not any(one in _calls_in(loop.node) for loop in site.context.loops for one in made):
            return part
    return None


@functools.lru_cache(maxsize=32)  # the loops around one call
def _calls_in(scope: ast.AST) -> set[ast.AST]:
    return {node for node in walk(scope) if isinstance(node, ast.Call)}


def check_event(step: ScalerStep) -> Findings:
    if step.threads > 1:
        yield RULE.at(
            step.site.place, f"{step.threads} threads use this GradScaler", evidence={"threads": step.threads}
        )
