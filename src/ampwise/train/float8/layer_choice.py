"""Choose which layers of a model run in FP8, with the reason for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ampwise.errors import UnknownName
from ampwise.train.float8.fp8_cast import ALIGNMENT
from ampwise.train.float8.layer_forward import has_fp8_forward
from ampwise.train.float8.recipe import TORCHAO, Fp8
from ampwise.train.precision.call_in_precision import is_wrapped_forward, wrap_forward
from ampwise.train.precision.policy import name_and_parents, named_modules

__all__ = [
    "CHOICES_IN_USE",
    "GATHERED_IN_FP8",
    "LayerChoice",
    "choose_layers",
    "describe_layers",
    "gathers_in_fp8",
    "is_prepared",
    "torchao_layers",
    "use_fp8_forward",
    "use_linear_forward",
]

OTHER_PRECISION = "bf16"  # the precision of layers that are not in FP8
SMALL = 2**18  # weights (512 × 512), below which casting takes longer than FP8 saves
FEW = 512  # outputs at most, of a layer whose name says that it is a router
ROUTERS = frozenset({"gate", "gating", "wg"})  # and names that contain "router"
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WITH_MATRICES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase)
KEPT, ASKED = "kept by", "wide by"
NOT_LINEAR = "not a linear layer"
TORCHAO_LAYER_REASON = "by torchao, converted before"
TORCHAO_LAYER = "Float8Linear"
GATHERED_IN_FP8 = (  # why a layer cannot run in BF16
    "FSDP2 gathers its weights in FP8. Prepare the model with prepare(model, all_gather=False), or not at all."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Whether a linear layer runs in FP8, and why."""

    name: str
    fp8: bool
    why: str
    recipe: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether a policy or ``Fp8`` requested BF16 for it."""
        return self.why.startswith((KEPT, ASKED))


CHOICES_IN_USE: WeakKeyDictionary[nn.Linear, LayerChoice] = WeakKeyDictionary()  # of models in training


def choose_layers(model: nn.Module, kept: Mapping[nn.Module, str], fp8: Fp8) -> dict[nn.Linear, LayerChoice]:
    """Return the choice for each linear layer of a model. ``kept``: modules that a policy keeps, with its pattern."""
    named = named_modules(model)
    for pattern in (*fp8.wide, *fp8.narrow):
        if not any(name and fnmatchcase(name, pattern) for name in named):
            raise UnknownName(
                "module",
                pattern,
                filter(None, named),
                listing="Names in Fp8(wide=..., narrow=...) are those of model.named_modules(); * matches any part.",
            )
    owners: dict[int, set[int]] = {}  # modules by parameter
    for module in named.values():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    in_order = [module for module in named.values() if isinstance(module, WITH_MATRICES)]
    alone = {module for name, module in named.items() if not _is_in_a_stack(name, named)}
    first, last = (in_order[place] if in_order and in_order[place] in alone else None for place in (0, -1))

    found: dict[nn.Linear, LayerChoice] = {}
    for name, module in named.items():
        if not isinstance(module, nn.Linear) or module in found:  # of several names, use the first
            continue
        containing = [*name_and_parents(name)]
        kept_by = next((kept[named[each]] for each in containing if named.get(each) in kept), None)
        wide_by = _matching(fp8.wide, containing)
        if kept_by or wide_by:
            why = f"{KEPT} {kept_by!r}" if kept_by else f"{ASKED} {wide_by!r}"
        elif is_prepared(module):
            found[module] = LayerChoice(name=name, fp8=True, why=TORCHAO_LAYER_REASON, recipe=TORCHAO)
            continue
        else:
            why = _why_impossible(module, named.get(name.rpartition(".")[0]), owners)
            if not why and not _matching(fp8.narrow, containing):
                why = _why_unwise(name, module, first, last)
        if why:
            found[module] = LayerChoice(name=name, fp8=False, why=why)
        else:
            found[module] = LayerChoice(name=name, fp8=True, why=f"{fp8.recipe} scaling", recipe=fp8.recipe)
    return found


def _matching(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first pattern that matches one of the names."""
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), None)


def _why_impossible(module: nn.Linear, parent: nn.Module | None, owners: Mapping[int, set[int]]) -> str:
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} overrides forward"
    if not (forward_without_policies(module) is None or has_fp8_forward(module) or uses_linear_forward(module)):
        return "its forward was replaced"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses its weight without calling it"
    if any(len(owners[id(each)]) > 1 for each in module.parameters(recurse=False)):
        return "its weight is shared with another module"
    if module.weight.dtype not in DTYPES:
        return f"its weight is in {str(module.weight.dtype).removeprefix('torch.')}"
    off = [str(size) for size in (module.in_features, module.out_features) if size % ALIGNMENT or not size]
    return f"{' and '.join(off)}: not a multiple of {ALIGNMENT}, see ampwise.pad_" if off else ""


def _why_unwise(name: str, module: nn.Linear, first: nn.Module | None, last: nn.Module | None) -> str:
    if module is first:
        return "first layer: it reads the data"
    if module is last:
        return "last layer: its output goes into the loss"
    if ("router" in name or name.rpartition(".")[2] in ROUTERS) and module.out_features <= FEW:
        return "a router: its choices are discrete"
    weights = module.in_features * module.out_features
    return f"small: casting {weights} weights costs more than FP8 saves" if weights < SMALL else ""


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


def describe_layers(model: nn.Module, kept: Mapping[nn.Module, str]) -> dict[nn.Module, tuple[str, str]]:
    """Return precision and reason of each module: as it runs now, or else as the default recipe would choose."""
    described = dict.fromkeys(model.modules(), (OTHER_PRECISION, NOT_LINEAR))
    for module, choice in choose_layers(model, kept, Fp8()).items():
        choice = CHOICES_IN_USE.get(module, choice)
        described[module] = ("fp8" if choice.fp8 else OTHER_PRECISION, choice.why)
    return described


# Layers that ``prepare`` converted to torchao's. Their class, with its FP8 forward, stays. To run one in BF16,
# ``nn.Linear``'s forward is installed on the module, inside the precision that a policy may have set for it.


def torchao_layers(model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
    """Return precision and reason of torchao's layers, which run in FP8 in any precision."""
    layers = (each for each in model.modules() if is_prepared(each) and not uses_linear_forward(each))
    return dict.fromkeys(layers, ("fp8", TORCHAO_LAYER_REASON))


def is_prepared(module: nn.Module) -> bool:
    """Return whether it is a torchao FP8 layer."""
    return any(each.__name__ == TORCHAO_LAYER for each in type(module).__mro__)


def gathers_in_fp8(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers its weight in FP8, so that the layer cannot run in BF16."""
    return bool(getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False))


def forward_without_policies(module: nn.Module) -> Any:
    """Return the forward installed on a module, without the wrappers of policies."""
    installed: Any = module.__dict__.get("forward")
    while is_wrapped_forward(installed) and installed.owner is not None:
        installed = installed.args[-1]
    return installed


def uses_linear_forward(module: nn.Module) -> bool:
    """Return whether ``nn.Linear``'s forward is installed on it."""
    return getattr(forward_without_policies(module), "__func__", None) is nn.Linear.forward


def use_linear_forward(module: nn.Linear) -> None:
    """Install ``nn.Linear``'s forward, unless another forward is installed."""
    region = module.__dict__.get("forward")
    if forward_without_policies(module) is None:
        module.forward = MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]
        if region is not None:
            module.forward = wrap_forward(region.args[1], module, owner=region.owner)  # type: ignore[method-assign]


def use_fp8_forward(module: nn.Module) -> None:
    """Restore the FP8 forward of its class. No policy wraps a layer that runs in FP8."""
    if uses_linear_forward(module):
        module.__dict__.pop("forward", None)
