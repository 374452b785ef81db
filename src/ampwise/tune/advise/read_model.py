"""A model before it runs: its size, its kind as its modules suggest it, and the parts that 16 bits may hurt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.train.precision.policy import named_modules
from ampwise.tune.advise.model import ModelFacts, ModelPart
from ampwise.tune.train_case import load_factory, make_factory

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

ATTENTION = ("attn", "attention", "self_attn")
ROUTERS = frozenset({"router", "gate", "gating", "switch", "wg"})
EXPERTS = frozenset({"experts", "expert"})
HEADS = frozenset({"lm_head", "head", "classifier", "output_projection", "logits"})
TEMPERATURES = frozenset({"logit_scale", "temperature", "log_temperature", "tau", "logit_bias"})
ROTARY = frozenset({"rotary_emb", "rotary", "rope", "rotary_embedding"})
TIME_STEPS = frozenset({"time_embed", "time_embedding", "time_mlp", "time_proj", "timestep_embedder", "t_embedder"})


def read(model: Any) -> ModelFacts:
    """A module as it is, or what a function makes; that is made on the meta device, without memory."""
    if isinstance(model, nn.Module):
        return read_module(model, type(model).__name__)
    factory = load_factory(model) if isinstance(model, str) else make_factory(model)
    return read_module(factory.make(device=torch.device("meta")).model, factory.name)


def read_module(model: nn.Module, name: str) -> ModelFacts:
    """Its facts; nothing is run."""
    lazy = [named for named, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise BadInput(f"{name}: {lazy[0]} has no size yet (a lazy module). Run the model once, then retry.")
    modules = named_modules(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = tuple(_parts(model, modules))
    return ModelFacts(parameters=trained or None, kind=_kind(modules, parts), guessed=True, name=name, parts=parts)


def _parts(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[ModelPart]:
    has_experts = any(_tail(name) in EXPERTS for name in modules)

    def is_router(name: str, module: nn.Module) -> bool:
        # A gate is a router only beside experts, as gated layers have gates too.
        known = _tail(name) == "router" or "router" in type(module).__name__.lower()
        return known or (has_experts and _tail(name) in ROUTERS)

    def is_norm_by_hand(name: str, module: nn.Module) -> bool:
        # A norm that torch does not have: autocast knows its operations, but not it.
        torchs, leaf = type(module).__module__.startswith("torch."), next(module.children(), None) is None
        return not torchs and leaf and type(module).__name__.lower().endswith("norm")

    belongs: dict[str, Callable[[str, nn.Module], bool]] = {
        "router": is_router,
        "norm": lambda name, module: isinstance(module, NORMS),
        "norm by hand": is_norm_by_hand,
        "batch norm": lambda name, module: isinstance(module, BATCH_NORMS),
        "softmax": lambda name, module: isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d),
        "logits": lambda name, module: _tail(name) in HEADS and isinstance(module, nn.Linear),
        "rotary": lambda name, module: _tail(name) in ROTARY,
        "loss": lambda name, module: isinstance(module, nn.modules.loss._Loss),
        "bce": lambda name, module: isinstance(module, nn.BCELoss),
    }
    for kind, of_kind in belongs.items():
        found = {name: module for name, module in modules.items() if name and of_kind(name, module)}
        if found:
            classes = tuple(dict.fromkeys(type(module).__name__ for module in found.values()))
            yield ModelPart(kind=kind, modules=tuple(found), classes=classes, patterns=_patterns(found, modules))
    temperatures = tuple(name for name, _ in model.named_parameters() if _tail(name) in TEMPERATURES)
    if temperatures:
        yield ModelPart(kind="temperature", modules=temperatures)


def _kind(modules: dict[str, nn.Module], parts: Iterable[ModelPart]) -> str | None:
    """Return the first kind that fits."""
    kinds, tails = {part.kind for part in parts}, {_tail(name) for name in modules}

    def weights(layer: type[nn.Module]) -> int:
        chosen = (module for module in modules.values() if isinstance(module, layer))
        return sum(parameter.numel() for module in chosen for parameter in module.parameters(recurse=False))

    fits = {
        "moe": bool(tails & EXPERTS) and "router" in kinds,
        "gan": {"generator", "discriminator"} <= tails,
        "contrastive": "temperature" in kinds,
        "diffusion": bool(tails & TIME_STEPS),
        "cnn": weights(nn.modules.conv._ConvNd) > weights(nn.Linear),
        "transformer": any(
            isinstance(module, nn.MultiheadAttention)
            or any(word in type(module).__name__.lower() for word in ("attention", "transformer"))
            or any(_tail(child).startswith(ATTENTION) for child, _ in module.named_children())
            for module in modules.values()
        ),
        "rnn": any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in modules.values()),
        "mlp": any(isinstance(module, nn.Linear) for module in modules.values()),
    }
    return next((kind for kind, fit in fits.items() if fit), None)


def _patterns(found: Collection[str], modules: Iterable[str]) -> tuple[str, ...]:
    """Globs for these names: ``*.router`` where every module of that name is meant, else the names."""
    patterns: dict[str, None] = {}
    for name in found:
        glob = f"*.{_tail(name)}"
        alike = {other for other in modules if other.endswith(glob[1:])}
        whole = "." in name and len(alike) > 1 and alike <= set(found)
        patterns[glob if whole else name] = None
    return tuple(patterns)


def _tail(name: str) -> str:
    return name.rpartition(".")[2]
