from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import is_accelerator
from ampwise.check.source.cases import Known, cases_of, conditions_at, joined, switched_on
from ampwise.check.source.half_models import POLICIES
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import (
    FP16_SWITCH,
    NO_AUTOCAST,
    NONE,
    OFF,
    ON,
    UNKNOWN,
    UNSEEN,
    asks_for_both,
    dtype_in,
    modes_of,
)
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.precision import NO_CONTEXT, argument_of, autocast_of, literal_bool
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.tensor_dtypes import KEEPS, TAKES_HALF, TAKES_SINGLE
from ampwise.check.source.torch_names import AUTOCASTS, BF16, DTYPES, FP16, FP32, GRAD_SCALERS, MODEL_NAME, SPELLINGS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.modes import Mode
    from ampwise.check.source.types import (
        AutocastContext,
        CodeSite,
        CodeTrace,
        EventContext,
        Frame,
        SourceEvent,
        SourceFile,
    )

RULE = Rule(
    code="AMP312",
    name="ineffective-autocast",
    severity=Severity.WARNING,
    summary="Autocast has no effect: it is missing, never entered, always disabled, or has no forward inside.",
    why=(
        "Autocast chooses the dtype of operations that run inside it, and the backward follows the forward. If it is "
        "created but not entered, or only wraps the loss, `backward()` or `step()`, no matmul runs in half: losses "
        "run in FP32 under autocast too, so training keeps the speed and memory of FP32."
    ),
    fix="Put the forward and the loss, and nothing else, in a `with torch.autocast(...)` block.",
    bad='loss = loss_fn(model(x), y)\nwith torch.autocast("cuda"):\n    scaler.step(optimizer)',
    good='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\nscaler.step(optimizer)',
)
NEEDS = (("autocast", "MixedPrecision", "GradScaler"), (".backward(", ".step(", "GradScaler", "MixedPrecision"))

# Calls that autocast does not affect.
UNTOUCHED = frozenset(
    (
        *("backward", "step", "update", "unscale_", "zero_grad", "scale", "clip_grad_norm_", "clip_grad_value_"),
        *("parameters", "to", "cuda", "cpu", "detach", "item", "print", "len", "append", "float", "int", "format"),
        *("set_postfix", "set_description", "get_scale", "get_last_lr", "synchronize", "register_hook"),
    )
)
OF_THE_STEP = frozenset(("backward", "step", "update", "unscale_", "zero_grad", "to", "cuda", "register_hook"))
READS_DATA = frozenset(
    ("next", "range", "enumerate", "zip", "isinstance", "squeeze", "unsqueeze", "long", "items", "keys")
)
AROUND_A_HOOK = frozenset(("register_hook",))  # harmless beside another autocast
# Losses by name; one with a network of its own has something to cast, and is left alone.
LOSS = LazyPattern(
    r"loss|crit(?!ic)|cross_ent|objective|(^|_)(bce|ce|l1|l2|mse|mae|nll|ctc|dice|focal|kl\w*)(_|$)", re.I
)
HAS_A_NETWORK = LazyPattern(
    r"percep|vgg|lpips|clip|(^|_)(g|d|gan|adv|disc|id|style|feat\w*)_?loss|compute|forward", re.I
)
PLAIN_CALLS = UNTOUCHED | KEEPS | TAKES_SINGLE | {"long", "size", "sum", "isnan", "any", "all", "keys", "values"}
# Half precision that does not come from autocast, or a model that autocasts by itself.
OTHERWISE = LazyPattern(
    r"\.(half|bfloat16)\(\)|MixedPrecision|deepspeed|accelerat|fp8|fully_shard|apex\b(?<!\wapex)|torch_dtype|set_default_dtype"
)
# Anything that may be in half, or ask a model for it.
HALF = LazyPattern(r"autocast|mixed_?precision|half|(float|fp|bf)_?16|deepspeed|apex|fabric", re.I)
OF_TORCH = LazyPattern(r"^\s*from torch[\w.]* import .*$", re.MULTILINE)
TOLD = LazyPattern(r"(^|_)(fp16|amp|half|autocast|mixed_precision)($|_)")
ASKS = LazyPattern(r"^(use_|enable_|with_|is_)?(amp|autocast|mixed_precision)(_enabled)?$|^use_(fp16|bf16)$")
GENERATOR = LazyPattern(r"[._:](g|gen|generator|net_?g|g_?net)(_?(model|net|ddp))?$|generator$", re.I)
DISCRIMINATOR = LazyPattern(
    r"[._:](d|disc|discriminator|critic|net_?d|d_?net)(_?(model|net|ddp))?$|discriminator$", re.I
)
IN_TIME = LazyPattern(r"epoch|step|iter|warm|batch_?idx|\bi\b|<|>")  # FP32 at the start of training
NO_GPU = LazyPattern(r"cuda|device|gpu", re.I)  # autocast for a GPU would do nothing there
STEPS_BACK = 3  # assignments from the argument of a loss back to the forward
HARMLESS = ast.Expr | ast.Assign | ast.AugAssign | ast.If | ast.For | ast.Pass
# Operators that may divide a loss or test a counter; others compute on tensors.
SMALL = ast.Div | ast.Mod | ast.Add | ast.Mult


def check_source(code: SourceFile) -> Findings:
    found: list[tuple[ast.expr, str]] = []
    for statement in code.nodes(ast.Expr):
        call = statement.value
        is_made = isinstance(call, ast.Call) and code.outline.imports.qualified(call.func) in AUTOCASTS
        if is_made and not isinstance(code.script.parents[statement], ast.Try):  # there it asks what torch supports
            found.append((call, "this autocast is created but never entered: it needs a `with`"))
    cast = [event.frame.function for event in code.events if event.kind == "forward" and event.context.in_autocast]
    for block in code.nodes(ast.With):
        names = _nothing_to_cast(block.body) if len(block.items) == 1 else set()
        if names and not (names <= AROUND_A_HOOK and code.function_at(block) in cast):  # only backward, step and copies
            manager = block.items[0].context_expr
            frame = code.frame(code.function_at(block))
            autocast = autocast_of(manager, frame)
            is_known = autocast is not None and (autocast.known or _is_of_accelerate(manager, frame))
            if is_known and autocast is not None and autocast.may_be_on:
                found.append((manager, "no forward or loss is computed in this autocast region"))
    reported: set[ast.AST] = set()
    found += [
        *_never_used(code),
        *_policies_never_given(code),
        *_on_the_wrong_side(code),
        *_always_disabled(code),
        *_only_the_loss(code),
    ]
    found += [*_beside_autocast(code), *_on_another_device(code), *_generator_outside(code)]
    found += [*_without_autocast(code), *_off_when_scaled(code), *_never_chosen(code)]
    for node, message in found:
        if node not in reported:
            reported.add(node)
            yield RULE.at(code.script.place(node), message)


def _nothing_to_cast(body: list[ast.stmt]) -> set[str]:
    """Return what of the step a block calls, if it calls nothing that autocast may cast."""
    names: set[str] = set()
    parts = [part for statement in body for part in walk(statement)]
    hooks = [part for part in parts if isinstance(part, ast.Call) and method_called(part) == "register_hook"]
    later = {part for hook in hooks for given in hook.args for part in walk(given)}  # run by the backward
    for part in parts:
        if part in later:
            continue
        if isinstance(part, ast.stmt) and not isinstance(part, HARMLESS):
            return set()
        if isinstance(part, ast.Await | ast.Lambda):
            return set()
        if isinstance(part, ast.BinOp) and not isinstance(part.op, SMALL):
            return set()
        if isinstance(part, ast.Call):
            name = method_called(part) or getattr(part.func, "id", "")
            if isinstance(part.func, ast.Name) and name in OF_THE_STEP:
                return set()  # a function of this name: `step(model, x)` may run the model
            closes = name == "step" and any(isinstance(arg, ast.Name) and "clos" in arg.id for arg in part.args)
            makes_a_graph = any(word.arg in ("create_graph", "closure") for word in part.keywords)
            if name not in UNTOUCHED | READS_DATA or closes or makes_a_graph:
                return set()
            names.add(name)
    return names & OF_THE_STEP


def _is_of_accelerate(manager: ast.expr, frame: Frame) -> bool:
    """Whether it is ``accelerator.autocast()``."""
    func = manager.func if isinstance(manager, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr == "autocast" and is_accelerator(func.value, frame)


def _never_used(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield autocasts held in a name, or in an attribute of a trainer, that nothing reads."""
    if OTHERWISE.search(code.script.text):
        return
    read = {node.attr for node in code.nodes(ast.Attribute) if isinstance(node.ctx, ast.Load)}
    names = [node for node in code.nodes(ast.Name) if isinstance(node.ctx, ast.Load)]
    for assignment in code.nodes(ast.Assign):
        arms = [assignment.value]
        if isinstance(assignment.value, ast.IfExp):
            arms = [assignment.value.body, assignment.value.orelse]
        made = [
            arm for arm in arms if isinstance(arm, ast.Call) and code.outline.imports.qualified(arm.func) in AUTOCASTS
        ]
        name = dotted_text(assignment.targets[0]) or ""
        if not made or len(assignment.targets) > 1:
            continue
        function = code.function_at(assignment)
        if name.isidentifier():
            within = [
                node for node in names if node.id == name and function.lines[0] <= node.lineno <= function.lines[1]
            ]
            is_private = function.parent is not None and name not in function.outside
            unread = not within and (is_private or (_trains_itself(code) and not code.project.importers(code.path)))
        else:  # self.context, of a class that trains by itself
            owner = function.owner
            trains = owner is not None and any(".backward(" in method.text for method in owner.methods.values())
            unread = trains and name == f"{function.self_name}.{name.rpartition('.')[2]}"
            unread = unread and name.rpartition(".")[2] not in read and "getattr(" not in code.script.text
        if unread:
            yield made[0], f"this autocast is held in `{name}` and never entered: it needs a `with`"


def _policies_never_given(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield FSDP's policies held in a local name that nothing reads."""
    for assignment in code.nodes(ast.Assign) if "MixedPrecision" in code.script.text else ():
        name, made = dotted_text(assignment.targets[0]) or "", assignment.value
        qualified = (code.outline.imports.qualified(made.func) or "") if isinstance(made, ast.Call) else ""
        is_policy = qualified.startswith("torch.") and qualified.rpartition(".")[2] in POLICIES
        function = code.function_at(assignment)
        is_private = name.isidentifier() and function.parent is not None and name not in function.outside
        if is_policy and is_private and "locals()" not in function.text:
            inside = [part for part in walk(function.node) if isinstance(part, ast.Name) and part.id == name]
            if not any(isinstance(part.ctx, ast.Load) for part in inside):
                yield made, f"this policy is held in `{name}` and never given to FSDP: its dtypes have no effect"


def _trains_itself(code: SourceFile) -> bool:
    """Return whether the file has a whole training step."""
    return any(region.has("backward", "scaled backward") and region.has("forward") for region in code.regions)


def _on_the_wrong_side(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield autocasts that are on only where the option that asks for them is off: ``enabled=not use_amp``."""
    if OTHERWISE.search(code.script.text):
        return
    choices = [(one.test, [one.body], [one.orelse]) for one in code.nodes(ast.IfExp)]
    choices += [
        (one.test, [one.body[0].value], [one.orelse[0].value])
        for one in code.nodes(ast.If)
        if len(one.body) == len(one.orelse) == 1
        and isinstance(one.body[0], ast.Assign)
        and isinstance(one.orelse[0], ast.Assign)
        and ast.unparse(one.body[0].targets[0]) == ast.unparse(one.orelse[0].targets[0])
    ]
    for test, (where_on,), (where_off,) in choices:
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        option = test.operand if is_negated else test  # type: ignore[attr-defined]
        if is_negated:
            where_on, where_off = where_off, where_on
        frame = code.frame(code.function_at(test))
        nothing, autocast = (part.func if isinstance(part, ast.Call) else part for part in (where_on, where_off))
        is_nothing = NO_CONTEXT.search(frame.qualified(nothing) or dotted_text(nothing) or "")
        if _asks_for_autocast(option) and is_nothing and frame.qualified(autocast) in AUTOCASTS:
            yield where_off, f"autocast is entered only where `{ast.unparse(option)}` is off"
    for call in code.nodes(ast.Call):
        enabled = argument_of(call, "enabled")
        option = enabled.operand if isinstance(enabled, ast.UnaryOp) and isinstance(enabled.op, ast.Not) else None
        if option is not None and _asks_for_autocast(option) and code.outline.imports.qualified(call.func) in AUTOCASTS:
            yield call, f"autocast is enabled only where `{ast.unparse(option)}` is off"


def _asks_for_autocast(option: ast.expr) -> bool:
    name = (dotted_text(option) or "").rpartition(".")[2].lower()
    return ASKS.search(name) is not None


def _only_the_loss(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield autocasts around the loss alone, whose forward ran before them, outside of every autocast."""
    if code.uses_framework or OTHERWISE.search(code.script.text) or _autocasts_in_a_forward(code):
        return
    for trace in code.traces:
        events = trace.events()
        trains = any(event.kind in ("backward", "scaled backward") for event in events)
        forwards = {event.node: event.context for event in events if event.kind == "forward"}
        if any(TOLD.search(word.arg or "") for node in forwards for word in getattr(node, "keywords", ())):
            continue  # model(x, use_fp16=True) autocasts by itself
        training = [context for context in forwards.values() if not context.no_grad]
        if not trains or any(context.in_autocast and context.loops for context in training):
            continue
        inside: dict[AutocastContext, list[CodeSite]] = {}
        for site in trace.calls:
            autocast = site.context.autocast
            if autocast is not None and autocast.known and autocast.may_be_on and not site.context.no_grad:
                inside.setdefault(autocast, []).append(site)
        for autocast, sites in inside.items():
            if autocast.frame.outline is code.outline and all(_is_plain(site, trace) for site in sites):
                found = next(((node, site) for site in sites if (node := _forward_before(site, forwards))), None)
                if found is not None:
                    forward, loss = found
                    block: ast.AST = loss.call
                    while not isinstance(block, ast.With | ast.Module):
                        block = code.script.parents[block]
                    entered = block.items[0].context_expr if isinstance(block, ast.With) else autocast.node
                    line = spot(forward, autocast.frame, code.script.place(entered))
                    yield entered, f"the forward, {line}, runs outside of this autocast: only the loss is in it"


def _autocasts_in_a_forward(code: SourceFile) -> bool:
    """Return whether a model of this file autocasts by itself."""
    forwards = [cls.methods["forward"] for cls in code.outline.classes.values() if "forward" in cls.methods]
    return any("autocast" in function.text for function in forwards)


def _is_loss(call: ast.Call) -> bool:
    func = call.func
    while isinstance(func, ast.Subscript):  # criterion["mask"](out, y)
        func = func.value
    name = (dotted_text(func) or "").rpartition(".")[2]
    return bool(LOSS.search(name)) and not HAS_A_NETWORK.search(name)


def _is_plain(site: CodeSite, trace: CodeTrace) -> bool:
    """Return whether a call under autocast is a loss without a model, or one that has no matmul."""
    call, frame = site.call, site.context.frame
    target = frame.callee(call)
    if target is not None and target[0] in trace.followed:
        return True  # its calls are judged one by one
    given = [dotted_text(part) or "" for part in arguments_given(call)]
    runs_a_model = any(part in frame.outline.models or MODEL_NAME.search(part.rpartition(".")[2]) for part in given)
    if frame.call is not None and _is_loss(frame.call) and _is_imported(call.func, frame):
        return not runs_a_model  # a helper of a loss, from another file: masked_mean(ratio, mask)
    if target is not None:
        return False
    if _is_loss(call):
        return not runs_a_model
    name = method_called(call) or getattr(call.func, "id", "")
    is_torch = (frame.qualified(call.func) or "").startswith("torch.") and name.islower()
    return name in PLAIN_CALLS or (is_torch and name not in TAKES_HALF)


def _is_imported(func: ast.expr, frame: Frame) -> bool:
    """Whether it is the name of a function of another file, which is not named like a model."""
    if not isinstance(func, ast.Name) or func.id[:1].isupper() or MODEL_NAME.search(func.id):
        return False
    return frame.function.home_of(func.id) is None and not HAS_A_NETWORK.search(func.id)


def _forward_before(site: CodeSite, forwards: dict[ast.expr, EventContext]) -> ast.expr | None:
    """Return the forward that made an argument of a loss, if every assignment of it is one outside of autocast."""
    if not _is_loss(site.call):
        return None
    loops, function = site.context.loops, site.context.frame.function
    first_line = loops[-1].node.lineno if loops and loops[-1].frame is site.context.frame else 0
    pending = [(part, 0) for part in arguments_given(site.call)]
    seen: set[str] = set()
    found = None
    for expression, depth in pending:  # from the arguments back: logits = out.logits, out = model(x)
        made = [part for part in walk(expression) if part in forwards]
        if any(forwards[part].autocasts or forwards[part].no_grad for part in made):
            return None
        found = max([found, *made] if found else made, key=lambda part: part.lineno, default=None)
        names = {part.id for part in walk(expression) if isinstance(part, ast.Name)} - seen
        for name in names if not made and depth < STEPS_BACK else ():
            seen.add(name)
            for binding in function.bindings.get(name, ()):
                statement = binding.node
                if isinstance(statement, ast.Assign) and first_line <= statement.lineno < site.call.lineno:
                    pending.append((statement.value, depth + 1))
    return found


def _beside_autocast(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield a forward outside of autocast in a mode whose option turns on both the scaler and autocast elsewhere."""
    if code.uses_framework or _autocasts_in_a_forward(code):
        return
    modes = modes_of(code)
    last: dict[SourceEvent, tuple[SourceEvent, str]] = {}  # one for each backward: it is one mistake
    for mode in modes:
        forward, backward = mode.forward, mode.backward
        is_plain = mode.autocast.dtype == NO_AUTOCAST and not forward.context.autocasts and forward is not backward
        if not is_plain or mode.scaler.state not in (ON, UNSEEN) or forward.frame.outline is not code.outline:
            continue
        on = {name for given in conditions_at(backward.frame, backward.node) for name in switched_on(given)}
        for other in modes:
            if other.region is not mode.region or other.autocast.dtype == NO_AUTOCAST or forward.key is None:
                continue
            around = conditions_at(other.forward.frame, other.forward.node)
            shared = on & {name for given in [*around, other.autocast.given] for name in switched_on(given)}
            is_later = backward not in last or forward.line >= last[backward][0].line
            if other.forward.key == forward.key and shared and is_later and _is_another_branch(forward, other.forward):
                last[backward] = forward, min(shared)
    for forward, option in last.values():
        yield forward.node, f"`{option}` has the loss scaled, but this forward is not under autocast, as another is"


def _off_when_scaled(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield autocasts of a step that are on only where its loss is not scaled.

    Such is ``enabled=amp and scaler is None``, and ``enabled=args.bf16`` beside ``GradScaler(enabled=args.fp16)``.
    """
    text = code.script.text.replace("fully_shard", "")  # without a policy it runs in the dtype of the parameters
    text = text.replace("torch_dtype=", "=")  # read below
    if code.uses_framework or OTHERWISE.search(text) or "mp_policy" in text or _autocasts_in_a_forward(code):
        return
    modes: dict[SourceEvent, list[Mode]] = {}
    for mode in modes_of(code):
        fails = any(name.startswith("an exception") for name in switched_on(mode.given))
        if mode.forward.context.autocasts and not fails and not asks_for_both(mode.given):
            modes.setdefault(mode.forward, []).append(mode)
    for forward, own in modes.items():
        scaled = [mode for mode in own if mode.scaler.state == ON]
        in_half = [mode for mode in own if mode.autocast.dtype in (FP16, BF16)]
        # One mode that we cannot tell, or a scaler that is on under autocast, and the code may be right.
        is_certain = all(mode.scaler.state in (ON, OFF, NONE) and mode.autocast.dtype != UNKNOWN for mode in own)
        for_fp16 = all(any(map(FP16_SWITCH.search, switched_on(mode.scaler.given))) for mode in scaled)
        unscaled = (NONE, OFF) if for_fp16 else (NONE,)  # a scaler may be switched off by a wish of its own
        if not (scaled and in_half and is_certain) or any(mode.scaler.state not in unscaled for mode in in_half):
            continue
        autocast = forward.context.autocasts[-1]
        homes = {forward.frame.outline, autocast.entered_in.outline if autocast.entered_in is not None else None}
        if autocast.manager is not None and homes == {code.outline} and not _is_loaded_in_half(scaled, code):
            line = spot(scaled[0].backward.node, scaled[0].backward.frame, code.script.place(autocast.manager))
            yield autocast.manager, f"autocast is off here wherever the loss is scaled, {line}: that mode runs in FP32"


def _is_loaded_in_half(modes: list[Mode], code: SourceFile) -> bool:
    """Whether weights may have another dtype than FP32 in one of these modes, by an argument of ``from_pretrained``."""
    for call in code.nodes(ast.Call):
        asked = argument_of(call, "torch_dtype")
        if asked is None and last_name(call.func) == "from_pretrained":
            asked = argument_of(call, "dtype")
        for case in cases_of(code.frame(code.function_at(call)), asked) if asked is not None else ():
            is_single = isinstance(case.value, Known) and dtype_in(case) in (None, FP32)
            if not is_single and any(joined(case.given, mode.given) is not None for mode in modes):
                return True
    return False


def _generator_outside(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield the forward of a generator outside of the autocast that its discriminator and the losses are in."""
    if code.uses_framework or OTHERWISE.search(code.script.text) or _autocasts_in_a_forward(code):
        return
    for region in code.regions:
        forwards = [event for event in region.events_of("forward") if not event.context.no_grad]
        inside = {event.key for event in forwards if event.context.in_autocast}
        judged = any(DISCRIMINATOR.search(key or "") for key in inside)
        if not judged or not region.has("scaled backward") or region.hidden:
            continue
        for event in forwards:
            outside = event.key is not None and event.key not in inside and not event.context.autocasts
            if outside and GENERATOR.search(event.key or "") and event.frame.outline is code.outline:
                yield event.node, "the generator runs outside of the autocast that its discriminator is in"
                break


def _without_autocast(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield scalers of training steps where neither this file nor one that it imports has anything in half.

    A model that gets the option, by ``args.mixed_precision`` or ``model(x, use_amp=True)``, may autocast by itself.
    """
    asked = (TOLD.search(word.arg or "") for call in code.nodes(ast.Call) for word in call.keywords)
    names = [*code.nodes(ast.Name), *code.nodes(ast.Attribute)]
    is_entered = any(code.outline.imports.qualified(node) in AUTOCASTS for node in names)
    # An import that nothing uses was meant to be used.
    text = code.script.text if is_entered else OF_TORCH.compiled.sub("", code.script.text)
    if code.uses_framework or HALF.search(text) or any(asked):
        return
    if any(HALF.search(code.project.text(path) or "") for path in code.project.taken_by(code.path)):
        return
    stepping = [region for region in code.visible_regions if region.has("scaler step")]
    forwards = [event for region in stepping for event in region.events_of("forward") if not event.context.no_grad]
    if any(event.frame.outline is code.outline for event in forwards):
        for made in scalers_made(code):
            yield made.node, "this scaler scales the loss, but nothing here is under autocast: this trains in FP32"


def _never_chosen(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield tests that compare a dtype with the name of one, as ``dtype == "fp16"``: the choice is never made."""
    for test in code.nodes(ast.Compare):
        other = test.comparators[0]
        is_name = isinstance(other, ast.Constant) and str(other.value).lower() in SPELLINGS
        if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq) or not is_name:
            continue
        held = code.frame(code.function_at(test)).values(test.left)
        dtypes = [value.node is not None and code.outline.imports.qualified(value.node) in DTYPES for value in held]
        if dtypes and all(dtypes):
            name, text = ast.unparse(test.left), ast.unparse(other)
            yield test, f"`{name}` is a torch.dtype and never equals {text}: this precision is never chosen"


def _is_another_branch(forward: SourceEvent, other: SourceEvent) -> bool:
    """Return whether one iteration runs either of two forwards, by a choice that training does not make in time."""
    sides = {guard.text: guard for guard in forward.context.guards}
    apart = [guard for guard in other.context.guards if guard.text in sides and sides[guard.text].holds != guard.holds]
    return bool(apart) and not any(IN_TIME.search(test) or NO_GPU.search(test) for test in map(guard_source, apart))


def _always_disabled(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield training whose forward runs in ``autocast(enabled=False)``, with no other that runs in half."""
    qualified, calls = code.outline.imports.qualified, code.nodes(ast.Call)
    scalers = [call for call in calls if qualified(call.func) in GRAD_SCALERS]
    uses = {node for node in (*code.nodes(ast.Name), *code.nodes(ast.Attribute)) if qualified(node) in AUTOCASTS}
    entered = [call for call in calls if call.func in uses]
    disabled = [call for call in entered if _is_off(call, code)]
    # A file that disables its GradScaler as well means it, and FP8 has an autocast of its own.
    meant = "fp8" in code.script.text.lower() or any(
        literal_bool(argument_of(call, "enabled")) is False for call in scalers
    )
    never_on = bool(uses) and len(disabled) == len(entered) == len(uses)
    for region in code.regions if not meant else ():
        if not region.has("backward", "scaled backward"):
            continue
        contexts = [e.context for e in region.events_of("forward") if not e.context.no_grad]
        innermost = [context.autocast for context in contexts if context.autocast is not None]
        off = [one for one in innermost if one.enabled is False or one.is_surely(FP32)]
        if not off or len(off) < len(contexts):
            continue
        if never_on:
            yield off[0].node, "autocast is always disabled here: this trains in FP32"
        elif all(any(outer.known and outer.may_be_on for outer in context.autocasts[:-1]) for context in contexts):
            yield off[0].node, "this switches the autocast around it off for the whole forward: it runs in FP32"


def _is_off(call: ast.Call, code: SourceFile) -> bool:
    """Whether an autocast is disabled, also by FP32 as its dtype, which torch disables with a warning."""
    dtype = argument_of(call, "dtype")
    is_single = dtype is not None and DTYPES.get(code.outline.imports.qualified(dtype) or "") == FP32
    return is_single or literal_bool(argument_of(call, "enabled")) is False


def _on_another_device(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield autocasts for the CPU around the forward of a step that a CUDA GradScaler takes."""
    for mode in modes_of(code):
        made, autocast = mode.scaler, mode.forward.context.autocast
        if made.state != ON or made.node is None or made.frame is None or autocast is None:
            continue
        if autocast.device == "cpu" and autocast.frame.outline is code.outline and mode.autocast.device == "cpu":
            name = made.frame.qualified(made.node.func) or ""
            device = argument_of(made.node, "device", 0) if GRAD_SCALERS.get(name) is None else None
            is_cuda = GRAD_SCALERS.get(name) == "cuda" or (isinstance(device, ast.Constant) and device.value == "cuda")
            if is_cuda and not any("device" in option or "cuda" in option for option in mode.given):
                yield autocast.node, "this autocast is for the CPU, but the GradScaler of this step is for CUDA"
