"""Which parameters a file trains: not those that it freezes, nor those under adapters; and which have FP32 copies."""

from __future__ import annotations

import ast
import functools

from ampwise.check.source.cases import ALWAYS, Conditions, Limit, combined, conditions_at
from ampwise.check.source.casts import module_gone_through
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text, last_name
from ampwise.check.source.precision import argument_of, literal_bool
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import MODEL_NAME
from ampwise.check.source.tree_walk import walk

FROZEN_NAME = LazyPattern(
    r"teacher|(^|_|\.)ema|vae|clip|text_enc|tokenizer|frozen|reference|ref_model|critic_target|lpips|vgg|vision_tower"
)
# Two patterns for lower-case text: each branch begins with a letter, which is ten times as fast as to ignore case.
# Master weights, stochastic rounding: the optimizer keeps more than the half parameters.
KEEPS_MORE = LazyPattern(
    r"master_?(param|weight|cop|grad|model)|fp32_?(master|param|weight|copy)|float_params|param_copy|stochastic_?round|"
    r"kahan|optimi\b(?<!\woptimi)|torchao|adamw_?bf16|grad_dtype|keep_fp32|upcast|bf16-pure|"
    r"fp16_optimizer|mixedprecisionoptimizer"
)
# Adapters and quantised bases: the trained parameters are others.
TRAINS_OTHERS = LazyPattern(
    r"peft(?<![a-z]peft)|lora(?<![a-z]lora)|qlora(?<![a-z]qlora)|adapter|load_in_[48]bit|prepare_model_for|"
    r"cast_training_params"
)
ADAPTS = LazyPattern(
    r"get_peft_model|peftmodel|prepare_model_for|(apply|add|inject|insert|replace|with|to)\w*_(lora|adapter)|lora_?model|^(apply|add|inject)_?lora"
)
# What is frozen: `net.requires_grad_(False)`, a loop over its parameters, `freeze(net)`.
FREEZES = LazyPattern(
    r"([\w.]+)\.requires_grad_\(\s*(?:requires_grad\s*=\s*)?False|freeze\w*\(\s*([\w.]+)|requires_grad\(([\w.]+),\s*False|"
    r" in ([\w.]+)\.(?:named_)?parameters\(\):\s+(?:[^\n]*\n\s+){0,2}?\w+\.requires_grad(?:_\(|\s*=\s*)False"
)
FREEZES_EACH = LazyPattern(r"\.requires_grad(_\(\s*(requires_grad\s*=\s*)?|\s*=\s*)False")
TRAINS_AGAIN = LazyPattern(r"\.requires_grad(_\((True)?\)|\s*=\s*True)")
OPTION = LazyPattern(r"[\w.\[\]'\"]+$")
LONGEST_WORD = 60
DEEPEST_HELPER = 3  # that gives a model its adapters
NAMED_BY = ("id", "attr", "arg", "name")  # the fields of syntax nodes that are names


@functools.lru_cache(maxsize=4)  # asked for every half model
def frozen_in(code: SourceFile) -> set[str]:
    """Return the last parts of the names of modules that the file freezes."""
    found = (next(filter(None, match), "") for match in FREEZES.findall(code.script.text))
    frozen = {name.rpartition(".")[2] for name in found}
    return frozen - _trained_again(code) if frozen else frozen


def is_trained_by_name(path: str, code: SourceFile) -> bool:
    """Whether nothing may freeze a part, but loops over names: ``if "prompt" not in name: p.requires_grad = False``.

    The part is trained if its path has the word that a name must have to be left out.
    """
    if not frozen_in(code).isdisjoint(path.split(".")):
        return False
    for call in code.nodes(ast.Call):  # model.requires_grad_(False): all of it, unless more is said
        func, on = call.func, argument_of(call, "requires_grad", 0)
        freezes = isinstance(func, ast.Attribute) and func.attr == "requires_grad_" and literal_bool(on) is False
        if freezes and isinstance(func, ast.Attribute) and MODEL_NAME.search(last_name(func.value)):
            return False
    for loop in code.nodes(ast.For):
        gone_through = module_gone_through(loop)
        if gone_through is None or not FREEZES_EACH.search(code.script.segment(loop)):
            continue
        frame = code.frame(code.function_at(loop))
        asked = [part for part in walk(loop) if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.NotIn)]
        words = [value.node for part in asked for value in frame.values(part.left)]
        if not any(isinstance(word, ast.Constant) and str(word.value) in path for word in words):
            return False
    return True


def _trained_again(code: SourceFile) -> set[str]:
    """Return the models of which the file trains a part that they had: ``for p in model.layers[-1].parameters()``."""
    replaced = {dotted_text(target) for target, _ in code.assignments}
    found = set()
    for loop in code.nodes(ast.For):
        gone_through = module_gone_through(loop)
        part = gone_through[1] if gone_through is not None else None
        while isinstance(part, ast.Subscript):
            part = part.value
        names = (dotted_text(part) or "").split(".") if part is not None else []
        starts = [".".join(names[: end + 1]) for end in range(1, len(names))]
        if starts and replaced.isdisjoint(starts) and TRAINS_AGAIN.search(code.script.segment(loop)):
            found.update(names[:-1])
    return found


@functools.lru_cache(maxsize=4)
def words_of(code: SourceFile) -> str:
    """Return the names in a file and its strings of one word, in lower case: its code without comments and messages."""
    found: set[str] = set()
    for node in code.tree_nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update([node.value] if len(node.value) < LONGEST_WORD and " " not in node.value else [])
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""  # `peft_pretraining` is not peft
            found.update([module] if module.partition(".")[0] == "peft" or KEEPS_MORE.search(module.lower()) else [])
        else:
            found.update(name for field in NAMED_BY if isinstance(name := getattr(node, field, None), str))
    return "\n".join(sorted(found)).lower()


@functools.lru_cache(maxsize=4)
def ways_without_adapters(code: SourceFile) -> list[Conditions]:
    """Return the conditions under which a model has no adapters, so that its own parameters are trained; empty: never.

    Adapters made under an option leave the modes in which it is off.
    """
    if not TRAINS_OTHERS.search(words_of(code)):
        return [ALWAYS]
    made = [call for call in code.nodes(ast.Call) if ADAPTS.search((dotted_text(call.func) or "").lower())]
    found = [ALWAYS] if made else []
    for call in made:
        for reached in _reached(call, code):
            found = combined(found, _opposites(reached))
    return [] if made and found == [ALWAYS] else found  # too many


def _reached(call: ast.Call, code: SourceFile, depth: int = 0) -> list[Conditions]:
    """Return the conditions of a call, with those of the calls of its function in this file."""
    frame = code.frame(code.function_at(call))
    own, name = conditions_at(frame, call), frame.function.name
    calls = [other for other in code.nodes(ast.Call) if name and last_name(other.func) == name]
    calls = [other for other in calls if code.function_at(other) is not frame.function]
    around = [way for other in calls for way in _reached(other, code, depth + 1)] if depth < DEEPEST_HELPER else []
    return combined(own, around) if around else own


def _opposites(conditions: Conditions) -> list[Conditions]:
    """Return the ways in which not all of these conditions on options hold."""
    options = [(name, limit) for name, limit in conditions.items() if OPTION.match(name)]
    return [
        {name: Limit(limit.without) if limit.among is None else Limit(without=limit.among)} for name, limit in options
    ]
