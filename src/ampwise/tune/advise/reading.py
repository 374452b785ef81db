"""A model before it runs: its size, its kind as its modules suggest it, and the parts that 16 bits may hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.rules.evidence.choice.model import ModelFacts, ModelPart
from ampwise.train.precision.policy import named_modules
from ampwise.tune.train_case import load_factory, make_factory

__all__ = ["read", "read_module"]

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d)
LOSSES = (nn.modules.loss._Loss,)

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
    parts = tuple(part for part in _parts(model, modules) if part is not None)
    return ModelFacts(parameters=trained or None, kind=_kind(modules, parts), guessed=True, name=name, parts=parts)


def _parts(model: nn.Module, modules: dict[str, nn.Module]) -> Iterable[ModelPart | None]:
    has_experts = any(_tail(name) in EXPERTS for name in modules)

    def of(kind: str, belongs: Callable[[str, nn.Module], bool]) -> ModelPart | None:
        found = {name: module for name, module in modules.items() if name and belongs(name, module)}
        if not found:
            return None
        classes = tuple(dict.fromkeys(type(module).__name__ for module in found.values()))
        return ModelPart(kind=kind, modules=tuple(found), classes=classes, patterns=_patterns(found, modules))

    yield of("router", lambda name, module: _is_router(name, module, has_experts))
    yield of("norm", lambda name, module: isinstance(module, NORMS))
    yield of("norm by hand", lambda name, module: _is_norm_by_hand(module))
    yield of("batch norm", lambda name, module: isinstance(module, BATCH_NORMS))
    yield of("softmax", lambda name, module: isinstance(module, SOFTMAXES))
    yield of("logits", lambda name, module: _tail(name) in HEADS and isinstance(module, nn.Linear))
    yield of("rotary", lambda name, module: _tail(name) in ROTARY)
    yield of("loss", lambda name, module: isinstance(module, LOSSES))
    yield of("bce", lambda name, module: isinstance(module, nn.BCELoss))
    yield _temperature(model)


def _is_router(name: str, module: nn.Module, has_experts: bool) -> bool:
    """By its name; a gate is one only beside experts, as gated layers have gates too."""
    tail = _tail(name)
    return tail == "router" or "router" in type(module).__name__.lower() or (has_experts and tail in ROUTERS)


def _is_norm_by_hand(module: nn.Module) -> bool:
    """A norm that torch does not have: autocast knows its operations, but not it."""
    torchs = type(module).__module__.startswith("torch.")
    return not torchs and type(module).__name__.lower().endswith("norm") and next(module.children(), None) is None


def _temperature(model: nn.Module) -> ModelPart | None:
    names = tuple(name for name, parameter in model.named_parameters() if _tail(name) in TEMPERATURES)
    return ModelPart(kind="temperature", modules=names) if names else None


def _kind(modules: dict[str, nn.Module], parts: Iterable[ModelPart]) -> str | None:
    """The first that fits."""
    kinds = {part.kind for part in parts}
    attends = any(_attends(module) for module in modules.values())
    convolves = _weights(modules, CONVOLUTIONS) > _weights(modules, (nn.Linear,))
    tails = {_tail(name) for name in modules}
    fits = {
        "moe": bool(tails & EXPERTS) and "router" in kinds,
        "gan": {"generator", "discriminator"} <= tails,
        "contrastive": "temperature" in kinds,
        "diffusion": bool(tails & TIME_STEPS),
        "cnn": convolves,
        "transformer": attends,
        "rnn": any(isinstance(module, RECURRENT) for module in modules.values()),
        "mlp": any(isinstance(module, nn.Linear) for module in modules.values()),
    }
    return next((kind for kind, fit in fits.items() if fit), None)


def _attends(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    named = any(_tail(child).startswith(("attn", "attention", "self_attn")) for child, _ in module.named_children())
    return isinstance(module, nn.MultiheadAttention) or "attention" in name or "transformer" in name or named


def _weights(modules: dict[str, nn.Module], kinds: tuple[type[nn.Module], ...]) -> int:
    chosen = (module for module in modules.values() if isinstance(module, kinds))
    return sum(parameter.numel() for module in chosen for parameter in module.parameters(recurse=False))


def _patterns(found: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    """Globs for these names: ``*.router`` where every module of that name is meant, else the names."""
    names = list(found)
    patterns: dict[str, None] = {}
    for name in names:
        glob = f"*.{_tail(name)}"
        alike = [other for other in modules if other.endswith(glob[1:])]
        whole = "." in name and len(alike) > 1 and set(alike) <= set(names)
        patterns[glob if whole else name] = None
    return tuple(patterns)


def _tail(name: str) -> str:
    return name.rpartition(".")[2]
