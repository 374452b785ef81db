"""Recognise calls that are events: a backward, an unscale, a step, a clip, a read of the gradients."""
# ruff: noqa: SIM905 (long lists of names are read as text)

from __future__ import annotations

import ast
import functools
import re
from dataclasses import replace

from ampwise.check.source.accelerators import ITS_SCALER, accelerates_in_fp16, is_accelerator
from ampwise.check.source.events import Branch, BranchGuard, EventBlock, EventContext, EventKind, Node, SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.guards import guards_of
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, code_of, dotted_text, last_name, method_called
from ampwise.check.source.outline import ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.relevance import has_any
from ampwise.check.source.torch_names import CLIPS, MODEL_NAME, OPTIMIZER, SCALER, SCHEDULER, role_of_name
from ampwise.check.source.tree_walk import walk

TENSOR_NAME = LazyPattern(  # student_logits.view(...), init_model(config)
    r"(logits?|outputs?|outs?|loss|losses|feats?|features|preds?|probs?|embeds?|embeddings?|masks?|labels?|scores?|"
    r"params?|parameters|config|cfg|args|name|path|dir|dict|state|weights?|inputs?|info|summary)$|"
    r"_(save|load|export|update|collect|init|setup)$|"
    r"^(init|build|make|create|get|load|setup|prepare|save|compile|wrap|unwrap|register)_",
    re.IGNORECASE,
)
ANYTHING = "*"  # the key of an event that may concern every scaler and optimizer

# Objects whose backward(loss), step() and clip handle loss scaling themselves.
FRAMEWORK_NAME = LazyPattern(r"(^|_)(accelerator|fabric|engine|ds_engine|model_engine|strategy|plugin|booster)$")
CLIP_NAME = LazyPattern(r"^((adaptive_)?clip_grad\w*|dispatch_clip_grad|adaptive_gradient_clip\w*)$")
# A class with such a name that we cannot see: backward(loss) scales, step(optimizer) unscales, may skip and updates.
MANAGER_CLASS = LazyPattern(r"\b(MixedPrecision|Amp|AMP)\w*(Manager|Trainer|Handler|Helper|Wrapper)\b")
RUNS_MODEL = LazyPattern(r"(^|_)forward(_|$)|^(run|call|apply)_(model|net)$")  # forward_step(model, batch), not seen
HELD_SCALER = LazyPattern(r"([\w.]+)\.scaler\.unscale_\(")  # accel.scaler.unscale_(optimizer)
# Functions that measure gradients, by name: log_gradient_stats(model), plot_grad_flow(model.named_parameters())
MEASURE_NAME = LazyPattern(
    r"(^|_)grad(ient)?s?_?(norm|stat|flow|hist|magnitude)|(^|_)(log|plot|monitor|record|track)_grad|norm_of_grad"
)
PREPARES = LazyPattern(
    r"^(create|make|build|prepare|init|load|save|reset|log|print|register|add|configure|set)_|"
    r"^(get|update|copy|sync|export)_(\w+_)?(weights?|params|parameters|state|state_dict|config|lr)$"
)
UNWRAPS = LazyPattern(r"(^|_)(get|unwrap|unwrapped)_?(model|net|module)$|^(unwrap|de_parallel)\w*$")
MULTIPLIED_BY_SCALE = LazyPattern(r"get_scale\(|loss_scale|\b_?(inv_)?scale\b|scaler", re.IGNORECASE)
CLIPPING_FACTOR = LazyPattern(r"clip|coef|max_norm|norm")
SCALING_FACTOR = LazyPattern(r"scale", re.IGNORECASE)
READS = frozenset(
    "norm abs mean std var max min sum pow square item histogram histc flatten view cpu numpy tolist".split()
)
RECORDS = frozenset(("add_histogram", "Histogram"))
NORMS = ("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm", "torch.nn.utils.get_total_norm")
# Functions that may take a scaler or an optimizer and do not affect the step.
HARMLESS = frozenset(
    "isinstance len print id hasattr getattr setattr type str repr bool list tuple dict set enumerate zip range iter "
    "save state_dict load_state_dict append add format info debug warning log vars items issubclass watch".split()
)
# adjust_learning_rate(optimizer, epoch), get_lr(optimizer): they touch no gradient.
SETS_LR = LazyPattern(r"^_?(adjust|set|get|update|decay)_(lr|learning_rate)s?(_|$)")
# What a scaler takes that runs the whole step when it is called, besides the loss and the optimizer.
TAKEN_BY_SCALER = frozenset(("parameters", "clip_grad", "create_graph", "update_grad", "need_update"))
# Names of lists of gradients.
GRADIENTS = ("grads", "gradients", "device_grads", "all_grads")
IN_PLACE = ("clamp_", "clip_", "mul_", "div_", "_foreach_mul_", "_foreach_div_", "_foreach_clamp_max_")

# Methods of nn.Module, DDP, pretrained models and tensors that are not a forward; ``model.module`` is the model itself.
MODULE_METHODS = frozenset(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float get_parameter "
    "get_submodule half load_state_dict modules named_buffers named_children named_modules named_parameters parameters "
    "register_buffer register_forward_hook register_module register_parameter requires_grad_ share_memory state_dict "
    "to to_empty train type xpu zero_grad no_sync join save_pretrained from_pretrained push_to_hub "
    "resize_token_embeddings gradient_checkpointing_enable set_grad_checkpointing load save load_weights save_weights "
    "init_weights freeze unfreeze set_input setup update_learning_rate print_networks save_networks load_networks step "
    "backward update append join_thread get info log summary items keys values format split replace device set "
    "clip_grad_norm_ module batch_size astype argmax clone contiguous detach dim expand flatten item max mean min "
    "numel numpy permute repeat reshape size squeeze sum tolist transpose unsqueeze view".split()
)

Recognised = tuple[list[Node], bool]  # the events of a call, and whether to follow it into its function


class EventRecogniser:
    """Turn calls into events, and track which names hold a scaled loss."""

    def __init__(self) -> None:
        # loss = scaler.scale(loss): the loss's key -> the scaler's, and the guards it was assigned under
        self.scaled: dict[str, tuple[str, tuple[BranchGuard, ...]]] = {}

    def call(self, node: ast.Call, context: EventContext) -> Recognised:
        """Return the events of a call, and whether to follow it into its function."""
        name = _name_of(node.func, context.frame)
        special = _SPECIAL.get(name)
        found = special(self, node, context) if special is not None else None
        if found is not None:
            return found
        if "clip" in name and CLIP_NAME.match(name):
            return _clip(node, name, context)
        if self._measures_gradients(node, name, context.frame):
            return [SourceEvent(EventKind.GRAD_READ, node, context)], False
        # A call of a model, or of a method that its author defined, is a forward.
        func = node.func
        models = [func]
        if isinstance(func, ast.Attribute) and func.attr not in MODULE_METHODS and not PREPARES.search(func.attr):
            models = [_inside(func.value), func]
        for model in models if node.args or node.keywords else ():
            if is_model(model, context.frame, is_called=model is func):
                return [SourceEvent(EventKind.FORWARD, node, context, key=context.frame.key(model))], True
        return [], True

    def _measures_gradients(self, node: ast.Call, name: str, frame: Frame) -> bool:
        """Whether a call computes or records something of gradients."""
        if "norm" in name and node.args and frame.qualified(node.func) in NORMS:
            return any(_is_gradient(part) for part in walk(node.args[0])) or _is_from_list(node.args[0], frame)
        if name in RECORDS:
            return any(map(_is_gradient, node.args))
        if "grad" in name and node.args and MEASURE_NAME.search(name) and frame.callee(node) is None:
            # A function we cannot see, given the model or its parameters and nothing to divide by.
            is_divided = any(MULTIPLIED_BY_SCALE.search(code_of(part)) for part in arguments_given(node))
            return not is_divided and any(_is_model_or_its_parameters(part, frame) for part in node.args)
        if name not in READS or not isinstance(node.func, ast.Attribute):
            return False
        return _is_gradient(node.func.value) or _is_from_list(node.func.value, frame)

    def unknown(self, node: ast.Call, context: EventContext) -> list[Node]:
        """Return the event of a call that cannot be followed; there is one if it gets a scaler or an optimizer."""
        frame = context.frame
        if _name_of(node.func, frame) in HARMLESS or SETS_LR.search(_name_of(node.func, frame)):
            return []
        step = _step_of_called_scaler(node, context)
        if step:
            return step
        keys: list[str] = []
        roles = set()
        for argument in arguments_given(node):
            role = frame.role(argument) if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript) else None
            if role in (SCALER, OPTIMIZER):
                roles.add(role)
                key = frame.key(argument)
                keys += [key] if key is not None else []
        if not keys:
            models = [part for part in node.args if is_model(part, frame, is_called=False)]
            if models and RUNS_MODEL.search(_name_of(node.func, frame)):
                return [SourceEvent(EventKind.FORWARD, node, context, key=frame.key(models[0]))]
            return []
        if roles == {OPTIMIZER} and frame.role_of_call(node) is not None:
            return []  # it makes a scheduler, or wraps the optimizer
        return [SourceEvent(EventKind.OPAQUE, node, context, key=keys[0], keys=tuple(keys))]

    def statement(self, node: ast.stmt, context: EventContext) -> list[Node]:
        """Return the events of an assignment: ``loss = scaler.scale(loss)``, ``p.grad = None``, ``p.grad /= scale``."""
        if isinstance(node, ast.Assign):
            inner = node.value  # only simple forms are checked, since this runs for every assignment
            while isinstance(inner, ast.BinOp | ast.IfExp):
                inner = inner.left if isinstance(inner, ast.BinOp) else inner.body
            for target in node.targets:
                if self.scaled or method_called(inner) == "scale":
                    self._remember_scaled(target, node.value, context)
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    if isinstance(node.value, ast.Constant) and node.value.value is None:
                        return [SourceEvent(EventKind.ZERO_GRAD, target, context)]
                    if isinstance(node.value, ast.Call) and _name_of(node.value.func, context.frame) in (
                        "clamp",
                        "clip",
                    ):
                        return [SourceEvent(EventKind.CLIP, node.value, context)]  # p.grad = p.grad.clamp(-1, 1)
                    return _scaled_in_place(target, node.value, context)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult) and _is_gradient(node.target):
            return _scaled_in_place(node.target, node.value, context)
        return []

    def _remember_scaled(self, target: ast.expr, value: ast.expr, context: EventContext) -> None:
        frame = context.frame
        key = frame.key(target) if isinstance(target, ast.Name | ast.Attribute) else None
        if key is None:
            return
        scaler = _scaled_by(value, frame)
        if scaler is not None:
            self.scaled[key] = (scaler, context.guards)
            return
        names = [part for part in walk(value) if isinstance(part, ast.Name | ast.Attribute)]
        if not any(frame.key(name) == key for name in names):  # loss = loss / n keeps its scale
            self.scaled.pop(key, None)

    # -- the special names --------------------------------------------------------------------------------

    def backward(self, node: ast.Call, context: EventContext) -> Recognised | None:
        func, frame = node.func, context.frame
        if frame.qualified(func) == "torch.autograd.backward":
            return (self._backward(node, node.args[0], context), False) if node.args else None
        if not isinstance(func, ast.Attribute) or frame.callee(node) is not None:
            return None
        if isinstance(frame.outline.script.parents.get(node), ast.withitem):
            return None  # with contexts.backward(): the context for one
        if manages_scaling(func.value, frame) and node.args:
            key = frame.key(func.value)
            scaled = SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=key, value=node.args[0])
            return [scaled, SourceEvent(EventKind.OPAQUE, node, context, key=key, keys=(key or "",))], False
        held = _scaler_held(func.value, frame)
        if held is not None and node.args:
            return [SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=held, value=node.args[0])], False
        if is_accelerator(func.value, frame) and node.args and accelerates_in_fp16(frame):
            return [SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=ITS_SCALER, value=node.args[0])], False
        owner = last_name(func.value)
        handles_scaling = owner in ("self", "model", "optimizer", "amp") or FRAMEWORK_NAME.search(owner)
        if handles_scaling and node.args and _scaled_by(node.args[0], frame) is not None:
            return self._backward(node, node.args[0], context), False  # fabric.backward(scaler.scale(loss))
        if handles_scaling or frame.role(func.value) is not None:  # engine.backward(loss), optimizer.backward(loss)
            return _hidden(node, context), False
        return self._backward(node, func.value, context), False

    def _backward(self, node: ast.Call, loss: ast.expr, context: EventContext) -> list[Node]:
        if isinstance(loss, ast.IfExp):  # (scaler.scale(loss) if scaler else loss).backward()
            holds, fails = guards_of(loss.test, context.frame)
            then = EventBlock(self._backward(node, loss.body, context))
            return [Branch(holds, fails, then, EventBlock(self._backward(node, loss.orelse, context)))]
        if isinstance(loss, ast.List | ast.Tuple) and loss.elts:
            loss = loss.elts[0]
        scaler = _scaled_by(loss, context.frame)
        if scaler is not None:
            value = next((part.args[0] if part.args else None for part in _calls_of_scale(loss)), None)
            return [SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=scaler, value=value)]
        key = context.frame.key(loss)
        plain = SourceEvent(EventKind.BACKWARD, node, context, value=loss)
        if key not in self.scaled:
            return [plain]
        scaler, guards = self.scaled[key]
        event = SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=scaler, value=loss)
        beyond = tuple([guard for guard in guards if guard not in context.guards])
        if not beyond:
            return [event]
        opposite = tuple([BranchGuard(guard.text, not guard.holds, guard.boundary) for guard in beyond])
        return [Branch(beyond, opposite if len(beyond) == 1 else (), EventBlock([event]), EventBlock([plain]))]

    def step(self, node: ast.Call, context: EventContext) -> Recognised | None:
        if not isinstance(node.func, ast.Attribute):
            return None
        frame, receiver = context.frame, node.func.value
        if manages_scaling(receiver, frame):
            optimizers = [part for part in arguments_given(node) if frame.role(part) == OPTIMIZER]
            if not optimizers:
                return None
            applied = frame.key(optimizers[0])
            step = SourceEvent(EventKind.SCALER_STEP, node, context, key=frame.key(receiver), other=applied)
            update = SourceEvent(EventKind.UPDATE, node, context, key=frame.key(receiver))
            return [step, update, SourceEvent(EventKind.ZERO_GRAD, node, context)], False
        if node.func.attr != "step":
            return None
        held = _scaler_held(receiver, frame)
        if held is not None and node.args and frame.role(node.args[0]) == OPTIMIZER:
            applied = frame.key(node.args[0])
            return [SourceEvent(EventKind.SCALER_STEP, node, context, key=held, other=applied)], False
        role = frame.role(receiver)
        if isinstance(receiver, ast.Call) and role_of_name(last_name(receiver.func)) == SCHEDULER:
            role = SCHEDULER  # optimizer.scheduler().step()
        if role == SCHEDULER:
            return [SourceEvent(EventKind.SCHEDULER_STEP, node, context, key=frame.key(receiver))], False
        if role == SCALER and _steps_as_torch_does(node, frame):
            return _of_scaler(EventKind.SCALER_STEP, node, context), False
        target = frame.callee(node)
        if role is None or (target is not None and not (role == OPTIMIZER and _applies_gradients(target[0]))):
            return None  # another kind of object, or a class whose code can be followed
        if role == SCALER:
            return _of_scaler(EventKind.SCALER_STEP, node, context), False
        if any(word.arg in ("scaler", "grad_scaler") for word in node.keywords):
            return _hidden(node, context), False
        if accelerates_in_fp16(frame):
            applied = frame.key(receiver)
            step = SourceEvent(EventKind.SCALER_STEP, node, context, key=ITS_SCALER, other=applied)
            return [step, SourceEvent(EventKind.UPDATE, node, context, key=ITS_SCALER)], False
        event = SourceEvent(EventKind.OPTIMIZER_STEP, node, context, key=frame.key(receiver))
        return [event], bool(node.args or node.keywords)

    def update(self, node: ast.Call, context: EventContext) -> Recognised | None:
        if not isinstance(node.func, ast.Attribute):
            return None
        held = _scaler_held(node.func.value, context.frame) if not node.args else None
        if held is not None:
            return [SourceEvent(EventKind.UPDATE, node, context, key=held)], False
        return self._method(EventKind.UPDATE, node, context) if context.frame.role(node.func.value) == SCALER else None

    def unscale(self, node: ast.Call, context: EventContext) -> Recognised | None:
        if not isinstance(node.func, ast.Attribute) or context.frame.callee(node) is not None:
            return None
        return _of_scaler(EventKind.UNSCALE, node, context), False

    def zero_grad(self, node: ast.Call, context: EventContext) -> Recognised | None:
        return self._method(EventKind.ZERO_GRAD, node, context)

    def _method(self, kind: str, node: ast.Call, context: EventContext) -> Recognised | None:
        if not isinstance(node.func, ast.Attribute) or context.frame.callee(node) is not None:
            return None
        return [SourceEvent(kind, node, context, key=context.frame.key(node.func.value))], False

    def in_place(self, node: ast.Call, context: EventContext) -> Recognised | None:
        """Recognise ``p.grad.clamp_(-1, 1)``, ``p.grad.mul_(coef)`` and ``torch._foreach_mul_(grads, coef)``."""
        name = _name_of(node.func, context.frame)
        touched: list[ast.expr] = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if name == "clip_" and touched and context.frame.role(touched[0]) == SCALER:
            return [], False  # ampwise's GradScaler.clip_ clips during the step; gradients stay scaled until then
        touched += node.args
        if not any(_is_gradient(part) or (isinstance(part, ast.Name) and part.id in GRADIENTS) for part in touched):
            return None
        if "clamp" in name:
            return [SourceEvent(EventKind.CLIP, node, context)], False
        return _scaled_in_place(node, node.args[-1] if node.args else node, context), False

    def handled_elsewhere(self, node: ast.Call, context: EventContext) -> Recognised:
        return _hidden(node, context), True


_SPECIAL = {
    "backward": EventRecogniser.backward,
    **dict.fromkeys(("step", "optimize"), EventRecogniser.step),
    "update": EventRecogniser.update,
    "unscale_": EventRecogniser.unscale,
    "zero_grad": EventRecogniser.zero_grad,
    **dict.fromkeys(("manual_backward", "unscale_gradients"), EventRecogniser.handled_elsewhere),
    "scale_loss": EventRecogniser.handled_elsewhere,
    **dict.fromkeys(IN_PLACE, EventRecogniser.in_place),
}


def _applies_gradients(step: FunctionOutline) -> bool:
    """Whether a method is the whole update of an optimizer written by hand, not one around the step of another."""
    return ".grad" in step.text and not has_any(step.text.lower(), (".step(", ".backward(", "scal"))


def _step_of_called_scaler(node: ast.Call, context: EventContext) -> list[Node]:
    """Return the events of ``loss_scaler(loss, optimizer, parameters=..., update_grad=last)``, as timm has it.

    The call scales the loss, runs the backward, and where ``update_grad`` holds it clips, steps and updates.
    """
    given = {word.arg: word.value for word in node.keywords}
    loss, optimizer = [*node.args[:2], given.get("optimizer")][:2] if node.args else (None, None)
    frame = context.frame
    is_scaler = isinstance(node.func, ast.Name | ast.Attribute) and frame.role(node.func) == SCALER
    if not is_scaler or optimizer is None or TAKEN_BY_SCALER.isdisjoint(given) or frame.role(optimizer) != OPTIMIZER:
        return []
    key = frame.key(node.func)
    backward = SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=key, value=loss)
    last = next((given[name] for name in ("update_grad", "need_update") if name in given), None)
    holds, fails = guards_of(last, frame) if last is not None else ((), ())
    inside = replace(context, guards=context.guards + holds)
    applied = frame.key(optimizer)
    step = SourceEvent(EventKind.SCALER_STEP, node, inside, key=key, other=applied, value=optimizer)
    update = SourceEvent(EventKind.UPDATE, node, inside, key=key)
    if last is None:
        return [backward, step, update]
    return [backward, Branch(holds, fails, EventBlock([step, update]), EventBlock())]


def _steps_as_torch_does(node: ast.Call, frame: Frame) -> bool:
    """Whether a class derived from GradScaler steps as that does, or by its part that may skip, and has its update."""
    target = frame.callee(node)
    if target is None or target[1] is None:
        return False
    updates = any(name.startswith("update") for cls in frame.ancestry(target[1]) for name in cls.methods)
    return not updates and any(word in target[0].text for word in ("super().step(", "._maybe_opt_step("))


def manages_scaling(node: ast.expr, frame: Frame) -> bool:
    """Whether an object does the scaled backward and the step for a script: ``amp`` in ``amp.step(optimizer)``."""
    if not isinstance(node, ast.Name | ast.Attribute) or not _names_manager(frame.outline):
        return False
    calls = [(value, home) for value, home in frame.values(node) if isinstance(value, ast.Call)]
    return any(MANAGER_CLASS.search(last_name(one.func)) and home.definition(one.func) is None for one, home in calls)


def _scaler_held(node: ast.expr, frame: Frame) -> str | None:
    """Return the key of ``accel.scaler`` for an ``accel`` whose class we cannot see, if it has a scaler to unscale by.

    Its ``accel.backward(loss)``, ``accel.step(optimizer)`` and ``accel.update()`` are those of the scaler.
    """
    name = dotted_text(node)
    if name is None or name not in _holders_of_scalers(frame.outline) or frame.class_of(node) is not None:
        return None
    key = frame.key(node)
    return key and f"{key}.scaler"


@functools.lru_cache(maxsize=256)  # a search of the whole file
def _holders_of_scalers(outline: FileOutline) -> frozenset[str]:
    text = outline.script.text
    return frozenset(HELD_SCALER.findall(text) if ".scaler.unscale_(" in text else ())


@functools.lru_cache(maxsize=256)  # a search of the whole file
def _names_manager(outline: FileOutline) -> bool:
    return MANAGER_CLASS.search(outline.script.text) is not None


def _name_of(func: ast.expr, frame: Frame) -> str:
    """Return the last part of a function's name, with an import alias resolved."""
    if isinstance(func, ast.Name):
        return (frame.outline.imports.names.get(func.id) or func.id).rpartition(".")[2]
    return func.attr if isinstance(func, ast.Attribute) else ""


def _hidden(node: ast.Call, context: EventContext) -> list[Node]:
    """Return the event of a call that may do anything to gradients, scalers and optimizers."""
    return [SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))]


def _of_scaler(kind: str, node: ast.Call, context: EventContext) -> list[Node]:
    """Return the event of ``scaler.step(optimizer)`` or ``scaler.unscale_(optimizer)``."""
    assert isinstance(node.func, ast.Attribute)
    key, frame = context.frame.key(node.func.value), context.frame
    return [SourceEvent(kind, node, context, key=key, other=frame.key(node.args[0]) if node.args else None)]


def _clip(node: ast.Call, name: str, context: EventContext) -> Recognised:
    frame = context.frame
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    owner = last_name(receiver) if receiver is not None else ""
    if name not in CLIPS and frame.callee(node) is not None:
        return [], True  # a helper whose code can be followed
    is_framework = FRAMEWORK_NAME.search(owner) or (receiver is not None and is_accelerator(receiver, frame))
    if is_framework or any(MULTIPLIED_BY_SCALE.search(code_of(part)) for part in arguments_given(node)):
        return _hidden(node, context), False  # it may unscale, or its limit is multiplied by the scale
    if name not in CLIPS and (owner == "self" or frame.role(receiver or node) is not None):
        return _hidden(node, context), False
    return [SourceEvent(EventKind.CLIP, node, context, value=node.args[0] if node.args else None)], False


def _calls_of_scale(node: ast.expr) -> list[ast.Call]:
    """Return the calls of ``.scale(...)`` anywhere in an expression."""
    calls = [part for part in walk(node) if isinstance(part, ast.Call)]
    return [part for part in calls if isinstance(part.func, ast.Attribute) and part.func.attr == "scale"]


def _scaled_by(node: ast.expr, frame: Frame) -> str | None:
    """Return the key of the scaler in ``scaler.scale(loss)``, anywhere in the expression."""
    for call in _calls_of_scale(node):
        assert isinstance(call.func, ast.Attribute)
        if frame.role(call.func.value) == SCALER and call.args:
            return frame.key(call.func.value) or dotted_text(call.func.value)
    return None


@functools.lru_cache(maxsize=4096)
def _names_model(name: str) -> bool:
    return MODEL_NAME.search(name) is not None and not TENSOR_NAME.search(name)


def _inside(node: ast.expr) -> ast.expr:
    """Return ``model`` for ``get_model(model)`` and ``unwrap(model)``; another expression as it is."""
    is_plain = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    return node.args[0] if is_plain and UNWRAPS.search(last_name(node.func)) else node  # type: ignore[attr-defined]


def _is_named(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)


def is_model(node: ast.expr, frame: Frame, is_called: bool = False) -> bool:
    """Whether an expression is a model, by its name or by how the file uses it; or one of ``models["encoder"]``."""
    while isinstance(node, ast.Subscript) and (_is_named(node) or isinstance(node.value, ast.Subscript)):
        node = node.value
    name = (dotted_text(node) or "").removesuffix(".module")
    named = name in frame.outline.models or _names_model(name.rpartition(".")[2])
    if not named or name in ("", "self") or frame.role(node) not in ((None, OPTIMIZER) if is_called else (None,)):
        return False
    return frame.qualified(node) is None and not isinstance(frame.definition(node), ClassOutline)


def _is_model_or_its_parameters(node: ast.expr, frame: Frame) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
        node = node.value
    while isinstance(node, ast.Name) and node.id in frame.arguments and frame.caller is not None:
        node, frame = frame.arguments[node.id], frame.caller  # passed on, under another name
    return is_model(node, frame)


def _is_gradient(node: ast.AST) -> bool:
    """Whether an expression is a parameter's gradient or derived from it: ``p.grad.detach().data``."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return not (isinstance(node.value, ast.Name) and node.value.id in ("autograd", "torch"))
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _is_from_list(node: ast.expr, frame: Frame) -> bool:
    """Whether it is ``g`` in a loop over ``grads = [p.grad for p in parameters]``."""
    if not isinstance(node, ast.Name):
        return False
    iterated = frame.iterated(node)
    lists = frame.values(iterated) if isinstance(iterated, ast.Name) else []
    return any(isinstance(value.node, ast.ListComp) and _is_gradient(value.node.elt) for value in lists)


def _scaled_in_place(node: ast.expr, factor: ast.expr, context: EventContext) -> list[Node]:
    """Return the event of gradients that the script multiplies or divides: by the loss scale, or by a norm to clip."""
    text = code_of(factor)
    if SCALING_FACTOR.search(text):
        return [SourceEvent(EventKind.UNSCALE, node, context, key=ANYTHING, other=ANYTHING)]
    if CLIPPING_FACTOR.search(text):
        return [SourceEvent(EventKind.CLIP, node, context)]
    return []
