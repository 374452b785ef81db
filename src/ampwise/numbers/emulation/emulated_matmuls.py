"""Run every matmul of a model, forward and backward, on rounded operands, with sums in FP32.

Matmuls are intercepted below autograd, at the operators (``aten::mm`` and others): this covers layers, einsum and
attention alike, and the matmuls of the backward pass, whose operands are rounded along the dimension that *they* sum
over, as in hardware with block formats. A matmul of the backward pass uses the recipe of its forward matmul.

In a pretraining recipe, matmuls of weights differ from others. A weight is a module's parameter, or whatever a linear
layer multiplies its input by, and is recognised by its storage, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import key_extractor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Embedding, EmbeddingBag, Linear, Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from ampwise.finding.log import log
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.numbers.emulation.eden import eden_operands
from ampwise.numbers.emulation.node_recipes import NodeRecipes, checkpoint_depth, in_backward
from ampwise.numbers.emulation.recipe import BF16, EmulationRecipe, hadamard

aten = torch.ops.aten

# Positions of an operator's two operands.
MATMUL_OPERANDS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (1, 2),
    aten.dot.default: (0, 1),
}
CHANNELS, OUTPUTS = 1, 0  # of a convolution's input and weight
MOST_NOTED = 2**17  # storages
# Operators whose matmuls cannot be intercepted: fused recurrent layers and attention, and matmuls in special formats.
NOT_EMULATED = frozenset({
    "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_trilinear", "_scaled_mm", "_grouped_mm", "_sparse_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
})  # fmt: skip
BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
OF_NESTED_TENSORS = frozenset({"linear", "matmul"})  # only for nested tensors; for others they are decomposed


def emulated(model: Module, recipes: Mapping[Module, EmulationRecipe | None]) -> AbstractContextManager[None]:
    """Return a context in which the matmuls in these modules and their submodules are computed by their recipes.

    For nested modules the inner one's recipe counts; None means no emulation. Matmuls of the backward pass are emulated
    if it runs inside the context too. Attention is computed by its definition, as two matmuls and a softmax, and
    compiled code runs uncompiled. Matmuls that cannot be intercepted, such as cuDNN's recurrent layers', are computed
    as usual, with a warning.
    """
    return MatmulEmulation(model, recipes).on()


class MatmulEmulation:
    """Reusable form of ``emulated``: a backward pass may run in a later block than its forward pass."""

    def __init__(self, model: Module, recipes: Mapping[Module, EmulationRecipe | None]) -> None:
        self._model, self._recipes = model, _inherited(model, recipes)
        self._mode = _Products()

    @contextmanager
    def on(self) -> Iterator[None]:
        mode = self._mode
        with ExitStack() as stack:
            for module, recipe in self._recipes.items():
                stack.callback(module.register_forward_pre_hook(mode.enters(recipe), prepend=True).remove)
                stack.callback(module.register_forward_hook(mode.leaves, always_call=True).remove)
                if recipe is not None and recipe.pretraining:  # last, when FSDP has gathered the weights
                    stack.callback(module.register_forward_pre_hook(mode.notes_weights).remove)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # nn.MultiheadAttention has a fused path for inference.
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(run_eagerly())
            stack.enter_context(_below_other_modes(mode))
            yield


def _inherited(model: Module, recipes: Mapping[Module, EmulationRecipe | None]) -> dict[Module, EmulationRecipe | None]:
    """Give submodules their parent's recipe: a checkpoint calls a submodule directly, to recompute it."""
    found: dict[Module, EmulationRecipe | None] = {}

    def walk(module: Module, around: EmulationRecipe | None, is_inside: bool) -> None:
        if module in found:
            return
        is_inside, recipe = is_inside or module in recipes, recipes.get(module, around)
        if is_inside:
            found[module] = recipe
        for child in module.children():
            walk(child, recipe, is_inside)

    walk(model, None, False)
    return found


class _Entered(NamedTuple):
    """A module whose forward runs."""

    recipe: EmulationRecipe | None
    checkpoints: int  # checkpoint frames around it
    module: Module


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told: set[str] = set()
        self._inside: list[_Entered] = []
        self._nodes = NodeRecipes()
        # To recognise gradients: they are created in the backward pass, or are not operands of a forward matmul. Both
        # are needed: a checkpoint stops before its last matmul, and the user may pass in a gradient.
        self._operands, self._born_in_backward = _Storages(), _Storages()
        self._weights, self._embeddings = _Storages(), _Storages()  # for pretraining recipes

    def enters(self, recipe: EmulationRecipe | None) -> Callable[..., None]:
        def enter(module: Module, args: Any) -> None:
            self._note(self._here())
            self._inside.append(_Entered(recipe, checkpoint_depth(), module))

        return enter

    def leaves(self, module: Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def notes_weights(self, module: Module, args: Any) -> None:
        for each in (module, *module.children()):  # whose weights it may use itself, as nn.MultiheadAttention does
            self._weights.add(each.parameters(recurse=False))
            if isinstance(each, Embedding | EmbeddingBag):
                self._embeddings.add(each.parameters(recurse=False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _must_decompose(func, args):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        operands, recipe = _operands(func, args), self._here()
        if recipe is not None and recipe.pretraining and operands is not None and not self._is_narrow(operands):
            recipe = BF16
        self._note(recipe)
        if recipe is None:
            result = func(*args, **(kwargs or {}))
        elif operands is None:
            self._tell_if_whole(func)
            result = func(*args, **(kwargs or {}))
        else:
            result = self._product(func, args, kwargs or {}, recipe, operands)
        if in_backward():
            given = {each.untyped_storage()._cdata for each in _tensors(args)}
            self._born_in_backward.add(each for each in _tensors(result) if each.untyped_storage()._cdata not in given)
        return result

    def _here(self) -> EmulationRecipe | None:
        """Return the recipe of the current module, or in a backward pass that of the forward matmul."""
        return self._inside[-1].recipe if self._inside else self._nodes.recipe()

    def _is_narrow(self, operands: Sequence[Tensor]) -> bool:
        """Return whether a pretraining recipe makes this matmul narrow: one of weights, except of a tied head.

        A backward pass has the recipe that its forward matmul got.
        """
        if in_backward():
            return True
        if self._inside and isinstance(self._inside[-1].module, Linear):
            self._weights.add(operands[1:])  # computed, as with torch.nn.utils.parametrize
        return any(each in self._weights and each not in self._embeddings for each in operands)

    def _note(self, own: EmulationRecipe | None) -> None:
        """Record the recipe of the backward matmuls of what was just called."""
        if not self._nodes.has_new:
            return
        around, here = checkpoint_depth(), self._here()
        outer = (each.recipe for each in reversed(self._inside) if each.checkpoints < around)
        self._nodes.note(own, next(outer, self._nodes.recipe()) if around else here)

    def _product(self, func: Any, args: Any, kwargs: Any, recipe: EmulationRecipe, operands: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and not in_backward():
            self._operands.add(operands)
        if func in MATMUL_OPERANDS:
            are_weights = tuple(recipe.pretraining and operand in self._weights for operand in operands)
            return _matmul(func, args, kwargs, recipe, self._gradient_among(operands), are_weights)
        return _convolution(args, recipe) if func is aten.convolution.default else _convolution_backward(args, recipe)

    def _tell_if_whole(self, func: Any) -> None:
        name = func.overloadpacket.__name__
        if (name in NOT_EMULATED or name in OF_NESTED_TENSORS) and name not in self._told:
            self._told.add(name)
            log(
                "warning",
                "{} is not emulated: torch runs it as one operation, and its matmuls cannot be intercepted. It runs in "
                "its own precision.",
                name,
            )

    def _gradient_among(self, operands: Sequence[Tensor]) -> tuple[bool, ...]:
        """Return which of the operands are gradients."""
        if not in_backward():
            return (False,) * len(operands)
        born = tuple(operand in self._born_in_backward for operand in operands)
        return born if len(set(born)) > 1 else tuple(operand not in self._operands for operand in operands)


@contextmanager
def _below_other_modes(mode: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode below all others, so that they, such as a tracer, see the original matmul and not its emulation."""
    others = _get_current_dispatch_mode_stack()

    def put_on() -> None:
        for other in others:
            _push_mode(other)

    def take_off() -> None:
        for _ in others:
            _pop_mode()

    take_off()
    try:
        with mode:
            put_on()
            try:
                yield
            finally:
                take_off()
    finally:
        put_on()


def _must_decompose(func: Any, args: Any) -> bool:
    """Return whether this is a composite operator that a dispatch mode has to decompose itself.

    Autograd decomposes operators before a mode sees them, but not in inference mode, nor for tensors created there. An
    operator with a kernel of its own, as for nested tensors, stays whole.
    """
    if not _is_composite(func):
        return False
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    backend = key_extractor(tensors, BACKENDS).highestPriorityTypeId()
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), backend)


@lru_cache(maxsize=8192)
def _is_composite(func: Any) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


class _Storages:
    """Set of tensors, by their storage, as long as the storage lives.

    A weak reference to a storage prevents its address from being reused.
    """

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        if len(self._references) > MOST_NOTED:
            self._references = {key: each for key, each in self._references.items() if not each.expired()}
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._references[reference.cdata] = reference

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._references.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, Tensor):
            yield value


def _operands(func: Any, args: Any) -> tuple[Tensor, ...] | None:
    places = MATMUL_OPERANDS.get(func)
    if places is not None:
        return tuple(args[place] for place in places)
    if func is aten.convolution.default:
        return args[0], args[1]
    return (args[1], args[2]) if func is aten.convolution_backward.default else None


def _matmul(
    func: Any,
    args: Any,
    kwargs: Any,
    recipe: EmulationRecipe,
    are_gradients: tuple[bool, ...],
    are_weights: tuple[bool, ...],
) -> Any:
    first, second = MATMUL_OPERANDS[func]
    a, b = args[first], args[second]
    dims = (-1, -1 if b.ndim == 1 else -2)
    of_weight = recipe.pretraining and any(are_gradients) and not any(are_weights)  # a weight's gradient
    given = [_wide(each) for each in args]
    if recipe.eden and any(are_gradients):
        given[first], given[second] = eden_operands((a, b), dims, recipe, are_gradients)
        return func(*given, **kwargs).to(a.dtype)
    for place, operand, dim, is_gradient, is_weight in zip(
        (first, second), (a, b), dims, are_gradients, are_weights, strict=True
    ):
        spread = hadamard(operand, dim) if of_weight else operand
        given[place] = recipe.of(spread, dim, is_gradient=is_gradient, is_weight=is_weight)
    return func(*given, **kwargs).to(a.dtype)


def _convolution(args: Any, recipe: EmulationRecipe) -> Tensor:
    given, weight, bias, *rest = args
    channels = OUTPUTS if rest[3] else CHANNELS  # a transposed convolution sums over the weight's first dimension
    made: Tensor = aten.convolution.default(
        recipe.of(given, CHANNELS, is_gradient=False),
        recipe.of(weight, channels, is_gradient=False),
        _wide(bias),
        *rest,
    )
    return made.to(given.dtype)


def _convolution_backward(args: Any, recipe: EmulationRecipe) -> tuple[Tensor | None, ...]:
    """Emulate two matmuls: the input's gradient sums over output channels, the weight's over samples and positions."""
    gradient, given, weight, *rest = args
    *rest, mask = rest
    outputs = CHANNELS if rest[4] else OUTPUTS
    over_channels = (
        recipe.of(gradient, CHANNELS, is_gradient=True), _wide(given), recipe.of(weight, outputs, is_gradient=False)
    )  # fmt: skip
    over_places = (
        _over_places(gradient, recipe, is_gradient=True), _over_places(given, recipe, is_gradient=False), _wide(weight)
    )  # fmt: skip
    by_input, _, _ = aten.convolution_backward.default(*over_channels, *rest, [mask[0], False, False])
    _, by_weight, _ = aten.convolution_backward.default(*over_places, *rest, [False, mask[1], False])
    _, _, by_bias = aten.convolution_backward.default(*map(_wide, args[:3]), *rest, [False, False, mask[2]])
    return tuple(None if each is None else each.to(weight.dtype) for each in (by_input, by_weight, by_bias))


def _over_places(tensor: Tensor, recipe: EmulationRecipe, *, is_gradient: bool) -> Tensor:
    """Round along samples and positions as one dimension, in which blocks are formed."""
    flat = tensor.movedim(CHANNELS, 0)
    rounded = recipe.of(flat.flatten(1), 1, is_gradient=is_gradient)
    return rounded.reshape(flat.shape).movedim(0, CHANNELS)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value
