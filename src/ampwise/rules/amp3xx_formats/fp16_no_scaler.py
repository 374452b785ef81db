from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import FP16_BY_NAME
from ampwise.check.source.cases import Limit, choices_of, conditions_at, denies, joined
from ampwise.check.source.defaults import last_word
from ampwise.check.source.events import EventKind
from ampwise.check.source.half_models import (
    half_by_default,
    half_models_held,
    half_models_run,
    half_optimizers,
    sharded_in,
)
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.lightning import hand_cast_modules
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import FP16_SWITCH, NONE, OFF, autocasts_in, modes_of
from ampwise.check.source.names import arguments_given, last_name, method_called
from ampwise.check.source.scaled_losses import may_be_scaled
from ampwise.check.source.sharding import sharded_models, sharding_policies
from ampwise.check.source.torch_names import BF16, FP16, NOT_A_GRAD_SCALER, SCALER, SPELLINGS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.cases import Conditions
    from ampwise.check.source.modes import Mode
    from ampwise.check.source.types import Frame, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP301",
    name="fp16-no-scaler",
    severity=Severity.ERROR,
    summary="FP16 is trained with a plain `backward()` and without a GradScaler.",
    why=(
        "FP16 cannot represent magnitudes below 6e-8. Activation gradients are often smaller, so without loss scaling "
        "they become zero, and the layers below them stop learning while the loss still looks reasonable."
    ),
    fix="Scale the loss with `torch.amp.GradScaler`, or use `dtype=torch.bfloat16` if the GPU supports it.",
    bad=(
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "loss.backward()\noptimizer.step()"
    ),
    good=(
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    ),
)
NEEDS = (
    ("autocast", ".half(", "float16", "torch.half", "HalfTensor", "fp16", "fpSixteen", "_half("),
    (".backward(", "LightningModule"),
)

ABOUT_DTYPE = LazyPattern(r"dtype|precision|float|bf16", re.IGNORECASE)
HAS_BF16 = LazyPattern(r"bf16_supported\(|capability")
ABOUT_GPU = LazyPattern(r"bf16_supported\(|capability|is_available\(|device")


def check_source(code: SourceFile) -> Findings:
    if code.uses_framework:
        yield from _cast_by_hand(code)
        return
    reported: set[ast.AST] = set()
    for mode in modes_of(code):
        scaler = mode.scaler
        # `autocast()` is FP16 whatever the option says by which the scaler is disabled; so is a fall-back of the GPU's.
        by_gpu = _is_fallback(mode.autocast.given)
        is_fixed = scaler.state == OFF and (by_gpu or not any(map(ABOUT_DTYPE.search, mode.autocast.given)))
        asked = mode.autocast.given if is_fixed else mode.given
        if mode.autocast.dtype != FP16 or mode.autocast.device == "cpu" or denies(asked, FP16):
            continue
        if scaler.state == OFF and scaler.node is not None and scaler.frame is not None:
            # What switches the scaler off must be what makes autocast FP16; another option is the user's choice.
            others = scaler.given.keys() - mode.autocast.given.keys()
            apart = [name for name in others if not (is_fixed and _is_about_dtype(name, by_gpu))]
            if not apart and scaler.node not in reported and scaler.frame.outline is code.outline:
                reported.add(scaler.node)
                place = code.script.place(scaler.node)
                line = spot(mode.autocast.node, mode.autocast.frame, place)
                yield RULE.at(place, f"autocast may be FP16 (in {line}), but this scaler is disabled then")
        elif scaler.state == NONE and mode.backward.kind == EventKind.BACKWARD and _is_alone(mode, code):
            backward = mode.backward
            if backward.node not in reported and backward.frame.outline is code.outline:
                reported.add(backward.node)
                where = f"the forward in {mode.forward.spot(backward)}"
                if mode.forward is backward:  # the autocast is around both
                    around = spot(mode.autocast.node, mode.autocast.frame, backward.place)
                    where = f"the forward, in the autocast of {around},"
                how = "may run" if mode.autocast.given else "runs"
                message = f"{where} {how} in FP16, but no scaler keeps its gradients from underflowing"
                yield RULE.at(backward.place, message)

    yield from _half_weights(code, reported)
    yield from _weights_as_loaded(code, reported)


def _cast_by_hand(code: SourceFile) -> Findings:
    """Yield the losses of Lightning modules that are computed in FP16 by an autocast of their own, and never scaled."""
    text = code.script.text
    if "Lightning" not in text or "autocast" not in text or "caler" in text:
        return
    for module in hand_cast_modules(code):
        ways = [one for site in module.in_autocast for one in autocasts_in(site.context)]
        if any(one.dtype == FP16 and one.device != "cpu" for one in ways):
            calls = [site.call for site in module.training.calls if method_called(site.call) == "manual_backward"]
            where: ast.expr = calls[0] if calls else module.in_autocast[0].context.autocasts[0].node
            message = "autocast may be FP16 here, but Lightning scales no loss unless its Trainer gets a `precision`"
            yield RULE.at(
                code.script.place(where),
                message,
                fix="Give the Trainer `precision='16-mixed'` and leave autocast to it.",
            )


def _half_weights(code: SourceFile, reported: set[ast.AST]) -> Findings:
    """Yield plain backwards of models whose weights are FP16: cast, made so by default, or sharded so by FSDP."""
    everywhere: list[tuple[ast.expr, Conditions, Frame]]
    everywhere = [(one.node, one.given, one.site.context.frame) for one in half_by_default(code) if one.dtype == FP16]
    named = [*code.nodes(ast.Attribute), *code.nodes(ast.Name)]
    if not any("caler" in last_name(name) for name in named):
        everywhere += [*sharded_in(code, FP16), *_bases_of_adapters(code)]
    pairs = half_optimizers(code, FP16)
    for region in code.visible_regions:
        steps = region.events_of(EventKind.OPTIMIZER_STEP)
        own = [pair for pair in pairs if any(pair.is_applied_by(step) for step in steps)]
        models = [*[pair.model for pair in own], *half_models_run(region, code, FP16)]
        run = {sharded_models(code).get(event.key or "") for event in region.events_of(EventKind.FORWARD)}
        own_policies = {None if policy is None else policy.call for policy in run}
        others = set() if None in run or not run else {each.call for each in sharding_policies(code)} - own_policies
        casts = [each for each in everywhere if each[0] not in others]
        casts += [(model.node, model.given, model.context.frame) for model in models]
        for backward in _stepped(region) if casts else ():
            if backward.node in reported or backward.frame.outline is not code.outline or may_be_scaled(backward):
                continue
            ways = conditions_at(backward.frame, backward.node)
            for node, given, frame in casts:
                together = [both for way in ways if (both := joined(way, given)) is not None]
                if together and not any("scal" in name.lower() for both in together for name in both):
                    reported.add(backward.node)
                    line = spot(node, frame, backward.place)
                    yield RULE.at(backward.place, f"the weights are FP16 since {line}, and this loss is not scaled")
                    break


def _stepped(region: Region) -> list[SourceEvent]:
    """Return the plain backwards that an optimizer's step follows on some path."""
    visits = region.visits(EventKind.BACKWARD) if region.has(EventKind.OPTIMIZER_STEP) else []
    return [event for event, moments in visits if any(any(one.later(EventKind.OPTIMIZER_STEP)) for one in moments)]


def _weights_as_loaded(code: SourceFile, reported: set[ast.AST]) -> Findings:
    """Yield plain backwards in the mode "fp16" of an option, if each other mode converts the model to FP32.

    Such is ``if prec in ("fp32", "amp"): model.float()``, of a model whose file is FP16.
    """
    text = code.script.text
    converted: list[tuple[ast.Call, str, Frame]] = []
    for call in code.nodes(ast.Call) if ".float()" in text and FP16_BY_NAME.search(text) else ():
        if method_called(call) != "float" or call.args or not isinstance(code.script.parents[call], ast.Expr):
            continue
        frame = code.frame(code.function_at(call))
        ways = conditions_at(frame, call)
        options = {name for way in ways for name in way}
        others = frozenset(value for way in ways for limit in way.values() for value in limit.among or ())
        if len(options) == 1 and all(way and all(limit.among for limit in way.values()) for way in ways):
            option = last_word(options.pop())
            values = choices_of(code.outline).get(option, frozenset()) | _values_named(option, code)
            if "fp16" in values - others and others <= values:
                converted.append((call, option, frame))
    for backward in [each for region in code.visible_regions for each in _stepped(region)] if converted else ():
        if backward.node in reported or backward.frame.outline is not code.outline or may_be_scaled(backward):
            continue
        ways = conditions_at(backward.frame, backward.node)
        asked = [(last_word(name), limit) for way in ways for name, limit in way.items()]
        admitting = {option for option, limit in asked if limit.both(Limit(frozenset(["fp16"]))) is not None}
        for call, option, frame in converted:
            if option in admitting and backward.node not in reported:
                reported.add(backward.node)
                unless = f"where {spot(call, frame, backward.place)} does not convert them"
                yield RULE.at(backward.place, f"the weights stay FP16 {unless}, and this loss is not scaled")


def _values_named(option: str, code: SourceFile) -> frozenset[str]:
    """Return the strings that a file compares an option with: ``assert cfg.PREC in ["fp16", "fp32", "amp"]``."""
    compared = [each for each in code.nodes(ast.Compare) if last_name(each.left) == option]
    return frozenset(
        part.value
        for each in compared
        for other in each.comparators
        for part in walk(other)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def _bases_of_adapters(code: SourceFile) -> Iterator[tuple[ast.expr, Conditions, Frame]]:
    """Yield the FP16 casts of models under adapters: those are FP32, but their gradients pass through the base."""
    for call in code.nodes(ast.Call) if "get_peft_model" in code.script.text else ():
        if last_name(call.func) == "get_peft_model" and call.args:
            for model in half_models_held(call.args[0], code.frame(code.function_at(call)), code):
                if model.dtype == FP16:
                    yield model.node, model.given, model.context.frame


def _is_alone(mode: Mode, code: SourceFile) -> bool:
    """Whether nothing visible may scale a plain backward that an optimizer step follows."""
    region, backward = mode.region, mode.backward
    if region.hidden or not region.has(EventKind.OPTIMIZER_STEP) or may_be_scaled(backward):
        return False
    if any("scal" in name.lower() and "(" not in name for name in mode.given):
        return False  # it depends on a scaler that is made elsewhere, or that the user does not want
    # Another file that the step goes through may have a scaler, or a framework that scales.
    others = {event.frame.outline.path for event in region.events} - {code.path}
    if any(_may_scale(code.project.code(path)) for path in sorted(others)):
        return False
    # Where a scaled backward stands beside it, what decides between them must be what decides the autocast.
    scaled = region.events_of(EventKind.SCALED_BACKWARD)
    if not scaled:
        return not any(_gets_a_scaler(event) for event in region.events_of(EventKind.OPAQUE))
    deciding = {name for event in scaled for given in conditions_at(event.frame, event.node) for name in given}
    plain = {name for given in conditions_at(backward.frame, backward.node) for name in given}
    by_gpu = _is_fallback(mode.autocast.given)
    return all(by_gpu and _is_about_dtype(name, by_gpu) for name in (deciding & plain) - mode.autocast.given.keys())


def _is_fallback(given: Conditions) -> bool:
    """Whether autocast is FP16 because the GPU has no BF16, and not because an option asks for FP16."""
    missing = any(HAS_BF16.search(name) and limit.among is not None for name, limit in given.items())
    asked = [(name, limit) for name, limit in given.items() if ABOUT_DTYPE.search(name) and not ABOUT_GPU.search(name)]
    return missing and all(
        "bf16" in name.lower()
        if limit.among is None
        else {SPELLINGS.get(str(one).lower()) for one in limit.among} == {BF16}
        for name, limit in asked
    )


def _is_about_dtype(option: str, by_gpu: bool) -> bool:
    """Whether an option chooses a dtype; beside a dtype that the GPU decides, ``use_fp16`` is one too."""
    return bool(ABOUT_DTYPE.search(option) or (by_gpu and FP16_SWITCH.search(option)))


def _gets_a_scaler(event: SourceEvent) -> bool:
    arguments = arguments_given(event.node) if isinstance(event.node, ast.Call) else []
    return any(event.frame.role(part) == SCALER for part in arguments)


@functools.lru_cache(maxsize=64)  # called for every training step, for its own file and others
def _may_scale(code: SourceFile) -> bool:
    """Return whether a file uses a framework, or anything in it is called a scaler, other than feature scalers."""
    if code.uses_framework or any("scaler" in node.arg.lower() for node in code.nodes(ast.arg)):
        return True
    named: list[tuple[ast.expr, str]] = [(node, node.id) for node in code.nodes(ast.Name)]
    named += [(node, node.attr) for node in code.nodes(ast.Attribute)]
    for node, name in named:
        if "scaler" in name.lower():
            frame = code.frame(code.function_at(node))
            if frame.role(node) is not None and not NOT_A_GRAD_SCALER.search(frame.qualified(node) or ""):
                return True
    return False


def check_event(step: OptimizerStep) -> Findings:
    alone = not step.scaled and not step.again and step.scaled_by_constant is None and step.backward is not None
    if alone and "fp16" in step.parameters:
        yield RULE.at(
            (step.backward or step.site).place,
            "the parameters are FP16 and this loss is not scaled: gradients below 6e-8 are zero at the "
            f"`{step.optimizer}.step` of {step.site.short}",
            fix="Keep the parameters in FP32, run the model under FP16 autocast, and scale the loss with a GradScaler.",
        )
    elif alone and "fp16" in step.precisions:
        beside = " by the GradScaler" if step.scaler else ""
        yield RULE.at(
            (step.backward or step.site).place,
            f"the model ran in FP16, but this loss is not scaled{beside}: gradients may underflow before the "
            f"`{step.optimizer}.step` of {step.site.short}",
        )
