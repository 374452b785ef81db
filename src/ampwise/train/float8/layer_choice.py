"""Choose which layers of a model run in FP8, with the reason for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ampwise.errors import UnknownName
from ampwise.train.float8.fp8_cast import ALIGNMENT
from ampwise.train.float8.layer_forward import has_fp8_forward
from ampwise.train.float8.prepared_layers import forward_without_policies, is_prepared
from ampwise.train.float8.recipe import TORCHAO, Fp8
from ampwise.train.precision.policy import name_and_parents, named_modules

__all__ = ["NOT_LINEAR", "OTHER_PRECISION", "TORCHAO_LAYER_REASON", "LayerChoice", "choose_layers"]

OTHER_PRECISION = "bf16"  # the precision of layers that are not in FP8
SMALL = 2**18  # weights (512 × 512), below which casting takes longer than FP8 saves
FEW = 512  # outputs at most, of a layer whose name says that it is a router
ROUTERS = frozenset({"gate", "gating", "wg"})  # and names that contain "router"
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WITH_MATRICES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase)
KEPT, ASKED = "kept by", "wide by"
NOT_LINEAR = "not a linear layer"
TORCHAO_LAYER_REASON = "by torchao, converted before"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Whether a linear layer runs in FP8, and why."""

    name: str
    fp8: bool
    why: str
    recipe: str = ""

    @property
    def precision(self) -> str:
        return "fp8" if self.fp8 else OTHER_PRECISION

    @property
    def is_asked(self) -> bool:
        """Whether a policy or ``Fp8`` requested BF16 for it."""
        return self.why.startswith((KEPT, ASKED))


def choose_layers(model: nn.Module, kept: Mapping[nn.Module, str], fp8: Fp8) -> dict[nn.Linear, LayerChoice]:
    """Return the choice for each linear layer of a model. ``kept``: modules that a policy keeps, with its pattern."""
    named = named_modules(model)
    _refuse_unknown(fp8, named)
    seen = _Model(named, kept, fp8)
    found: dict[nn.Linear, LayerChoice] = {}
    for name, module in named.items():
        if isinstance(module, nn.Linear) and module not in found:  # of several names, use the first
            found[module] = seen.choice(name, module)
    return found


class _Model:
    """What the choice for one layer needs to know about all modules."""

    def __init__(self, named: Mapping[str, nn.Module], kept: Mapping[nn.Module, str], fp8: Fp8) -> None:
        self._named, self._kept, self._fp8 = named, kept, fp8
        self._owners: dict[int, set[int]] = {}
        for module in named.values():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(id(module))
        by_order = [module for module in named.values() if isinstance(module, WITH_MATRICES)]
        alone = {module for name, module in named.items() if not _is_in_a_stack(name, named)}
        self._first = by_order[0] if by_order and by_order[0] in alone else None
        self._last = by_order[-1] if by_order and by_order[-1] in alone else None

    def choice(self, name: str, module: nn.Linear) -> LayerChoice:
        why = next(filter(None, self._asked_wide(name)), None)
        if why is None and is_prepared(module):
            return LayerChoice(name=name, fp8=True, why=TORCHAO_LAYER_REASON, recipe=TORCHAO)
        if why is None:
            why = next(filter(None, self._impossible(name, module)), None)
        if why is None and not _matches(name, self._fp8.narrow):
            why = next(filter(None, self._unwise(name, module)), None)
        if why is not None:
            return LayerChoice(name=name, fp8=False, why=why)
        return LayerChoice(name=name, fp8=True, why=f"{self._fp8.recipe} scaling", recipe=self._fp8.recipe)

    def _asked_wide(self, name: str) -> Iterator[str | None]:
        pattern = self._kept_by(name)
        yield f"{KEPT} {pattern!r}" if pattern else None
        pattern = _matches(name, self._fp8.wide)
        yield f"{ASKED} {pattern!r}" if pattern else None

    def _impossible(self, name: str, module: nn.Linear) -> Iterator[str | None]:
        yield _forward_of_its_own(module)
        above = self._named.get(name.rpartition(".")[0])
        yield "nn.MultiheadAttention uses its weight without calling it" if _uses_inside(above) else None
        shared = any(len(self._owners[id(each)]) > 1 for each in module.parameters(recurse=False))
        yield "its weight is shared with another module" if shared else None
        dtype = module.weight.dtype
        yield None if dtype in DTYPES else f"its weight is in {str(dtype).removeprefix('torch.')}"
        off = [size for size in (module.in_features, module.out_features) if size % ALIGNMENT or not size]
        sizes = " and ".join(map(str, off))
        yield f"{sizes}: not a multiple of {ALIGNMENT}, see ampwise.pad_" if off else None

    def _unwise(self, name: str, module: nn.Linear) -> Iterator[str | None]:
        yield "first layer: it reads the data" if module is self._first else None
        yield "last layer: its output goes into the loss" if module is self._last else None
        yield "a router: its choices are discrete" if _is_router(name, module) else None
        weights = module.in_features * module.out_features
        yield f"small: casting {weights} weights costs more than FP8 saves" if weights < SMALL else None

    def _kept_by(self, name: str) -> str | None:
        """Return the pattern by which a policy keeps this module, or one that contains it."""
        modules = (self._named.get(each) for each in name_and_parents(name))
        return next((self._kept[module] for module in modules if module is not None and module in self._kept), None)


def _matches(name: str, patterns: Iterable[str]) -> str | None:
    """Return the pattern that matches this name, or a module that contains it."""
    names = [*name_and_parents(name)]
    return next((pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)), None)


def _forward_of_its_own(module: nn.Linear) -> str | None:
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} overrides forward"
    installed = forward_without_policies(module)
    if installed is None or has_fp8_forward(module) or getattr(installed, "__func__", None) is nn.Linear.forward:
        return None
    return "its forward was replaced"


def _uses_inside(module: nn.Module | None) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _is_router(name: str, module: nn.Linear) -> bool:
    own = name.rpartition(".")[2]
    return ("router" in name or own in ROUTERS) and module.out_features <= FEW


def _is_in_a_stack(name: str, named: Mapping[str, nn.Module]) -> bool:
    """Return whether it is in a stack of numbered modules of one class: then it is not the model's first or last layer.

    A GPT whose head is tied to its embedding ends, in module order, in a block like all others.
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            member, holder = named.get(".".join(parts[: place + 1])), named.get(".".join(parts[:place]))
            if holder is not None and sum(type(each) is type(member) for each in holder.children()) > 1:
                return True
    return False


def _refuse_unknown(fp8: Fp8, named: Mapping[str, nn.Module]) -> None:
    for pattern in (*fp8.wide, *fp8.narrow):
        if not any(name and fnmatchcase(name, pattern) for name in named):
            raise UnknownName(
                "module",
                pattern,
                filter(None, named),
                listing="Names in Fp8(wide=..., narrow=...) are those of model.named_modules(); * matches any part.",
            )
