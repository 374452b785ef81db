"""Apex: ``with amp.scale_loss(loss, optimizer) as scaled:``, whose scale changes, and may skip ``optimizer.step()``."""

from __future__ import annotations

import ast
import functools

from ampwise.check.source.frame import Frame
from ampwise.check.source.names import arguments_given
from ampwise.check.source.project import SourceFile


@functools.lru_cache(maxsize=4)
def dynamically_scaled_losses(code: SourceFile) -> list[tuple[ast.Call, Frame]]:
    """Return the calls of ``amp.scale_loss`` of a file, unless it may ask for a fixed scale."""
    found = []
    for call, frame, name in _calls_of_amp(code):
        if name == "initialize" and _may_fix_scale(call):
            return []
        if name == "scale_loss":
            found.append((call, frame))
    return found


@functools.lru_cache(maxsize=4)
def keeps_state(code: SourceFile) -> bool:
    """Whether a file saves or loads the state of apex."""
    return any(name in ("state_dict", "load_state_dict") for _, _, name in _calls_of_amp(code))


def scaled_optimizers(call: ast.Call, frame: Frame) -> set[str]:
    """Return the keys of the optimizers in ``amp.scale_loss(loss, [optimizer_G, optimizer_D])``."""
    given = arguments_given(call)[1:2]
    parts = given[0].elts if given and isinstance(given[0], ast.List | ast.Tuple) else given
    return {key for part in parts if (key := frame.key(part)) is not None}


@functools.lru_cache(maxsize=4)
def _calls_of_amp(code: SourceFile) -> list[tuple[ast.Call, Frame, str]]:
    found = []
    text = code.script.text
    for call in code.nodes(ast.Call) if "scale_loss(" in text and "apex" in text else ():
        frame = code.frame(code.function_at(call))
        package, _, name = (frame.qualified(call.func) or "").rpartition(".")
        if package == "apex.amp":
            found.append((call, frame, name))
    return found


def _may_fix_scale(initialize: ast.Call) -> bool:
    """Whether ``amp.initialize`` asks for no loss scale, or for one that may be fixed."""
    given = {word.arg: word.value for word in initialize.keywords}
    level, scale = given.get("opt_level"), given.get("loss_scale", ast.Constant("dynamic"))
    is_without = isinstance(level, ast.Constant) and level.value in ("O0", "O3")
    return is_without or not (isinstance(scale, ast.Constant) and scale.value in (None, "dynamic"))
