"""Record every matmul of a step, forward and backward, with the module it belongs to."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.trace.recorder import dtype_name
from ampwise.train.precision.policy import named_modules
from ampwise.tune.align.matmul_shapes import MatmulShape, shape_reader
from ampwise.tune.align.matmuls import MatmulSize, StepMatmul

__all__ = ["MatmulRecorder", "RecordedCall"]

ANY_ROLES = dict.fromkeys("mnk", "size")
LETTERS = "mnk"


class RecordedCall(NamedTuple):
    """A call that can be repeated: its tensor arguments have shapes, but no values."""

    function: Any
    args: tuple[Any, ...]


class MatmulRecorder(TorchDispatchMode):
    """Records the matmuls of a model within ``recording()``."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._precision = precision
        self._names: dict[int, str] = {}
        for name, module in named_modules(model).items():
            self._names.setdefault(id(module), name)
        self._running: list[nn.Module] = []
        self._weights: dict[int, tuple[StorageWeakRef, str]] = {}  # by storage: reference, and owning module
        for name, module in named_modules(model).items():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    self._remember(parameter, name)
        self._by_node: dict[int, StepMatmul] = {}  # of the forward pass, by the sequence number of its graph node
        self._found: dict[StepMatmul, int] = {}
        self._calls: dict[StepMatmul, RecordedCall] = {}  # of convolutions, whose sizes alone do not define the call
        self._heads = _Heads()

    @property
    def products(self) -> tuple[StepMatmul, ...]:
        """The recorded products, equal ones counted."""
        return tuple(map(self._counted, self._found))

    @property
    def calls(self) -> dict[StepMatmul, RecordedCall]:
        """Calls that repeat a product, for convolutions."""
        return {self._counted(product): call for product, call in self._calls.items()}

    def _counted(self, product: StepMatmul) -> StepMatmul:
        count = self._found[product]
        return replace(product, count=count, flops=product.flops * count)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            # torch.compile warns that global hooks run twice, which does not matter here.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            stack.callback(register_module_forward_pre_hook(self._enters).remove)
            stack.callback(register_module_forward_hook(self._leaves, always_call=True).remove)
            stack.enter_context(self._heads)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy":
            self._remember_copy(args[0], made)
        elif (seen := _seen(name, args, made)) is not None:
            product = self._note(name.removeprefix("aten::"), seen)
            if seen.kind == "convolution":
                self._calls.setdefault(product, RecordedCall(func, tuple(map(_shape_only, args))))
        return made

    # --- ownership ------------------------------------------------------------------------------------------------

    def _enters(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        while self._running and self._running.pop() is not module:  # modules that ended with an exception
            pass

    def _remember(self, tensor: Tensor, owner: str) -> None:
        storage = tensor.untyped_storage()
        self._weights.setdefault(storage._cdata, (StorageWeakRef(storage), owner))

    def _owner(self, tensor: Tensor) -> str | None:
        """Return the module whose weight this is, or a view of it, or a copy in another precision."""
        if tensor.layout != torch.strided:
            return None
        key = tensor.untyped_storage()._cdata
        reference, owner = self._weights.get(key, (None, None))
        if reference is not None and reference.expired():  # its memory has been reused
            del self._weights[key]
            return None
        return owner

    def _remember_copy(self, given: Tensor, made: Tensor) -> None:
        owner = self._owner(given)
        if owner is not None:
            self._weights.pop(made.untyped_storage()._cdata, None)
            self._remember(made, owner)

    def _here(self) -> str:
        return next((self._names[id(module)] for module in reversed(self._running) if id(module) in self._names), "")

    # --- products -------------------------------------------------------------------------------------------------

    def _note(self, op: str, seen: MatmulShape) -> StepMatmul:
        node = torch._C._current_autograd_node()
        if node is not None and not self._running:  # a running module is being recomputed (checkpointing)
            product = self._backward(op, seen, self._by_node.get(node._sequence_nr()))
        else:
            product = self._forward(op, seen)
            self._by_node[torch._C._autograd._get_sequence_nr() - 1] = product
        self._found[product] = self._found.get(product, 0) + 1
        return product

    def _forward(self, op: str, seen: MatmulShape) -> StepMatmul:
        if seen.kind == "attention":
            return self._made(op, self._heads.with_own_size(seen), layer=self._here(), roles=seen.roles or ANY_ROLES)
        weight = next((place for place, each in enumerate(seen.operands) if self._owner(each) is not None), None)
        if weight is None and isinstance(self._innermost(), nn.Linear):
            weight = 1
        if weight is None:
            return self._made(op, seen, layer=self._here(), roles=seen.roles or ANY_ROLES)
        kind = "linear" if seen.kind == "product" else seen.kind
        roles = seen.roles or {"m": "rows", "n": "outputs", "k": "inputs"}
        if seen.roles is None and weight == 0:
            roles = {"m": "outputs", "n": "rows", "k": "inputs"}
        return self._made(op, replace(seen, kind=kind), layer=self._layer(seen.operands[weight]), roles=roles)

    def _innermost(self) -> nn.Module | None:
        return self._running[-1] if self._running else None

    def _layer(self, weight: Tensor) -> str:
        """Return the running module if it holds this weight itself; else the first that does."""
        innermost = self._innermost()
        own = [] if innermost is None else list(innermost.parameters(recurse=False))
        owner = self._owner(weight)
        if owner is None or any(self._owner(each) == owner for each in own if each.ndim > 1):
            return self._here()
        return owner

    def _backward(self, op: str, seen: MatmulShape, forward: StepMatmul | None) -> StepMatmul:
        if forward is None:
            return self._made(op, seen, layer="", roles=seen.roles or ANY_ROLES, backward=True)
        sizes = {letter: getattr(forward, letter) for letter in LETTERS}
        if forward.kind == "attention":
            seen = replace(
                seen, sizes={letter: size.size for letter, size in sizes.items()}, rows={"k": forward.k.row or 0}
            )
        roles = seen.roles or _roles(seen, sizes)
        kind = "linear" if forward.kind == "linear" else seen.kind
        return self._made(op, replace(seen, kind=kind), layer=forward.layer, roles=roles, backward=True)

    def _made(self, op: str, seen: MatmulShape, *, layer: str, roles: Any, backward: bool = False) -> StepMatmul:
        precision = self._precision_of(seen)
        rows = seen.rows
        if precision == "fp8":  # its matmul takes matrices stored along the summed dimension
            rows = {letter: seen.sizes[letter] for letter in "nk"}
        m, n, k = (
            MatmulSize(role=roles[letter], size=seen.sizes[letter], row=rows.get(letter) or None) for letter in LETTERS
        )
        return StepMatmul(
            layer=layer,
            kind=seen.kind,
            op=op,
            backward=backward,
            precision=precision,
            m=m,
            n=n,
            k=k,
            batches=seen.batches,
            stored=seen.stored,
            flops=seen.flops,
        )

    def _precision_of(self, seen: MatmulShape) -> str:
        """Return its precision; a layer's 16-bit matmul counts as FP8, an FP32 one as TF32, if that is requested."""
        found = dtype_name(seen.operands[0].dtype)
        if found == "fp32" and self._precision == "tf32":
            return "tf32"
        if seen.kind == "linear" and self._precision == "fp8" and found in ("bf16", "fp16"):
            return "fp8"
        return "fp8" if found.startswith("fp8") else found


def _roles(seen: MatmulShape, forward: dict[str, MatmulSize]) -> dict[str, str]:
    """Map the sizes of a backward product to roles of the forward pass; prefer orders with another summed dimension."""
    orders = sorted(itertools.permutations(LETTERS), key=lambda order: order[2] == "k")
    for order in orders:
        if all(forward[theirs].size == seen.sizes[mine] for mine, theirs in zip(LETTERS, order, strict=True)):
            return {mine: forward[theirs].role for mine, theirs in zip(LETTERS, order, strict=True)}
    return ANY_ROLES


class _Heads(TorchFunctionMode):
    """Notes the head size passed to attention, which torch may pad before its kernel sees it."""

    def __init__(self) -> None:
        super().__init__()
        self._requested: tuple[int, int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or len(args) < 3:
            return func(*args, **kwargs)
        self._requested = args[0].shape[-1], args[2].shape[-1]
        try:
            return func(*args, **kwargs)
        finally:
            self._requested = None

    def with_own_size(self, seen: MatmulShape) -> MatmulShape:
        """Return the shape with the head size that was passed in."""
        if self._requested is None:
            return seen
        width, wide = self._requested
        return replace(seen, sizes={**seen.sizes, "k": width}, rows={"k": math.gcd(width, wide)})


def _seen(name: str, args: Any, made: Any) -> MatmulShape | None:
    """Return the shape of an operator's matmul; None for other operators and tensor subclasses."""
    read = shape_reader(name)
    try:
        return None if read is None else read(args, made)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _shape_only(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
