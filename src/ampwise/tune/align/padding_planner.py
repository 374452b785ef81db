"""Decide which layers of a model can be padded without changing what it computes, and why others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ampwise.errors import BadInput, UnknownName
from ampwise.train.precision.policy import named_modules
from ampwise.tune.align.data_flow import Chain, find_chains, modules_taken_apart
from ampwise.tune.align.layers import KEPT, MASKED, SLICED, PaddedEmbedding, PaddedLinear
from ampwise.tune.align.padding_plan import PaddedWeight, Padding, PaddingRequest, UnpaddedLayer
from ampwise.tune.align.weight_readers import find_weight_readers

__all__ = ["plan_padding"]

SMALL = 64  # sizes below this are left: nothing to gain
# Outside of a chain, padding copies inputs and gradients of outputs. On an H200, moving a value takes as long as about
# a hundred terms of a 16-bit matmul, so one with fewer terms than this would gain nothing.
THIN = 256
CHANNELS = 4  # of an image: libraries pad those themselves


def plan_padding(model: nn.Module, request: PaddingRequest) -> Padding:
    """Plan the padding of a model, without changing it."""
    return _PaddingPlanner(model, request).plan()


class _PaddingPlanner:
    def __init__(self, model: nn.Module, request: PaddingRequest) -> None:
        self._request = request
        self._by_name = named_modules(model)
        self._names: dict[nn.Module, str] = {}  # the first name of each module
        for name, module in self._by_name.items():
            self._names.setdefault(module, name)
        self._places = Counter(self._by_name.values())
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}  # users of a parameter, by its id
        for module in self._names:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._users.setdefault(id(parameter), []).append((module, name))
        self._overlapping = _overlapping(self._names)
        self._readers = find_weight_readers(self._names)
        self._raw = {key for key, reader in self._readers.items() if not reader.doubt}
        self._asked = self._matching(request.only)
        self._head = self._head_named(request.head)
        self._into, self._from = self._chained()

    # --- what was asked --------------------------------------------------------------------------------------------

    def _matching(self, patterns: Sequence[str]) -> set[nn.Module] | None:
        if not patterns:
            return None
        found: set[nn.Module] = set()
        for pattern in patterns:
            matching = {module for name, module in self._by_name.items() if fnmatchcase(name, pattern)}
            if not matching:
                raise self._unknown(pattern)
            found |= {inner for module in matching for inner in module.modules()}
        return found

    def _head_named(self, name: str | None) -> nn.Module | None:
        if name is None:
            return None
        head = self._by_name.get(name)
        if head is None:
            raise self._unknown(name)
        if not isinstance(head, nn.Linear | nn.Embedding):
            raise BadInput(
                f"pad_(head={name!r}): that is a {type(head).__name__}. The head is the nn.Linear that makes the "
                "logits, or the nn.Embedding whose weight does."
            )
        return head

    def _unknown(self, name: str) -> UnknownName:
        return UnknownName("module", name, filter(None, self._by_name), listing="They are model.named_modules().")

    # --- what is possible ------------------------------------------------------------------------------------------

    def _chained(self) -> tuple[dict[nn.Module, Chain], dict[nn.Module, Chain]]:
        """Return chains whose hidden size can stay padded, by the layer they end in, and by those they start from."""
        apart = {id(used) for module in self._names for used in modules_taken_apart(module)}
        found = (chain for module in self._names if id(module) not in apart for chain in find_chains(module))
        usable = [chain for chain in found if self._is_usable(chain)]
        return {chain.into: chain for chain in usable}, {each: chain for chain in usable for each in chain.sources}

    def _is_usable(self, chain: Chain) -> bool:
        """Whether its size is misaligned, all its layers can be padded, and nothing else shares them."""
        width = _size(chain.into)[1]
        off = self._request.better(width) != width and all(_gives_width(source) == width for source in chain.sources)
        return off and all(self._is_free(each) for each in (*chain.sources, chain.into))

    def _is_free(self, layer: nn.Module) -> bool:
        asked = self._asked is None or layer in self._asked
        return asked and self._places[layer] == 1 and self._is_alone(layer) and self._refusal(layer) is None

    def _is_alone(self, layer: nn.Module) -> bool:
        return all(len(self._users[id(parameter)]) == 1 for parameter in layer.parameters(recurse=False))

    def _refusal(self, layer: nn.Module) -> str | None:
        """Return why a layer cannot be padded, whatever its sizes."""
        return self._refused_kind(layer) or self._refused_use(layer)

    def _refused_kind(self, layer: nn.Module) -> str | None:
        if isinstance(layer, _ConvNd):
            return "a convolution; only linear layers and embeddings are padded"
        if type(layer) not in (nn.Linear, nn.Embedding):
            return f"a {type(layer).__name__}, which may use its weight differently from nn.Linear"
        if "forward" in vars(layer):
            return "its forward has been replaced, for example by a policy: pad first"
        weight = layer._parameters.get("weight")
        if weight is None:
            return "its weight is not a parameter (it is computed)"
        if type(weight) not in (nn.Parameter, FakeTensor) or not weight.is_floating_point():
            return f"its weight is a {type(weight.data).__name__} of {weight.dtype}"
        return None

    def _refused_use(self, layer: nn.Module) -> str | None:
        taken = self._refused_reading(layer)
        if taken is not None:
            return taken
        for own, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in self._overlapping:
                return f"its {own} shares memory with another tensor of the model: make them one parameter"
            for other, name in self._users[id(parameter)]:
                together = own == name == "weight" and type(other) in (nn.Linear, nn.Embedding)
                if other is not layer and not together:
                    return f"it shares its {own} with {self._names[other] or type(other).__name__}"
        return None

    def _refused_reading(self, layer: nn.Module) -> str | None:
        reader = self._readers.get(id(layer))
        if reader is None or (layer is self._head and _looks_up(layer)):
            return None
        code = f"the code of {type(reader.module).__name__}"
        if reader.doubt:
            is_asked = self._asked is not None and layer in self._asked
            return None if is_asked else f"{code} {reader.doubt} its weight: if it does not, name the layer in only="
        may = f": if that makes the logits, pad_(model, head={self._names[layer]!r})"
        return f"{code} reads its weight directly{may if _looks_up(layer) else ''}"

    # --- what is done ----------------------------------------------------------------------------------------------

    def plan(self) -> Padding:
        steps: list[PaddedWeight] = []
        left: list[UnpaddedLayer] = []
        for layer, name in self._names.items():
            if isinstance(layer, PaddedLinear | PaddedEmbedding) or any(layer in step.layers for step in steps):
                continue
            if not isinstance(layer, nn.Linear | nn.Embedding | _ConvNd) or not self._is_off(layer):
                continue
            done = self._step_for(layer)
            if isinstance(done, PaddedWeight):
                steps.append(done)
            elif self._asked is None or layer in self._asked:
                needs_head = _looks_up(layer) and id(layer) in self._raw and layer is not self._head
                left.append(UnpaddedLayer(name=name, size=_size(layer), why=done, needs_head=needs_head))
        self._check_logits(steps)
        return Padding(padded=tuple(steps), left=tuple(left))

    def _is_off(self, layer: nn.Module) -> bool:
        sizes = _size(layer)
        if isinstance(layer, _ConvNd):
            return any(size > CHANNELS and self._request.better(size) != size for size in sizes)
        if isinstance(layer, nn.Embedding) and not self._multiplies(layer):
            return layer in self._from and self._request.better(sizes[1]) != sizes[1]  # its rows are only looked up
        return any(self._request.better(size) != size for size in sizes)

    def _multiplies(self, embedding: nn.Module) -> bool:
        """Whether its weight is also used in a matmul."""
        shared = self._users.get(id(embedding._parameters.get("weight")), [])
        return embedding is self._head or id(embedding) in self._raw or any(type(o) is nn.Linear for o, _ in shared)

    def _step_for(self, layer: nn.Module) -> PaddedWeight | str:
        group = self._group(layer)
        for member in group:
            refusal = self._refusal(member)
            if refusal is not None:
                return refusal if member is layer else f"it shares its weight with {self._names[member]}: {refusal}"
        if self._asked is not None and not self._asked.issuperset(group):
            return "not selected by only=" if layer not in self._asked else "a layer tied to it is not in only="
        before = _size(group[0])
        rows, columns, why = self._sides(group, before)
        if (rows, columns) == before:
            return why
        return PaddedWeight(
            names=tuple(self._names[member] for member in group),
            layers=tuple(group),
            before=before,
            after=(rows, columns),
            gives=self._gives(group),
            tied_by_code=any(member is self._head or id(member) in self._raw for member in group if _looks_up(member)),
        )

    def _group(self, layer: nn.Module) -> list[nn.Module]:
        """Return the layers that share this layer's weight; linear layers first."""
        weight = layer._parameters.get("weight")
        users = [module for module, name in self._users.get(id(weight), []) if name == "weight"]
        return sorted(users, key=lambda module: isinstance(module, nn.Embedding)) if layer in users else [layer]

    def _sides(self, group: Sequence[nn.Module], before: tuple[int, int]) -> tuple[int, int, str]:
        """Return rows and columns after padding, and why a misaligned side is left."""
        layer = group[0]
        rows, columns = (self._request.better(size) for size in before)
        if _looks_up(layer) and not self._multiplies(layer):
            return before[0], columns, ""  # part of a chain
        free_rows, free_columns = layer in self._from, layer in self._into
        is_asked = self._asked is not None or self._head in group
        why = "" if is_asked else self._too_small(before, (rows, columns), free_rows, free_columns)
        if why:  # a matmul with one misaligned side is slow, however well aligned the other is
            rows = rows if free_rows else before[0]
            columns = columns if free_columns else before[1]
        return rows, columns, why

    def _too_small(self, before: tuple[int, int], after: tuple[int, int], free_rows: bool, free_columns: bool) -> str:
        (rows, columns), (new_rows, new_columns) = before, after
        for size, new, other, free, what in (
            (rows, new_rows, columns, free_rows, "outputs"),
            (columns, new_columns, rows, free_columns, "inputs"),
        ):
            if size == new or free:
                continue
            if size < SMALL:
                return f"{size} {what} are too few to gain"
            if other < THIN:
                return f"too thin: padding {rows} outputs by {columns} inputs gains less than the copies cost"
        return ""

    def _gives(self, group: Sequence[nn.Module]) -> str:
        if group[0] in self._from:
            return KEPT
        return MASKED if self._request.logits == MASKED and self._is_head(group) else SLICED

    def _is_head(self, group: Sequence[nn.Module]) -> bool:
        return self._head in group if self._head is not None else len({type(member) for member in group}) == 2

    def _check_logits(self, steps: Iterable[PaddedWeight]) -> None:
        masked = [step.gives for step in steps] + [getattr(module, "logits", "") for module in self._names]
        masked += [module.gives for module in self._names if isinstance(module, PaddedLinear)]
        if self._request.logits == MASKED and MASKED not in masked:
            raise BadInput(
                "pad_(logits='masked'): no padded layer makes the logits. Name the layer that makes them, such as "
                "head='lm_head'."
            )


def _overlapping(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters and buffers that share memory with others, as when tied by ``.data``."""
    there: dict[tuple[torch.device, int], set[int]] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                start = (
                    0
                    if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
                    else tensor.untyped_storage().data_ptr()
                )
                there.setdefault((tensor.device, start), set()).add(id(tensor))
    return {each for (_, start), found in there.items() if start and len(found) > 1 for each in found}


def _size(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    assert isinstance(layer, _ConvNd)
    return layer.out_channels, layer.in_channels


def _gives_width(layer: nn.Module) -> int:
    return layer.embedding_dim if isinstance(layer, nn.Embedding) else layer.out_features  # type: ignore[return-value]


def _looks_up(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Embedding
