from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.checkpoints import apex_users, checkpoints_without_scaler
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, method_called
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.torch_names import GRAD_SCALERS, OPTIMIZER, SCALER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.checkpoints import SavedCheckpoint
    from ampwise.check.source.types import Binding, Frame, SourceFile
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP204",
    name="scaler-not-checkpointed",
    severity=Severity.WARNING,
    summary="A checkpoint contains the optimizer's state but not the scaler's.",
    why=(
        "A resumed run starts again with a loss scale of 65536 and a growth counter of zero. The first steps after "
        "each resume may overflow and be skipped until the scale is found again, and the run differs from an "
        "uninterrupted one."
    ),
    fix="Save `scaler.state_dict()` with the optimizer's, and load it when resuming.",
    bad='torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)',
    good=(
        "state = {\n"
        '    "model": model.state_dict(),\n'
        '    "optimizer": optimizer.state_dict(),\n'
        '    "scaler": scaler.state_dict(),\n'
        "}\n"
        "torch.save(state, path)"
    ),
    fixable="sometimes",
)
NEEDS = (
    ("caler", "Accelerator(", "scale_loss("),
    # A base class of another file may save.
    ("save", "Save", "heckpoint", "ckpt", "dump", "state_dict", "Base", "rainer)", "unner)", "olver)", "ngine)"),
)


LOADS = LazyPattern(r"load|resume|restore", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    is_apex = bool(apex_users(code)) and "GradScaler" not in code.script.text
    for checkpoint in checkpoints_without_scaler(code):
        if _is_split(checkpoint):
            continue
        place, what = checkpoint.frame.outline.script.place(checkpoint.where), "this checkpoint"
        if place.file in code.project.imported and not code.calls_leading_to(place):
            made = next((made.node for made in scalers_made(code)), None)
            if made is not None:  # a base class saves, of a file that is not checked itself
                place, what = code.script.place(made), f"the checkpoint that the base class saves, in {place},"
        fix = RULE.fix.replace("scaler.state_dict", "amp.state_dict") if is_apex else RULE.fix
        edits = _save_and_load(checkpoint, code)
        yield RULE.at(
            place,
            f"{what} has the optimizer's state but not the scaler's",
            fix=fix
            if edits
            else RULE.without_edit("the code that saves it and the code that loads it were not both found", fix),
            edits=edits,
            safe=False,  # a resumed run differs, as it should
        )


def _is_split(checkpoint: SavedCheckpoint) -> bool:
    """Whether the function that saves puts the scaler's state elsewhere, beside no optimizer: into a second file."""
    frame = checkpoint.frame
    script, parts = frame.outline.script, walk(frame.function.node)
    states: dict[str | None, list[tuple[ast.stmt, str | None]]] = {}
    for call in parts if frame.function.parent is not None else ():
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "state_dict":
            statement = script.statement(call)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            held = dotted_text(target.value) if isinstance(target, ast.Subscript) else None  # state["scaler"] = ...
            held = held or (dotted_text(target) if target is not None else None)
            states.setdefault(frame.role(call.func.value), []).append((statement, held))
    others = states.get(OPTIMIZER, [])
    return any(
        all(statement is not each and (held is None or held != name) for each, name in others)
        for statement, held in states.get(SCALER, [])
    )


def _save_and_load(checkpoint: SavedCheckpoint, code: SourceFile) -> tuple[Edit, ...]:
    """Return the edits that save the scaler with the optimizer, and load it wherever this file loads the optimizer.

    There are none if the scaler may not exist at one of these places. Old checkpoints, and those of a disabled scaler,
    whose state is empty, can still be loaded.
    """
    saved = checkpoint.display
    scaler = _scaler_at(saved, checkpoint.frame) if isinstance(saved, ast.Dict) else None
    if scaler is None or not isinstance(saved, ast.Dict) or checkpoint.frame.outline is not code.outline:
        return ()
    name, script = scaler[0], code.script
    keys = [key.value for key in saved.keys if isinstance(key, ast.Constant)]
    key = "grad_scaler" if "scaler" in keys else "scaler"
    if not keys or key in keys or not any("state_dict(" in script.segment(value) for value in saved.values):
        return ()  # of the objects themselves, old checkpoints may need to have all that are asked for
    loads: dict[tuple[object, str], ast.Call] = {}  # the last one of each function, by what it loads from
    for call in code.nodes(ast.Call):
        frame = code.frame(code.function_at(call))
        if method_called(call) != "load_state_dict" or not isinstance(call.func, ast.Attribute):
            called = (dotted_text(call.func) or "").rpartition(".")[2]
            if LOADS.search(called) and any(frame.role(part) == OPTIMIZER for part in arguments_given(call)):
                return ()  # a function that we cannot change loads it
            continue
        role, here = frame.role(call.func.value), _scaler_at(call, frame)
        if role not in (SCALER, OPTIMIZER) or (here is not None and here != scaler):
            continue  # another script in this file, with a scaler of its own
        if role == SCALER or here is None:
            return ()
        part = call.args[0] if len(call.args) == 1 else None
        source = part.value if isinstance(part, ast.Subscript) else None
        statement = script.statement(call)
        alone = script.lines[statement.lineno - 1][: statement.col_offset].strip() == ""
        is_plain = isinstance(statement, ast.Expr) and statement.value is call and alone
        if not isinstance(source, ast.Name) or not is_plain:
            return ()
        loads[frame.function, source.id] = call
    load = f'if {{source}}.get("{key}"):\n    {name}.load_state_dict({{source}}["{key}"])'
    loading = [script.insert_after(call, load.format(source=source)) for (_, source), call in loads.items()]
    return (_add_entry(saved, f'"{key}": {name}.state_dict()', code), *loading)


def _scaler_at(node: ast.expr, frame: Frame) -> tuple[str, Binding] | None:
    """Return the name of the only GradScaler that certainly exists at a place, with its assignment."""
    function = frame.function
    bound = [(name, those) for name, those in function.bindings.items() if name not in function.params]
    if function.owner is not None and function.self_name is not None:
        start = function.owner.methods.get("__init__")
        for attribute, those in function.owner.attributes.items():
            if start is not None and all(binding.function is start for binding in those):
                bound.append((f"{function.self_name}.{attribute}", those))
    found = []
    for name, those in bound:
        made = those[0].value
        is_scaler = isinstance(made, ast.Call) and frame.qualified(made.func) in GRAD_SCALERS
        if is_scaler and isinstance(made, ast.Call):
            home = those[0].function
            before = home is not function or made.lineno < node.lineno
            is_certain = len(those) == 1 and not those[0].guarded and before
            if not is_certain or (home is not function and _calls_own_method(home.node, made.lineno)):
                return None
            found.append((name, those[0]))
    return found[0] if len(found) == 1 else None


def _calls_own_method(start: ast.AST, line: int) -> bool:
    """Whether a constructor calls a method before a line, which may load a checkpoint before there is a scaler."""
    calls = [part for part in walk(start) if isinstance(part, ast.Call) and part.lineno < line]
    return any((dotted_text(call.func) or "").startswith("self.") for call in calls)


def _add_entry(saved: ast.Dict, entry: str, code: SourceFile) -> Edit:
    """Return the edit that adds an entry at the end of a dictionary, on a line of its own if the others are."""
    script = code.script
    first = next(key for key in saved.keys if isinstance(key, ast.Constant))
    (line, column), (end_line, end_column) = script.span(first)[0], script.span(saved.values[-1])[1]
    if script.segment(first).startswith("'"):
        entry = entry.replace('"', "'")
    indent = script.lines[line - 1][: column - 1]
    rest = script.lines[end_line - 1][end_column - 1 :].strip()  # of the last value's line
    if saved.lineno != saved.end_lineno and not indent.strip():
        if rest.startswith(",") and not rest[1:].partition("#")[0].strip():
            after = len(script.lines[end_line - 1]) + 1
            return script.edit(end_line, after, end_line, after, f"\n{indent}{entry},")
        if rest[:1] in ("", "}"):
            return script.edit(end_line, end_column, end_line, end_column, f",\n{indent}{entry}")
    if rest[:1] == "}":
        return script.edit(end_line, end_column, end_line, end_column, f", {entry}")
    return script.edit(line, column, line, column, f"{entry}, ")


def check_run(run: RunEvents) -> Findings:
    stepped = [made for made in run.scalers if made.enabled]
    if not stepped or any(save.scaler for save in run.saves):
        return
    for save, times in run.saves.items():
        yield RULE.at(
            save.site.place,
            "the checkpoint has the optimizer's state, but not the GradScaler's",
            evidence={"times": times},
        )
