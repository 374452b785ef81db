"""Which layers of a model become FP8, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ampwise.engine.precision.policy import named_modules, upwards
from ampwise.errors import UnknownName
from ampwise.float8.casting import ALIGNMENT
from ampwise.float8.layer import is_fitted
from ampwise.float8.prepared import is_prepared, under_policies
from ampwise.float8.recipe import TORCHAO, Fp8

__all__ = ["AS_NO_LAYER", "BY_TORCHAO", "WIDE", "Choice", "choices"]

WIDE = "bf16"  # what layers run in that are not in FP8
SMALL = 2**18  # weights, below which casting takes longer than is gained: 512 × 512
FEW = 512  # outputs, of something that by its name chooses among experts
ROUTERS = frozenset({"gate", "gating", "wg"})  # and whatever has "router" in its name
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WITH_MATRICES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase)
KEPT, ASKED = "kept by", "wide by"
AS_NO_LAYER = "no linear layer"  # why everything else is not in FP8
BY_TORCHAO = "by torchao, put there before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What becomes of a linear layer."""

    name: str
    fp8: bool
    why: str
    recipe: str = ""

    @property
    def precision(self) -> str:
        return "fp8" if self.fp8 else WIDE

    @property
    def is_asked(self) -> bool:
        """A policy or Fp8 says that it is to be wide."""
        return self.why.startswith((KEPT, ASKED))


def choices(model: nn.Module, kept: Mapping[nn.Module, str], fp8: Fp8) -> dict[nn.Linear, Choice]:
    """Of each linear layer in a model. ``kept``: modules that a policy has in another precision, by pattern."""
    named = named_modules(model)
    _refuse_unknown(fp8, named)
    seen = _Model(named, kept, fp8)
    found: dict[nn.Linear, Choice] = {}
    for name, module in named.items():
        if isinstance(module, nn.Linear) and module not in found:  # of several names the first is said
            found[module] = seen.choice(name, module)
    return found


class _Model:
    """What has to be known of all modules to judge one."""

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

    def choice(self, name: str, module: nn.Linear) -> Choice:
        why = next(filter(None, self._asked_wide(name)), None)
        if why is None and is_prepared(module):
            return Choice(name=name, fp8=True, why=BY_TORCHAO, recipe=TORCHAO)
        if why is None:
            why = next(filter(None, self._impossible(name, module)), None)
        if why is None and not _matches(name, self._fp8.narrow):
            why = next(filter(None, self._unwise(name, module)), None)
        if why is not None:
            return Choice(name=name, fp8=False, why=why)
        return Choice(name=name, fp8=True, why=f"{self._fp8.recipe} scaling", recipe=self._fp8.recipe)

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
        yield "its weight is another module's too" if shared else None
        dtype = module.weight.dtype
        yield None if dtype in DTYPES else f"its weight is in {str(dtype).removeprefix('torch.')}"
        off = [size for size in (module.in_features, module.out_features) if size % ALIGNMENT or not size]
        sizes = " and ".join(map(str, off))
        yield f"{sizes}: no multiple of {ALIGNMENT}, see ampwise.pad_" if off else None

    def _unwise(self, name: str, module: nn.Linear) -> Iterator[str | None]:
        yield "first layer: it sees the data" if module is self._first else None
        yield "last layer: the loss sees it" if module is self._last else None
        yield "a router: what it chooses is discrete" if _is_router(name, module) else None
        weights = module.in_features * module.out_features
        yield f"small: {weights} weights gain less than casting costs" if weights < SMALL else None

    def _kept_by(self, name: str) -> str | None:
        """Whether a policy has it, or a module around it, in a precision of its own."""
        modules = (self._named.get(each) for each in upwards(name))
        return next((self._kept[module] for module in modules if module is not None and module in self._kept), None)


def _matches(name: str, patterns: Iterable[str]) -> str | None:
    """The pattern that it, or a module around it, is called by."""
    names = [*upwards(name)]
    return next((pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)), None)


def _forward_of_its_own(module: nn.Linear) -> str | None:
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    put_on = under_policies(module)
    if put_on is None or is_fitted(module) or getattr(put_on, "__func__", None) is nn.Linear.forward:
        return None
    return "a forward of its own was put on it"


def _uses_inside(module: nn.Module | None) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _is_router(name: str, module: nn.Linear) -> bool:
    own = name.rpartition(".")[2]
    return ("router" in name or own in ROUTERS) and module.out_features <= FEW


def _is_in_a_stack(name: str, named: Mapping[str, nn.Module]) -> bool:
    """One of several modules alike, numbered: then it is neither the first nor the last layer of the model.

    A GPT whose head is its embedding ends, by its modules, in a block that is like the others.
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
