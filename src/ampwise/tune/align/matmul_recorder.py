"""Record every matmul of a step, forward and backward: its sizes, its memory layout, and the module it belongs to."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.trace.recorder import dtype_name
from ampwise.train.precision.policy import named_modules
from ampwise.tune.align.matmuls import MatmulSize, StepMatmul
from ampwise.watch.profile import AS_PRODUCTS, ATTENTION, GEMMS

LETTERS = "mnk"
ANY_ROLES = dict.fromkeys(LETTERS, "size")
LINEAR_ROLES = {"m": "rows", "n": "outputs", "k": "inputs"}
TURNED_ROLES = {"m": "outputs", "n": "rows", "k": "inputs"}  # with the weight on the left
CHANNELS = 4  # of an image: libraries pad those themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulShape:
    """Sizes m, n and k by letter, and the row strides of the matrices stored along them."""

    kind: str
    sizes: Mapping[str, int]
    rows: Mapping[str, int]
    flops: float
    batches: int = 1
    stored: tuple[str, ...] = ()
    operands: tuple[Tensor, ...] = ()  # left and right, one of which may be a weight
    roles: Mapping[str, str] | None = None  # of m, n and k, where the operator defines them


class MatmulRecorder(TorchDispatchMode):
    """Records the matmuls of a model within ``recording()``."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._precision = precision
        self._names: dict[int, str] = {}
        self._running: list[nn.Module] = []
        self._weights: dict[int, tuple[StorageWeakRef, str]] = {}  # by storage: reference, and owning module
        for name, module in named_modules(model).items():
            self._names.setdefault(id(module), name)
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    self._remember(parameter, name)
        self._by_node: dict[int, StepMatmul] = {}  # of the forward pass, by the sequence number of its graph node
        self._found: dict[StepMatmul, int] = {}
        self._calls: dict[StepMatmul, partial[Any]] = {}  # of convolutions, whose sizes alone do not define the call
        self._heads = _Heads()

    @property
    def products(self) -> tuple[StepMatmul, ...]:
        """The recorded products, equal ones counted."""
        return tuple(map(self._counted, self._found))

    @property
    def calls(self) -> dict[StepMatmul, partial[Any]]:
        """Calls that repeat a product, for convolutions; their tensor arguments have shapes, but no values."""
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
            stack.callback(register_module_forward_pre_hook(lambda module, _: self._running.append(module)).remove)
            stack.callback(register_module_forward_hook(self._leaves, always_call=True).remove)
            stack.enter_context(self._heads)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy":
            owner = self._owner(args[0])
            if owner is not None:
                self._weights.pop(made.untyped_storage()._cdata, None)
                self._remember(made, owner)
            return made
        try:
            seen = matmul_shape(name, args, made)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            seen = None  # a tensor subclass
        if seen is None:
            return made
        op, node = name.removeprefix("aten::"), torch._C._current_autograd_node()
        if node is not None and not self._running:  # a running module is being recomputed (checkpointing)
            product = self._backward(op, seen, self._by_node.get(node._sequence_nr()))
        else:
            product = self._forward(op, seen)
            self._by_node[torch._C._autograd._get_sequence_nr() - 1] = product
        self._found[product] = self._found.get(product, 0) + 1
        if seen.kind == "convolution":
            self._calls.setdefault(product, partial(func, *map(_shape_only, args)))
        return made

    # --- ownership ------------------------------------------------------------------------------------------------

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

    def _here(self) -> str:
        return next((self._names[id(module)] for module in reversed(self._running) if id(module) in self._names), "")

    # --- products -------------------------------------------------------------------------------------------------

    def _forward(self, op: str, seen: MatmulShape) -> StepMatmul:
        if seen.kind == "attention":
            return self._made(op, self._heads.with_own_size(seen), layer=self._here(), roles=seen.roles)
        innermost = self._running[-1] if self._running else None
        weight = next((place for place, each in enumerate(seen.operands) if self._owner(each) is not None), None)
        if weight is None and isinstance(innermost, nn.Linear):
            weight = 1
        if weight is None:
            return self._made(op, seen, layer=self._here(), roles=seen.roles)
        # The running module if it holds this weight itself; else the first that does.
        owner = self._owner(seen.operands[weight])
        held = innermost.parameters(recurse=False) if innermost is not None else ()
        if owner is None or any(self._owner(each) == owner for each in held if each.ndim > 1):
            owner = self._here()
        kind = "linear" if seen.kind == "product" else seen.kind
        roles = seen.roles or (TURNED_ROLES if weight == 0 else LINEAR_ROLES)
        return self._made(op, replace(seen, kind=kind), layer=owner, roles=roles)

    def _backward(self, op: str, seen: MatmulShape, forward: StepMatmul | None) -> StepMatmul:
        if forward is None:
            return self._made(op, seen, layer="", roles=seen.roles, backward=True)
        sizes = dict(zip(LETTERS, forward.sizes, strict=True))
        if forward.kind == "attention":
            own = {letter: size.size for letter, size in sizes.items()}
            seen = replace(seen, sizes=own, rows={"k": forward.k.row or 0})
        kind = "linear" if forward.kind == "linear" else seen.kind
        roles = seen.roles or _roles(seen, sizes)
        return self._made(op, replace(seen, kind=kind), layer=forward.layer, roles=roles, backward=True)

    def _made(
        self, op: str, seen: MatmulShape, *, layer: str, roles: Mapping[str, str] | None, backward: bool = False
    ) -> StepMatmul:
        # A layer's 16-bit matmul counts as FP8, and an FP32 one as TF32, if that is requested.
        precision, rows = dtype_name(seen.operands[0].dtype), seen.rows
        if precision == "fp32" and self._precision == "tf32":
            precision = "tf32"
        narrowed = seen.kind == "linear" and self._precision == "fp8" and precision in ("bf16", "fp16")
        if narrowed or precision.startswith("fp8"):
            precision = "fp8"
            rows = {letter: seen.sizes[letter] for letter in "nk"}  # it takes matrices stored along what is summed
        roles = roles or ANY_ROLES
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


def _shape_only(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


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


# --- sizes, by the tensors that an operator is called with -----------------------------------------------------------


def matmul_shape(name: str, args: Sequence[Any], made: Any) -> MatmulShape | None:
    """Return the sizes of a call of an operator, such as "aten::mm", by its arguments; None if it is not a matmul."""
    if name in GEMMS:
        first = GEMMS[name]
        return _gemm(args[first], args[first + 1], made)
    if name == "aten::linear":
        given, weight = args[:2]
        return _gemm(given.reshape(-1, given.shape[-1]), weight.t(), made.reshape(-1, made.shape[-1]))
    if name == "aten::convolution":
        return _convolution(args[0], args[1], made, transposed=args[6], groups=args[8])
    if name == "aten::convolution_backward":
        gradient, given, weight = args[:3]
        times = sum(map(bool, args[10][:2]))
        return _convolution(given, weight, gradient, transposed=args[7], groups=args[9], times=times)
    if not name.startswith(ATTENTION) or name.startswith(AS_PRODUCTS):
        return None
    backward = name.endswith("_backward")  # it recomputes the scores, then has two matmuls for each of the forward's
    query, key, value = args[1:4] if backward else args[:3]
    return _attention(query, key, value, times=2.5 if backward else 1.0)


def _gemm(left: Tensor, right: Tensor, made: Tensor) -> MatmulShape:
    *batch, m, k = left.shape
    n = right.shape[-1]
    along = [_stored(left, "mk"), _stored(right, "kn"), _stored(made, "mn")]
    strides: dict[str, list[int]] = {}
    for letter, stride in filter(None, along):
        strides.setdefault(letter, []).append(stride)
    batches = math.prod(batch)
    return MatmulShape(
        kind="product",
        sizes={"m": m, "n": n, "k": k},
        rows={letter: row for letter, found in strides.items() if (row := math.gcd(*found))},
        flops=2.0 * batches * m * n * k,
        batches=batches,
        stored=tuple(each[0] if each else "" for each in along),
        operands=(left, right),
    )


def _stored(matrix: Tensor, letters: str) -> tuple[str, int] | None:
    """Return along which of its sizes a matrix is stored, and the alignment of its rows in elements, offset included.

    None for a single row, and for an expanded matrix.
    """
    rows, columns = matrix.shape[-2:]
    by_rows, by_columns = matrix.stride()[-2:]
    others = (*matrix.stride()[:-2], matrix.storage_offset())
    if rows == 1 or columns == 1 or 0 in (by_rows, by_columns):
        return None
    if by_columns == 1:
        return letters[1], math.gcd(by_rows, *others)
    if by_rows == 1:
        return letters[0], math.gcd(by_columns, *others)
    return letters[1], columns  # it is copied first, row by row


def _convolution(
    given: Tensor, weight: Tensor, made: Tensor, *, transposed: bool, groups: int, times: int = 1
) -> MatmulShape:
    kernel = math.prod(weight.shape[2:])
    inputs, outputs = given.shape[1] // groups, made.shape[1] // groups
    positions = math.prod((given if transposed else made).shape[2:]) * given.shape[0]
    channels = {"n": outputs, "k": inputs}
    own_kernels = groups > 1 and min(inputs, outputs) <= CHANNELS  # depthwise: no matrices are multiplied
    return MatmulShape(
        kind="convolution",
        sizes={"m": positions, **channels},
        rows={} if own_kernels else {letter: size for letter, size in channels.items() if size > CHANNELS},
        flops=2.0 * times * positions * inputs * outputs * groups * kernel,
        operands=(given, weight),
        roles={"m": "rows", "n": "output channels", "k": "input channels"},
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, times: float = 1.0) -> MatmulShape | None:
    if query.ndim != 4:
        return None
    batch, heads, asked, width = query.shape
    known, wide = key.shape[2], value.shape[3]
    return MatmulShape(
        kind="attention",
        sizes={"m": asked, "n": known, "k": width},
        rows={"k": math.gcd(width, wide)},
        flops=2.0 * times * batch * heads * asked * known * (width + wide),
        batches=batch * heads,
        operands=(query, key),
        roles={"m": "queries", "n": "keys", "k": "head size"},
    )
