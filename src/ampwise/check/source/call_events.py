"""Recognise calls that are events: a backward, an unscale, a step, a clip, a read of the gradients."""
# ruff: noqa: SIM905 (long lists of names are read as text)

from __future__ import annotations

import ast
import re

from ampwise.check.source.events import Branch, BranchGuard, EventBlock, EventContext, EventKind, Node, SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.guards import guards_of
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import ClassOutline
from ampwise.check.source.torch_names import CLIPS, MODEL_NAME, OPTIMIZER, SCALER, SCHEDULER

__all__ = ["ANYTHING", "EventRecogniser"]

ANYTHING = "*"  # the key of an event that may concern every scaler and optimizer

# Objects whose backward(loss), step() and clip handle loss scaling themselves.
FRAMEWORK_NAME = LazyPattern(r"(^|_)(accelerator|fabric|engine|ds_engine|model_engine|strategy|plugin|booster)$")
CLIP_NAME = LazyPattern(r"^(clip_grad\w*|clip_gradients?\w*|dispatch_clip_grad|clip_grads?)$")
CLIPPING_FACTOR = LazyPattern(r"clip|coef|max_norm|norm")
SCALING_FACTOR = LazyPattern(r"scale", re.IGNORECASE)
READS = frozenset(
    "norm abs mean std var max min sum pow square item histogram histc flatten view cpu numpy tolist".split()
)
NORMS = ("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm", "torch.nn.utils.get_total_norm")
# Functions that may take a scaler or an optimizer and do not affect the step.
HARMLESS = frozenset(
    "isinstance len print id hasattr getattr setattr type str repr bool list tuple dict set enumerate zip range iter "
    "save state_dict load_state_dict append add format info debug warning log vars items issubclass watch".split()
)

# Methods of nn.Module, DDP and pretrained models that are not a forward.
MODULE_METHODS = frozenset(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float get_parameter "
    "get_submodule half load_state_dict modules named_buffers named_children named_modules named_parameters parameters "
    "register_buffer register_forward_hook register_module register_parameter requires_grad_ share_memory state_dict "
    "to to_empty train type xpu zero_grad no_sync join save_pretrained from_pretrained push_to_hub "
    "resize_token_embeddings gradient_checkpointing_enable set_grad_checkpointing load save load_weights save_weights "
    "init_weights freeze unfreeze set_input setup update_learning_rate print_networks save_networks load_networks step "
    "backward update append join_thread get info log summary items keys values format split replace device set "
    "clip_grad_norm_".split()
)


class CallEvents:
    """Events of a call, and whether to follow it into its function."""

    __slots__ = ("follow", "nodes")

    def __init__(self, nodes: list[Node] | None = None, follow: bool = False) -> None:
        self.nodes = [] if nodes is None else nodes
        self.follow = follow


class EventRecogniser:
    """Turn calls into events, and track which names hold a scaled loss."""

    def __init__(self) -> None:
        # loss = scaler.scale(loss): the loss's key -> the scaler's, and the guards it was assigned under
        self.scaled: dict[str, tuple[str, tuple[BranchGuard, ...]]] = {}

    def call(self, node: ast.Call, context: EventContext) -> CallEvents:
        name = _name_of(node.func, context.frame)
        special = _SPECIAL.get(name)
        if special is not None:
            found = special(self, node, context)
            if found is not None:
                return found
        if CLIP_NAME.match(name):
            return _clip(node, name, context)
        read = _gradient_read(node, name, context)
        if read is not None:
            return CallEvents([read])
        model = _forward(node, context)
        return CallEvents([model] if model else [], follow=True)

    def unknown(self, node: ast.Call, context: EventContext) -> list[Node]:
        """Return the event of a call that cannot be followed; there is one if it gets a scaler or an optimizer."""
        frame = context.frame
        given = [
            (argument, role)
            for argument in (*node.args, *(word.value for word in node.keywords))
            if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript)
            and (role := frame.role(argument)) in (SCALER, OPTIMIZER)
        ]
        keys = tuple(key for argument, _ in given if (key := frame.key(argument)) is not None)
        if not keys or _name_of(node.func, frame) in HARMLESS:
            return []
        if all(role == OPTIMIZER for _, role in given) and frame.role_of_call(node) is not None:
            return []  # it makes a scheduler, or wraps the optimizer
        return [SourceEvent(EventKind.OPAQUE, node, context, key=keys[0], keys=keys)]

    def statement(self, node: ast.stmt, context: EventContext) -> list[Node]:
        """Return the events of an assignment: ``loss = scaler.scale(loss)``, ``p.grad = None``, ``p.grad /= scale``."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if self.scaled or _calls_scale(node.value):
                    self._remember_scaled(target, node.value, context)
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    return _assigned_gradient(target, node.value, context)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult) and _gradient(node.target):
            return _scaled_in_place(node.target, node.value, context)
        return []

    def _remember_scaled(self, target: ast.expr, value: ast.expr, context: EventContext) -> None:
        key = context.frame.key(target) if isinstance(target, ast.Name | ast.Attribute) else None
        if key is None:
            return
        scaler = _scaled_by(value, context.frame)
        if scaler is not None:
            self.scaled[key] = (scaler, context.guards)
        elif not _mentions(value, key, context.frame):  # loss = loss / n keeps its scale
            self.scaled.pop(key, None)

    # -- the special names --------------------------------------------------------------------------------

    def backward(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        func = node.func
        frame = context.frame
        if frame.qualified(func) == "torch.autograd.backward":
            return CallEvents(self._backward(node, node.args[0], context)) if node.args else None
        if not isinstance(func, ast.Attribute) or frame.callee(node) is not None:
            return None
        receiver = func.value
        name = (dotted_text(receiver) or "").rpartition(".")[2]
        owner = name in ("self", "model", "optimizer") or FRAMEWORK_NAME.search(name) or name == "amp"
        if owner or frame.role(receiver) is not None:  # engine.backward(loss), optimizer.backward(loss)
            return CallEvents([SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))])
        return CallEvents(self._backward(node, receiver, context))

    def _backward(self, node: ast.Call, loss: ast.expr, context: EventContext) -> list[Node]:
        if isinstance(loss, ast.IfExp):  # (scaler.scale(loss) if scaler else loss).backward()
            holds, fails = guards_of(loss.test, context.frame)
            then = EventBlock(self._backward(node, loss.body, context))
            return [Branch(holds, fails, then, EventBlock(self._backward(node, loss.orelse, context)))]
        if isinstance(loss, ast.List | ast.Tuple) and loss.elts:
            loss = loss.elts[0]
        scaler = _scaled_by(loss, context.frame)
        if scaler is not None:
            value = _argument_of_scale(loss)
            return [SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=scaler, value=value)]
        key = context.frame.key(loss)
        plain = SourceEvent(EventKind.BACKWARD, node, context, value=loss)
        if key not in self.scaled:
            return [plain]
        scaler, guards = self.scaled[key]
        event = SourceEvent(EventKind.SCALED_BACKWARD, node, context, key=scaler, value=loss)
        beyond = tuple(guard for guard in guards if guard not in context.guards)
        if not beyond:
            return [event]
        opposite = tuple(BranchGuard(guard.text, not guard.holds, guard.boundary) for guard in beyond)
        return [Branch(beyond, opposite if len(beyond) == 1 else (), EventBlock([event]), EventBlock([plain]))]

    def step(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        if not isinstance(node.func, ast.Attribute):
            return None
        frame, receiver = context.frame, node.func.value
        role = frame.role(receiver)
        if role == SCHEDULER:
            return CallEvents([SourceEvent(EventKind.SCHEDULER_STEP, node, context, key=frame.key(receiver))])
        if role is None or frame.callee(node) is not None:
            return None  # another kind of object, or a class whose code can be followed
        key = frame.key(receiver)
        if role == SCALER:
            other = frame.key(node.args[0]) if node.args else None
            return CallEvents([SourceEvent(EventKind.SCALER_STEP, node, context, key=key, other=other)])
        if any(word.arg in ("scaler", "grad_scaler") for word in node.keywords):
            return CallEvents([SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))])
        return CallEvents(
            [SourceEvent(EventKind.OPTIMIZER_STEP, node, context, key=key)], follow=bool(node.args or node.keywords)
        )

    def update(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        if not isinstance(node.func, ast.Attribute) or context.frame.role(node.func.value) != SCALER:
            return None
        if context.frame.callee(node) is not None:
            return None
        return CallEvents([SourceEvent(EventKind.UPDATE, node, context, key=context.frame.key(node.func.value))])

    def unscale(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        if not isinstance(node.func, ast.Attribute) or context.frame.callee(node) is not None:
            return None
        frame = context.frame
        other = frame.key(node.args[0]) if node.args else None
        return CallEvents([SourceEvent(EventKind.UNSCALE, node, context, key=frame.key(node.func.value), other=other)])

    def zero_grad(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        if not isinstance(node.func, ast.Attribute) or context.frame.callee(node) is not None:
            return None
        return CallEvents([SourceEvent(EventKind.ZERO_GRAD, node, context, key=context.frame.key(node.func.value))])

    def in_place(self, node: ast.Call, context: EventContext) -> CallEvents | None:
        """Recognise ``p.grad.clamp_(-1, 1)``, ``p.grad.mul_(coef)`` and ``torch._foreach_mul_(grads, coef)``."""
        name = _name_of(node.func, context.frame)
        touched: list[ast.expr] = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if name == "clip_" and touched and context.frame.role(touched[0]) == SCALER:
            return CallEvents([])  # ampwise's GradScaler.clip_ clips during the step; gradients stay scaled until then
        touched += node.args
        if not any(_gradient(part) or _named_gradients(part) for part in touched):
            return None
        if "clamp" in name:
            return CallEvents([SourceEvent(EventKind.CLIP, node, context)])
        return CallEvents(_scaled_in_place(node, node.args[-1] if node.args else node, context))

    def handled_elsewhere(self, node: ast.Call, context: EventContext) -> CallEvents:
        return CallEvents([SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))], follow=True)


_SPECIAL = {
    "backward": EventRecogniser.backward,
    "step": EventRecogniser.step,
    "update": EventRecogniser.update,
    "unscale_": EventRecogniser.unscale,
    "zero_grad": EventRecogniser.zero_grad,
    "manual_backward": EventRecogniser.handled_elsewhere,
    "scale_loss": EventRecogniser.handled_elsewhere,
    **dict.fromkeys(
        ("clamp_", "clip_", "mul_", "div_", "_foreach_mul_", "_foreach_div_", "_foreach_clamp_max_"),
        EventRecogniser.in_place,
    ),
}


def _name_of(func: ast.expr, frame: Frame) -> str:
    """Return the last part of a function's name, with an import alias resolved."""
    if isinstance(func, ast.Name):
        return (frame.outline.imports.names.get(func.id) or func.id).rpartition(".")[2]
    return func.attr if isinstance(func, ast.Attribute) else ""


def _clip(node: ast.Call, name: str, context: EventContext) -> CallEvents:
    frame = context.frame
    given = [*node.args, *(word.value for word in node.keywords)]
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    owner = (dotted_text(receiver) or "").rpartition(".")[2] if receiver is not None else ""
    if name not in CLIPS and frame.callee(node) is not None:
        return CallEvents(follow=True)  # a helper whose code can be followed
    if FRAMEWORK_NAME.search(owner) or any(frame.role(argument) == SCALER for argument in given):
        return CallEvents([SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))])
    if name not in CLIPS and (owner == "self" or frame.role(receiver or node) is not None):
        return CallEvents([SourceEvent(EventKind.OPAQUE, node, context, key=ANYTHING, keys=(ANYTHING,))])
    return CallEvents([SourceEvent(EventKind.CLIP, node, context, value=node.args[0] if node.args else None)])


def _scaled_by(node: ast.expr | None, frame: Frame) -> str | None:
    """Return the key of the scaler in ``scaler.scale(loss)``, anywhere in the expression."""
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "scale":
            receiver = part.func.value
            if frame.role(receiver) == SCALER and part.args:
                return frame.key(receiver) or dotted_text(receiver)
    return None


def _calls_scale(node: ast.expr) -> bool:
    """Whether ``.scale(...)`` is called; only simple forms are checked, since this runs for every assignment."""
    while isinstance(node, ast.BinOp | ast.IfExp):
        node = node.left if isinstance(node, ast.BinOp) else node.body
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale"


def _argument_of_scale(node: ast.expr) -> ast.expr | None:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "scale":
            return part.args[0] if part.args else None
    return None


def _mentions(value: ast.expr, key: str, frame: Frame) -> bool:
    names = (part for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute))
    return any(frame.key(name) == key for name in names)


def _forward(node: ast.Call, context: EventContext) -> SourceEvent | None:
    """Return the forward event of a call of a model, or of a method that its author defined."""
    func = node.func
    if not (node.args or node.keywords):
        return None
    if isinstance(func, ast.Attribute) and _is_own(func.attr) and _is_model(func.value, context.frame):
        return SourceEvent(EventKind.FORWARD, node, context, key=context.frame.key(func.value))
    if _is_model(func, context.frame):
        return SourceEvent(EventKind.FORWARD, node, context, key=context.frame.key(func))
    return None


def _is_own(method: str) -> bool:
    """Whether a method is the model author's and not torch's; ``model.module`` is the model itself."""
    return method not in MODULE_METHODS and method != "module"


def _is_model(node: ast.expr, frame: Frame) -> bool:
    name = (dotted_text(node) or "").removesuffix(".module")
    named = name in frame.outline.models or MODEL_NAME.search(name.rpartition(".")[2]) is not None
    if not named or name in ("", "self") or frame.role(node) is not None:
        return False
    return frame.qualified(node) is None and not isinstance(frame.definition(node), ClassOutline)


def _gradient_read(node: ast.Call, name: str, context: EventContext) -> SourceEvent | None:
    if "norm" in name and node.args and context.frame.qualified(node.func) in NORMS:
        seen = any(_gradient(part) for part in ast.walk(node.args[0]))
    else:
        seen = name in READS and isinstance(node.func, ast.Attribute) and _gradient(node.func.value)
    return SourceEvent(EventKind.GRAD_READ, node, context) if seen else None


def _gradient(node: ast.AST) -> bool:
    """Whether an expression is a parameter's gradient or derived from it: ``p.grad.detach().data``."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return not (isinstance(node.value, ast.Name) and node.value.id in ("autograd", "torch"))
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _named_gradients(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("grads", "gradients", "device_grads", "all_grads")


def _assigned_gradient(target: ast.Attribute, value: ast.expr, context: EventContext) -> list[Node]:
    if isinstance(value, ast.Constant) and value.value is None:
        return [SourceEvent(EventKind.ZERO_GRAD, target, context)]
    return _scaled_in_place(target, value, context)


def _scaled_in_place(node: ast.expr, factor: ast.expr, context: EventContext) -> list[Node]:
    """Return the event of gradients that the script multiplies or divides: by the loss scale, or by a norm to clip."""
    text = ast.unparse(factor)
    if SCALING_FACTOR.search(text):
        return [SourceEvent(EventKind.UNSCALE, node, context, key=ANYTHING, other=ANYTHING)]
    if CLIPPING_FACTOR.search(text):
        return [SourceEvent(EventKind.CLIP, node, context)]
    return []
