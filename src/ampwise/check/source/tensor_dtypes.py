"""Infer which tensors are in half precision under CUDA autocast.

The lists are those of ``ATen/autocast_mode.h`` of torch 2.13. An operation on the first list takes its inputs in FP16
or BF16, one on the second in FP32, and all others keep the dtype of their inputs. An operation that is on none of the
lists here, or whose code we cannot see, is unknown: ``TensorDtypes.dtype`` returns None, and rules report nothing.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import TypeGuard

from ampwise.check.source.call_events import MODULE_METHODS, is_model
from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.dictionary_changes import changes_of
from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.modes import UNKNOWN, entered_by
from ampwise.check.source.names import arguments_given, dotted_text
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import AutocastContext, argument_of, dtypes_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.sharding import sharded_models, wrapped_models
from ampwise.check.source.torch_names import BF16, FP16, FP32, MODEL_NAME
from ampwise.check.source.walk import CodeSite

HALF = FP16
SINGLE = FP32
NUMBER = "number"  # a Python number, which takes the dtype of the other operand
# Output of a model we cannot see: in half precision if it ends, as most do, in a linear layer.
LIKELY_HALF, LIKELY_BF16 = "model in float16", "model in bfloat16"
LIKELY = {FP16: LIKELY_HALF, BF16: LIKELY_BF16}
# Part of what such a model returns: its scores, or anything else.
PART = {LIKELY_HALF: "part of a model's output in float16", LIKELY_BF16: "part of a model's output in bfloat16"}
METHOD = "result of a model's method in float16"  # scores, if it is called so
HALVES: dict[str | None, str] = {HALF: "FP16", LIKELY_HALF: "FP16", BF16: "BF16", LIKELY_BF16: "BF16"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TAKES_HALF = _words(
    "matmul mm bmm mv addmm baddbmm addbmm einsum linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention prelu chain_matmul"
)
TAKES_SINGLE = _words(
    "exp expm1 log log10 log2 log1p pow square reciprocal rsqrt acos asin cosh sinh tan softplus softmax softmin "
    "log_softmax layer_norm group_norm rms_norm norm vector_norm matrix_norm normalize cosine_similarity "
    "pairwise_distance cdist dist sum cumsum cumprod prod logsumexp renorm cross_entropy nll_loss mse_loss l1_loss "
    "smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits triplet_margin_loss margin_ranking_loss "
    "cosine_embedding_loss soft_margin_loss"
)
KEEPS = _words(
    "sigmoid tanh relu relu_ gelu silu leaky_relu elu hardtanh logsigmoid abs sqrt mean std var clamp clamp_ clip neg "
    "detach clone contiguous view reshape flatten unflatten squeeze unsqueeze transpose permute t expand repeat "
    "dropout masked_fill masked_fill_ max min amax amin median sin cos erf narrow select roll flip tril triu "
    "requires_grad_ cuda max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm index_select gather"
)
# Of those that autocast runs in FP32, what gives the dtype of its input outside of autocast.
KEEPS_OUTSIDE = _words("softmax softmin log_softmax logsumexp exp log pow square sum norm normalize cumsum softplus")
SCORES = LazyPattern(r"logit|score|pred|out|cls|class", re.IGNORECASE)
KEY_NAME = LazyPattern(r"(^|_)(key|name)$")
TEMPERATURE = LazyPattern(r"(^|[._])(t|temp|temperature|tau|kd_t)$", re.IGNORECASE)
UPCASTS = LazyPattern(r"\.(float|double|to|type)\(|float32|dtype")  # in a forward
NOT_A_MODEL = LazyPattern(r"criterion|loss|metric|optim|scal|sched", re.IGNORECASE)
MADE_SINGLE = _words("zeros ones full empty rand randn arange linspace tensor eye one_hot as_tensor from_numpy")
LAYERS_IN_HALF = _words("Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d")
LAYERS_IN_SINGLE = _words("Softmax LogSoftmax LayerNorm GroupNorm RMSNorm CrossEntropyLoss MSELoss L1Loss")
LAYERS_THAT_KEEP = _words(
    "ReLU GELU SiLU Sigmoid Tanh ELU LeakyReLU Dropout Dropout2d Identity Flatten BatchNorm1d BatchNorm2d BatchNorm3d "
    "MaxPool1d MaxPool2d AvgPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d"
)
SAME_TENSOR = frozenset(("T", "mT", "data", "H"))
CASTS = {"float": SINGLE, "double": SINGLE, "half": HALF, "bfloat16": BF16}
LAYER_MODULES = ("torch.nn.", "timm.loss.", "monai.losses.")
NAMESPACES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.functional")
DEEPEST = 12
# Names and the frames they were found in, from the expression that was asked for to the current one.
Seen = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4)
def tensor_dtypes(code: SourceFile, any_mode: bool = False) -> TensorDtypes:
    """Return the dtypes of a file's expressions; computed once for all rules.

    With ``any_mode``, a name is in half if one of its values is and none is surely in FP32: some mode of the script
    gives that value. A part of a model's output is then PART.
    """
    return TensorDtypes(code, any_mode)


def torch_operation(call: ast.Call, frame: Frame) -> tuple[str, ast.expr | None] | None:
    """Return the name of a torch operation and its input: ``x.exp()`` and ``torch.exp(x)`` give the same."""
    qualified = frame.qualified(call.func)
    if qualified is not None:
        space, _, name = qualified.rpartition(".")
        return (name, call.args[0] if call.args else argument_of(call, "input")) if space in NAMESPACES else None
    if isinstance(call.func, ast.Attribute) and dotted_text(call.func.value) != "self":
        return call.func.attr, call.func.value
    return None


class TensorDtypes:
    """Dtypes of the expressions of one file, in each context in which they are evaluated."""

    def __init__(self, code: SourceFile, any_mode: bool = False) -> None:
        self.any_mode = any_mode
        self.sharded = sharded_models(code) if any_mode else {}
        self.wrapped = wrapped_models(code) if any_mode else {}
        self.contexts: dict[tuple[int, int], EventContext] = {}
        self.returns: dict[tuple[int, int], list[CodeSite]] = {}
        for trace in code.traces:
            for site in trace.statements:
                frame = site.context.frame
                for node in _held(site.node):
                    self.contexts[(id(node), id(frame))] = site.context
                if isinstance(site.node, ast.Return) and frame.caller is not None:
                    self.returns.setdefault((id(frame.caller), id(frame.function)), []).append(site)
            for site in trace.calls:
                for node in arguments_given(site.call):
                    self.contexts[(id(node), id(site.context.frame))] = site.context

    def dtype(self, node: ast.expr | None, context: EventContext, seen: Seen = ()) -> str | None:
        """Return HALF, BF16, LIKELY_HALF, LIKELY_BF16, SINGLE or NUMBER; None if unknown."""
        here = (id(node), id(context.frame))
        if node is None or here in seen or len(seen) > DEEPEST:
            return None
        seen = (*seen, here)
        if isinstance(node, ast.Constant):
            return NUMBER if isinstance(node.value, int | float) else None
        if isinstance(node, ast.Name):
            found = self._merged([self._of_value(*value, seen) for value in self._values(node, context)])
            iterated = context.frame.iterated(node) if self.any_mode and found is None else None
            return self._of_element(iterated, None, context, seen) if iterated is not None else found
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node, context, seen)
        if isinstance(node, ast.Subscript):
            return self._of_subscript(node, context, seen)
        if isinstance(node, ast.UnaryOp):
            return self.dtype(node.operand, context, seen)
        if isinstance(node, ast.BinOp):
            return self._of_arithmetic(node, context, seen)
        if isinstance(node, ast.Call):
            return self._of_call(node, context, seen)
        return None

    def _values(self, node: ast.Name, context: EventContext) -> list[PossibleValue]:
        """Return what a name may hold here, without what it holds in the other branch of an ``if`` around it.

        Of ``if amp: with autocast(): out = model(x)`` and ``else: out = model(x)``, the mode with autocast counts.
        """
        values = []
        for value in reaching_values(node, context.frame):
            there = self.context_of(*value) if value.frame is context.frame else None
            if there is None or not _contradict(there, context):
                values.append(value)
        return [value for value in values if not self._is_forward_in_single(*value)] or values

    def context_of(self, node: ast.expr | None, frame: Frame) -> EventContext | None:
        """Return the context in which a value is computed."""
        found = self.contexts.get((id(node), id(frame)))
        return self.contexts.get((id(node.value), id(frame))) if found is None and _is_element(node) else found

    def _merged(self, dtypes: list[str | None]) -> str | None:
        """Return the dtype of something that may have any of these."""
        if not self.any_mode or SINGLE in dtypes or len(set(dtypes)) == 1:
            return _common(dtypes)
        sure = [dtype for dtype in dtypes if dtype is not None]
        order = [METHOD, *PART.values(), *LIKELY.values(), *LIKELY]  # the least certain first, FP16 before BF16
        found = next((dtype for dtype in order if dtype in sure), None)
        return LIKELY.get(found or "", found) if None in dtypes else found

    def _of_subscript(self, node: ast.Subscript, context: EventContext, seen: Seen) -> str | None:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not self.any_mode:
            if isinstance(node.value, ast.Call) and _is_element(node):
                return None
            found = self.dtype(node.value, context, seen)
            return None if found in LIKELY.values() else found  # a model may return a dict of anything
        if isinstance(node.slice, ast.Name) and KEY_NAME.search(node.slice.id):
            key = node.slice.id  # output[features_key]
        if isinstance(key, str):
            found = self.dtype(node.value, context, seen) if SCORES.search(key) else None
            return PART.get(found or "")
        if isinstance(key, int) or isinstance(node.slice, ast.Name | ast.BinOp):
            return self._of_element(node.value, key if isinstance(key, int) else None, context, seen)
        return self.dtype(node.value, context, seen)

    def _of_element(self, node: ast.expr, index: int | None, context: EventContext, seen: Seen) -> str | None:
        """Return the dtype of an element of a tuple or a list, or of a slice of a tensor; of any one for None."""
        here = (id(node), id(context.frame))
        if len(seen) > DEEPEST or here in seen:
            return None
        if isinstance(node, ast.Tuple | ast.List) and node.elts:
            parts = node.elts[index : index + 1] if index is not None and index >= 0 else node.elts
            return self._merged([self.dtype(part, context, (*seen, here)) for part in parts]) if parts else None
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self.dtype(node.elt, context, (*seen, here))
        if isinstance(node, ast.Name):
            values = self._values(node, context)
            if values and all(isinstance(value.node, ast.List | ast.Dict) for value in values):
                return self._of_item(node, index, context, (*seen, here))
            found: list[str | None] = []
            for held, home in values:
                there = self.context_of(held, home)
                if held is None or there is None:
                    found.append(None)
                else:
                    found.append(self._of_element(held, index, there, (*seen, here)))
            return self._merged(found)
        if isinstance(node, ast.Call):
            target = context.frame.callee(node)
            if target is not None:
                returned = self._returns(node, target[0], context.frame)
                found = [
                    self._of_element(one.value, index, there, (*seen, here)) if one.value is not None else None
                    for one, there in returned
                ]
                return self._merged(found) if found else None
        whole = self.dtype(node, context, seen)
        return PART.get(whole or "", whole)

    def _of_item(self, node: ast.Name, index: int | None, context: EventContext, seen: Seen) -> str | None:
        """Return the dtype of what is put into a dictionary or a list: ``parts[i] = outputs[i]``."""
        frame, keys = context.frame, {str(index)} if index is not None else set()
        items: list[ast.expr] = []
        for kind, key, value in changes_of(node.id, frame.function.node, frame.outline):
            there = self.contexts.get((id(value), id(frame)))
            if kind != "item" or there is None or value.lineno >= node.lineno or _contradict(there, context):
                continue
            if not keys or key in keys or not key or key.startswith("["):
                items = [*([] if set(there.guards) <= set(context.guards) and key else items), value]
        return self._merged([self._of_value(item, frame, seen) for item in items]) if items else None

    def _of_attribute(self, node: ast.Attribute, context: EventContext, seen: Seen) -> str | None:
        if node.attr in SAME_TENSOR:
            return self.dtype(node.value, context, seen)
        if self.any_mode and SCORES.search(node.attr):
            return PART.get(self.dtype(node.value, context, seen) or "")
        if isinstance(node.value, ast.Name) and context.frame.class_of(node.value) is not None:
            values = context.frame.values(node)
            return NUMBER if values and all(_is_number(*value) for value in values) else None
        return None

    def _of_value(self, node: ast.expr | None, frame: Frame, seen: Seen) -> str | None:
        if node is None:
            return None
        context = self.context_of(node, frame)
        if context is None:  # in a function that no trace reached: only numbers are certain
            found = self.dtype(node, EventContext(frame), seen)
            return found if found == NUMBER else None
        return self.dtype(node, context, seen)

    def _is_forward_in_single(self, node: ast.expr | None, frame: Frame) -> bool:
        """Whether this is a call of a model outside of autocast, or an element of what it returns."""
        context = self.context_of(node, frame)
        call = node.value if isinstance(node, ast.Subscript) and _is_element(node) else node
        outside = context is not None and not context.autocasts
        return outside and isinstance(call, ast.Call) and (_is_model(call, frame) or _is_method(call, frame))

    def _of_arithmetic(self, node: ast.BinOp, context: EventContext, seen: Seen) -> str | None:
        if isinstance(node.op, ast.FloorDiv) or _is_number(node, context.frame):
            return NUMBER
        if isinstance(node.op, ast.MatMult | ast.Pow):
            half = half_format(context)
            if half or context.autocasts or isinstance(node.op, ast.Pow):
                return SINGLE if half and isinstance(node.op, ast.Pow) else half
        sides = {self.dtype(node.left, context, seen), self.dtype(node.right, context, seen)}
        if isinstance(node.op, ast.MatMult):  # outside of autocast, of two tensors of one dtype
            return next(iter(sides - {None, NUMBER}), None) if self.any_mode else None
        if sides == {NUMBER}:
            return NUMBER
        sides.discard(NUMBER)
        if self.any_mode and isinstance(node.op, ast.Div | ast.Mult) and TEMPERATURE.search(ast.unparse(node.right)):
            sides.discard(None)  # a number, or a tensor without dimensions, which changes no dtype
        return SINGLE if SINGLE in sides and None not in sides else _common(list(sides))

    def _of_call(self, node: ast.Call, context: EventContext, seen: Seen) -> str | None:
        frame = context.frame
        if _is_number(node, frame):
            return NUMBER
        layer = layer_called(node, frame)
        if layer in LAYERS_THAT_KEEP:
            made = self.dtype(node.args[0] if node.args else None, context, seen)
            if made is not None:
                return made
        if self.any_mode and not context.autocasts and layer in ("Softmax", "LogSoftmax"):
            return self.dtype(node.args[0] if node.args else None, context, seen)
        half = half_format(context)
        if half and (layer in LAYERS_IN_HALF or layer in LAYERS_IN_SINGLE):
            return half if layer in LAYERS_IN_HALF else SINGLE
        target = frame.callee(node)
        policy = None if context.autocasts else self.sharded.get(frame.key(node.func) or "")
        if policy is not None:  # FSDP casts the output only if it is asked to, but a model ends in a layer in 16 bits
            output, computed = policy.dtype("output_dtype"), policy.dtype("param_dtype")
            if output is not None or target is None:
                return output if output in (FP16, BF16, FP32) else None if output else LIKELY.get(computed or "")
        policies = [] if context.autocasts else self.wrapped.get(frame.key(node.func) or "", [])
        run_in = {policy.dtype("param_dtype") for policy in policies}
        if not run_in.isdisjoint(LIKELY):
            made = self._returned(node, target[0], frame, seen) if target is not None else None
            may_upcast = target is not None and UPCASTS.search(target[0].text) is not None
            return made if made is not None or may_upcast else LIKELY[FP16 if FP16 in run_in else BF16]
        if target is not None:
            return self._returned(node, target[0], frame, seen)
        found = torch_operation(node, frame)
        if found is None or found[0] == "forward":
            return LIKELY[half] if half and _is_model(node, frame) else None
        name, tensor = found
        if self.any_mode and half == FP16 and _is_method(node, frame):
            return METHOD
        if isinstance(node.func, ast.Attribute) and frame.qualified(node.func) is None:
            cast = self._of_cast(node, name, tensor, context, seen)
            if cast is not None:
                return cast
        return self._of_operation(node, name, tensor, context, seen)

    def _of_cast(
        self, node: ast.Call, name: str, tensor: ast.expr | None, context: EventContext, seen: Seen
    ) -> str | None:
        if name in CASTS and not node.args:
            return CASTS[name]
        if name == "type_as" and node.args:
            return self.dtype(node.args[0], context, seen)
        if name not in ("to", "type"):
            return None
        given = arguments_given(node)
        dtypes = [dtypes_of(argument, context.frame) or frozenset() for argument in given]
        asked = frozenset().union(*dtypes) & {FP16, FP32, "float64", "bfloat16"}
        if asked:
            dtype = next(iter(asked)) if len(asked) == 1 else None
            return SINGLE if dtype == "float64" else dtype
        other = next((part for part in given if isinstance(part, ast.Attribute) and part.attr == "dtype"), None)
        if other is not None:  # x.to(y.dtype)
            return self.dtype(other.value, context, seen)
        text = " ".join([ast.unparse(argument) for argument in given])
        return self.dtype(tensor, context, seen) if "device" in text and "dtype" not in text else None

    def _of_operation(
        self, node: ast.Call, name: str, tensor: ast.expr | None, context: EventContext, seen: Seen
    ) -> str | None:
        asked = argument_of(node, "dtype")
        if isinstance(asked, ast.Attribute) and asked.attr == "dtype":  # torch.ones(n, n, dtype=scores.dtype)
            return self.dtype(asked.value, context, seen)
        if asked is not None:
            dtypes = dtypes_of(asked, context.frame)
            return next(iter(dtypes)) if dtypes and len(dtypes) == 1 and dtypes <= {FP16, BF16, FP32} else None
        if name in KEEPS:
            return self.dtype(tensor, context, seen)
        if name in MADE_SINGLE and context.frame.qualified(node.func) is not None:
            return SINGLE
        if self.any_mode and not context.autocasts and (name in KEEPS_OUTSIDE or name in TAKES_HALF):
            return self.dtype(tensor, context, seen)
        half = half_format(context)
        if half is None:
            return None
        if name in TAKES_HALF:
            return half
        if name in TAKES_SINGLE:
            return SINGLE
        if name == "where" and len(node.args) == 3:
            sides = {self.dtype(side, context, seen) for side in node.args[1:]} - {NUMBER}
            return _common(list(sides)) if sides else None
        return None

    def _returned(self, node: ast.Call, function: FunctionOutline, frame: Frame, seen: Seen) -> str | None:
        dtypes = [self.dtype(site.value, context, seen) for site, context in self._returns(node, function, frame)]
        return self._merged(dtypes) if dtypes else None

    def _returns(
        self, node: ast.Call, function: FunctionOutline, frame: Frame
    ) -> list[tuple[ast.Return, EventContext]]:
        """Return the ``return`` statements of a function, as a call runs them."""
        given = {id(part) for part in arguments_given(node)}
        found = []
        for site in self.returns.get((id(frame), id(function)), ()):
            if all(id(argument) in given for argument in site.context.frame.arguments.values()):
                assert isinstance(site.node, ast.Return)
                found.append((site.node, site.context))
        return found


def layers_called(node: ast.Call, frame: Frame) -> set[str | None]:
    """Return the layers that a call may run, such as ``Linear`` for ``self.fc(x)``; None among them if unknown."""
    kinds: set[str | None] = set()
    for maker, home in find_constructors(node.func, frame):
        qualified = home.qualified(maker.func) if isinstance(maker, ast.Call) else None
        is_layer = qualified is not None and qualified.startswith(LAYER_MODULES) and ".functional." not in qualified
        kinds.add(qualified.rpartition(".")[2] if is_layer and qualified else None)
    return kinds


def layer_called(node: ast.Call, frame: Frame) -> str | None:
    """Return the layer that a call runs; None if it is ambiguous."""
    kinds = layers_called(node, frame)
    return kinds.pop() if len(kinds) == 1 else None


def half_format(context: EventContext) -> str | None:
    """Return what autocast computes in here: FP16 if it is one of its modes, else BF16; None if unknown or on CPU."""
    autocast = context.autocast
    if autocast is None or not autocast.may_be_on or autocast.device == "cpu":
        return None
    dtypes = _entered(autocast)
    return next((dtype for dtype in (FP16, BF16) if dtype in dtypes), None)


@functools.lru_cache(maxsize=512)  # asked for every call under it
def _entered(autocast: AutocastContext) -> set[str]:
    """Return the half dtypes of an autocast, by the options that may be chosen together."""
    asked = {one.dtype for one in entered_by(autocast)}
    return asked if asked & {FP16, BF16} and UNKNOWN not in asked else set(autocast.dtypes or ())


def _is_method(call: ast.Call, frame: Frame) -> bool:
    """Whether this calls a method of a model that its author defined."""
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr not in MODULE_METHODS and is_model(func.value, frame)


def _is_model(call: ast.Call, frame: Frame) -> bool:
    name = (dotted_text(call.func) or "").removesuffix(".forward")
    known = name in frame.outline.models and not NOT_A_MODEL.search(name)
    return known or MODEL_NAME.search(name.rpartition(".")[2]) is not None


def _contradict(one: EventContext, other: EventContext) -> bool:
    """Whether two places are in different branches of an ``if``."""
    sides = {guard.text: guard.holds for guard in one.guards}
    return any(sides.get(guard.text, guard.holds) != guard.holds for guard in other.guards)


def _is_element(node: ast.AST | None) -> TypeGuard[ast.Subscript]:
    """Whether this is an element of a tuple by its number."""
    return (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
    )


def _common(dtypes: list[str | None]) -> str | None:
    """Return the dtype that all have, else None; HALF and LIKELY_HALF give LIKELY_HALF."""
    different = set(dtypes)
    for sure, likely in LIKELY.items():
        if different == {sure, likely}:
            return likely
    return dtypes[0] if len(different) == 1 else None


def _held(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement may bind to a name, as ``Frame.values`` returns them."""
    value = getattr(node, "value", None)
    found = [value] if isinstance(value, ast.expr) else []
    for part in found:  # the list grows during the loop
        if isinstance(part, ast.Tuple | ast.List):
            found += part.elts
        elif isinstance(part, ast.IfExp):
            found += [part.body, part.orelse]
        elif isinstance(part, ast.BoolOp):
            found += part.values
    return found


def _is_number(node: ast.expr | None, frame: Frame, depth: int = 0) -> bool:
    """Whether an expression is a Python number: a literal, a size, something from ``math``."""
    if node is None or depth > 5:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand, frame, depth + 1)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.FloorDiv):
            return True
        return _is_number(node.left, frame, depth + 1) and _is_number(node.right, frame, depth + 1)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        name = frame.qualified(node.func) or dotted_text(node.func) or ""
        sized = isinstance(node.func, ast.Attribute) and node.func.attr in ("size", "numel", "dim") and bool(node.args)
        return sized or name.startswith(("math.", "numpy.")) or name in ("float", "int", "len")
    return isinstance(node, ast.Name | ast.Attribute) and _names_number(node, frame, depth)


def _names_number(node: ast.Name | ast.Attribute, frame: Frame, depth: int) -> bool:
    # Parameters of constructors are sizes and rates; tensors are passed to other methods.
    if isinstance(node, ast.Name) and node.id in frame.function.params and frame.function.name == "__init__":
        return True
    if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
        return False
    values = frame.values(node)
    return bool(values) and all(value is not node and _is_number(value, home, depth + 1) for value, home in values)
