"""Plan what ``pad_`` pads in a model without changing what it computes, what it leaves, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput, UnknownName
from ampwise.finding.terminal import printable, shortened
from ampwise.train.precision.policy import named_modules
from ampwise.tune.align.data_flow import Chain, find_chains, modules_taken_apart
from ampwise.tune.align.layers import KEPT, MASKED, SLICED, PaddedEmbedding, PaddedLinear
from ampwise.tune.align.matmul_recorder import CHANNELS
from ampwise.tune.align.matmuls import better_size, multiple_for
from ampwise.tune.align.module_source import find_weight_readers

SMALL = 64  # sizes below this are left: nothing to gain
# Outside of a chain, padding copies inputs and gradients of outputs. On an H200, moving a value takes as long as about
# a hundred terms of a 16-bit matmul, so one with fewer terms than this would gain nothing.
THIN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedWeight:
    """A weight to pad, with the layers that use it."""

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...] = field(repr=False, compare=False)
    before: tuple[int, int]  # outputs and inputs of a linear layer; rows and columns of an embedding
    after: tuple[int, int]
    gives: str
    tied_by_code: bool = False  # an embedding whose weight the model's code multiplies with

    @property
    def how(self) -> str:
        """What happens to inputs and outputs."""
        if self.gives == KEPT:
            return "stays padded up to the next layer"
        if self.before[0] == self.after[0]:
            return "takes padded inputs"
        return "logits masked" if self.gives == MASKED else "outputs sliced"

    @property
    def added(self) -> int:
        """Number of padding elements in the weight."""
        return self.after[0] * self.after[1] - self.before[0] * self.before[1]

    def as_dict(self) -> dict[str, Any]:
        parts = {"names": list(self.names), "before": list(self.before), "after": list(self.after)}
        return parts | {"how": self.how, "added": self.added}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpaddedLayer:
    """A misaligned layer that is left as it is."""

    name: str
    size: tuple[int, int]
    why: str
    needs_head: bool = False  # it can be padded if named as the head

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "size": list(self.size), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What ``pad_`` has done; ``print`` shows it."""

    padded: tuple[PaddedWeight, ...]
    left: tuple[UnpaddedLayer, ...]

    def __repr__(self) -> str:
        return shortened(f"<Padding: {str(self).partition(chr(10))[0]}>")

    def __str__(self) -> str:
        if not self.padded and not self.left:
            return "nothing to pad: every size is aligned"
        added = sum(step.added for step in self.padded)
        lines = [f"{len(self.padded)} weights padded, {added:,} zeros added"]
        for step in self.padded:
            sizes = " → ".join("×".join(map(str, size)) for size in (step.before, step.after))
            lines.append(f"  {_named(*step.names)}: {sizes}, {step.how}")
        lines += [f"  {_named(each.name)}: left at {'×'.join(map(str, each.size))}: {each.why}" for each in self.left]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"padded": [step.as_dict() for step in self.padded], "left": [each.as_dict() for each in self.left]}


def _named(*names: str) -> str:
    return printable(" = ".join(name or "the model" for name in names))


def plan_padding(
    model: nn.Module,
    *,
    precision: str = "bf16",
    to: int | None = None,
    only: Sequence[str] = (),
    head: str | None = None,
    logits: str = SLICED,
) -> Padding:
    """Plan the padding of a model, without changing it; the arguments are those of ``pad_``."""
    multiple_for(precision, to)
    if logits not in (SLICED, MASKED):
        raise BadInput(f"pad_(logits={logits!r}): expected 'sliced' or 'masked'.")
    padding = _PaddingPlanner(model, precision, to, only, head).plan(logits)
    if logits == MASKED:
        gives = [step.gives for step in padding.padded] + [getattr(module, "logits", "") for module in model.modules()]
        gives += [module.gives for module in model.modules() if isinstance(module, PaddedLinear)]
        if MASKED not in gives:
            raise BadInput(
                "pad_(logits='masked'): no padded layer makes the logits. Name the layer that makes them, such as "
                "head='lm_head'."
            )
    return padding


class _PaddingPlanner:
    def __init__(self, model: nn.Module, precision: str, to: int | None, only: Sequence[str], head: str | None) -> None:
        self._better = partial(better_size, precision=precision, to=to)  # the size to pad to
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
        asked: set[nn.Module] = set()
        for pattern in only:
            matching = {module for name, module in self._by_name.items() if fnmatchcase(name, pattern)}
            if not matching:
                raise self._unknown(pattern)
            asked |= {inner for module in matching for inner in module.modules()}
        self._asked = asked if only else None
        self._head = None if head is None else self._head_named(head)
        # Chains whose hidden size can stay padded, the layers they end in, and those they start from.
        apart = {id(used) for module in self._names for used in modules_taken_apart(module)}
        found = (chain for module in self._names if id(module) not in apart for chain in find_chains(module))
        chains = [chain for chain in found if self._is_usable(chain)]
        self._into = {chain.into for chain in chains}
        self._from = {source for chain in chains for source in chain.sources}

    def plan(self, logits: str) -> Padding:
        steps: list[PaddedWeight] = []
        left: list[UnpaddedLayer] = []
        for layer, name in self._names.items():
            if isinstance(layer, PaddedLinear | PaddedEmbedding) or any(layer in step.layers for step in steps):
                continue
            if not isinstance(layer, nn.Linear | nn.Embedding | _ConvNd) or not self._is_off(layer):
                continue
            done = self._step_for(layer, logits)
            if isinstance(done, PaddedWeight):
                steps.append(done)
            elif self._asked is None or layer in self._asked:
                needs_head = _looks_up(layer) and id(layer) in self._raw and layer is not self._head
                left.append(UnpaddedLayer(name=name, size=_size(layer), why=done, needs_head=needs_head))
        return Padding(padded=tuple(steps), left=tuple(left))

    # --- what was asked --------------------------------------------------------------------------------------------

    def _head_named(self, name: str) -> nn.Module:
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

    def _is_usable(self, chain: Chain) -> bool:
        """Whether its size is misaligned, all its layers can be padded, and nothing else shares them."""
        width = _size(chain.into)[1]
        given = [_size(source)[1 if isinstance(source, nn.Embedding) else 0] for source in chain.sources]
        if self._better(width) == width or any(size != width for size in given):
            return False
        for layer in (*chain.sources, chain.into):
            asked = self._asked is None or layer in self._asked
            shared = any(len(self._users[id(parameter)]) > 1 for parameter in layer.parameters(recurse=False))
            if not asked or shared or self._places[layer] > 1 or self._refusal(layer) is not None:
                return False
        return True

    def _refusal(self, layer: nn.Module) -> str | None:
        """Return why a layer cannot be padded, whatever its sizes."""
        refused = _refused_kind(layer) or self._refused_reading(layer)
        if refused is not None:
            return refused
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

    def _is_off(self, layer: nn.Module) -> bool:
        sizes: tuple[int, ...] = _size(layer)
        if isinstance(layer, _ConvNd):
            sizes = tuple(size for size in sizes if size > CHANNELS)  # libraries pad an image's themselves
        elif isinstance(layer, nn.Embedding) and not self._multiplies(layer):
            sizes = sizes[1:] if layer in self._from else ()  # its rows are only looked up
        return any(self._better(size) != size for size in sizes)

    def _multiplies(self, embedding: nn.Module) -> bool:
        """Whether its weight is also used in a matmul."""
        shared = self._users.get(id(embedding._parameters.get("weight")), [])
        return embedding is self._head or id(embedding) in self._raw or any(type(o) is nn.Linear for o, _ in shared)

    # --- what is done ----------------------------------------------------------------------------------------------

    def _step_for(self, layer: nn.Module, logits: str) -> PaddedWeight | str:
        """Return how the weight of a layer is padded, or why it is not."""
        weight = layer._parameters.get("weight")
        users = [module for module, name in self._users.get(id(weight), []) if name == "weight"]
        group = sorted(users, key=lambda module: isinstance(module, nn.Embedding)) if layer in users else [layer]
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
        is_head = self._head in group if self._head is not None else len({type(member) for member in group}) == 2
        return PaddedWeight(
            names=tuple(self._names[member] for member in group),
            layers=tuple(group),
            before=before,
            after=(rows, columns),
            gives=KEPT if group[0] in self._from else logits if is_head else SLICED,
            tied_by_code=any(member is self._head or id(member) in self._raw for member in group if _looks_up(member)),
        )

    def _sides(self, group: Sequence[nn.Module], before: tuple[int, int]) -> tuple[int, int, str]:
        """Return rows and columns after padding, and why a misaligned side is left."""
        layer = group[0]
        rows, columns = (self._better(size) for size in before)
        if _looks_up(layer) and not self._multiplies(layer):
            return before[0], columns, ""  # part of a chain
        if self._asked is not None or self._head in group:
            return rows, columns, ""
        free_rows, free_columns = layer in self._from, layer in self._into
        why = ""
        if rows != before[0] and not free_rows:
            why = _too_small(before, before[0], "outputs", other=before[1])
        if not why and columns != before[1] and not free_columns:
            why = _too_small(before, before[1], "inputs", other=before[0])
        if why:  # a matmul with one misaligned side is slow, however well aligned the other is
            rows = rows if free_rows else before[0]
            columns = columns if free_columns else before[1]
        return rows, columns, why


def _too_small(weight: tuple[int, int], size: int, what: str, *, other: int) -> str:
    if size < SMALL:
        return f"{size} {what} are too few to gain"
    if other < THIN:
        return f"too thin: padding {weight[0]} outputs by {weight[1]} inputs gains less than the copies cost"
    return ""


def _refused_kind(layer: nn.Module) -> str | None:
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


def _overlapping(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters and buffers that share memory with others, as when tied by ``.data``."""
    there: dict[tuple[torch.device, int], set[int]] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or isinstance(tensor, FakeTensor) or is_lazy(tensor) or tensor.layout != torch.strided:
                continue
            there.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), set()).add(id(tensor))
    return {each for (_, start), found in there.items() if start and len(found) > 1 for each in found}


def _size(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    assert isinstance(layer, _ConvNd)
    return layer.out_channels, layer.in_channels


def _looks_up(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Embedding
