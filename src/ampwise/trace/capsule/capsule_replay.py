"""Replay the step of a capsule, with its weights, in its own precision or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.parameter import is_lazy

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.finding import Finding
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.capsule.builder import BuiltModel
from ampwise.trace.capsule.capsule_files import CapsuleContents
from ampwise.trace.diagnosis import explain
from ampwise.trace.replay import Replay, ReplayResult, ReplaySettings, ReplayStep, autocast_forced_to, tensors_of
from ampwise.trace.user_code import describe_error
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.train.precision.precision import (
    EMULATE,
    EXTRA_PRECISIONS,
    PRECISIONS,
    TrainPrecision,
    precision_named,
    precisions_of,
)
from ampwise.train.precision_plugin import make_emulation

__all__ = ["CapsuleReplay", "device_named", "load_weights", "precision_for", "replay_capsule"]

SHOWN = 3  # names in an error
REPLACEMENT = PRECISIONS["bf16"]  # replaces precisions with special layers or weights, which a newly built model lacks
NAMES = f"{', '.join(PRECISIONS)}, and {EMULATE}mxfp8 or another format"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsuleReplay:
    """Result of replaying a capsule."""

    precision: str
    device: torch.device
    as_it_was: bool  # in the original precision, on the original type of device
    ended: ReplayResult  # at a loss scale of 1
    scaled: ReplayResult | None = None  # at the original loss scale; None: not tried, or there was none
    findings: Sequence[Finding] = ()
    summed: bool = False  # there was no loss function: the outputs were summed
    remarks: Sequence[str] = ()  # differences from the original step


def replay_capsule(
    contents: CapsuleContents, built: BuiltModel, device: torch.device, requested: TrainPrecision | None = None
) -> CapsuleReplay:
    """Run the step, and explain it if it is not finite. Exceptions of the user's code become BadInput.

    requested: a precision to use instead of the capsule's, also where the model itself enables autocast.
    """
    # A capsule without a precision is from a model that manages its own, without autocast around it.
    precision = requested or precision_named(contents.precision or "fp32")
    is_replaced = requested is None and _needs_special_layers(precision.name)
    if is_replaced:
        precision = REPLACEMENT
    other = is_replaced or (requested is not None and requested.name != contents.precision)
    own_weights = f"The capsule has no weights: the replay uses those that {built.made_by}() made."
    replaced = (
        f"The step ran in {contents.precision}, with special layers or weights; this replay uses autocast to "
        f"{REPLACEMENT.name}."
    )
    try:
        for model in built.models:
            model.to(device)
            if contents.evaluating is not None:  # a frozen BatchNorm computes something else in training
                for name, module in named_modules(model).items():
                    module.training = name not in contents.evaluating
        with _policy(contents, precision, built.models):
            subject = ReplayStep(
                run=_run(contents, built, precision, device, other),
                device=device,
                models=built.models,
                batch=named_tensors(built.loss_fn, contents.args, contents.kwargs),
                precision=precision.name if other else contents.precision,
                scale=1.0 if other and not precision.scaled else contents.scale,
                random=contents.random,
                loss=None if other else contents.loss,
                step=contents.step,
                remarks=tuple(_remarks(contents, built, device, own_weights)),
            )
            with Replay(subject) as replay:
                ended = replay.plain(ReplaySettings())
                tries_scale = ended.finite and subject.scale != 1
                scaled = replay.plain(ReplaySettings(scale=subject.scale)) if tries_scale else None
            return CapsuleReplay(
                precision=subject.precision or "fp32",
                as_it_was=not other and device.type == contents.device,
                device=device,
                ended=ended,
                scaled=scaled,
                findings=() if ended.finite else explain(subject),
                summed=built.loss_fn in built.models,
                remarks=(*([] if contents.weights else [own_weights]), *([replaced] if is_replaced else [])),
            )
    except AmpwiseError:
        raise
    except Exception as error:
        raise BadInput(f"the step cannot be run again: {describe_error(error)}.") from error


def _needs_special_layers(precision: str) -> bool:
    return precision.partition(",")[0] in EXTRA_PRECISIONS


def _run(
    contents: CapsuleContents, built: BuiltModel, precision: TrainPrecision, device: torch.device, other: bool
) -> Callable[[ReplaySettings], Tensor]:
    """Return the function that runs the step.

    other: the replay uses another precision than the step did, which then also applies to autocast in the model.
    """
    if precision.recipe is None:
        arithmetic = PrecisionContexts(precision, device.type)
    else:
        policy = Policy(precision.name) if contents.policy is None else Policy.from_dict(contents.policy)
        emulation = make_emulation(policy, precision.recipe, built.models)
        arithmetic = PrecisionContexts(precision, device.type, around=emulation.on)

    def run(settings: ReplaySettings) -> Tensor:
        name = precision.name if other and settings.precision is None else None
        forced_on = device if other else torch.device("cpu")
        with torch.enable_grad(), arithmetic.pass_context(), autocast_forced_to(name, forced_on):
            with arithmetic.forward():
                returned = built.loss_fn(*contents.args, **contents.kwargs)
            loss = _loss_of(returned, built)
            if settings.goes_back_from(loss):
                with arithmetic.backward():
                    scaled = loss
                    if (
                        settings.scale != 1
                    ):  # by a tensor, as scalers do: an FP16 loss becomes FP32, and does not overflow
                        scaled = loss * torch.tensor(settings.scale, dtype=torch.float32, device=loss.device)
                    scaled.backward()
            return loss

    return run


def _loss_of(returned: Any, built: BuiltModel) -> Tensor:
    """Return the first result; for a model without a loss function, the sum of its outputs."""
    found = [each for each in tensors_of(returned) if each.requires_grad]
    if found and found[0].numel() == 1:
        return found[0]
    if found and built.loss_fn in built.models:
        return torch.stack([each.float().sum() for each in found]).sum()
    kind = f"a tensor of shape {tuple(found[0].shape)}" if found else type(returned).__name__
    raise BadInput(f"the loss function returned {kind}; expected the loss, a scalar tensor that requires gradients.")


def _remarks(contents: CapsuleContents, built: BuiltModel, device: torch.device, own_weights: str) -> Iterable[str]:
    if contents.device != device.type:
        yield f"The step ran on {contents.device}; this replay runs on {device.type}."
    version = contents.environment.get("torch")
    if version != str(torch.__version__):
        yield f"The step ran with torch {version}; this replay uses torch {torch.__version__}."
    if not contents.weights:
        yield own_weights
    if built.loss_fn in built.models:
        yield "There is no loss function: the backward pass starts at the sum of the model's outputs."


def _policy(
    contents: CapsuleContents, precision: TrainPrecision, models: Sequence[Module]
) -> AbstractContextManager[Any]:
    """Return a context that applies the policy's exceptions by module; pure FP32 has none."""
    if contents.policy is None or (precision.dtype is None and precision.recipe is None):
        return nullcontext()
    return Policy.from_dict(contents.policy).apply(models[0] if len(models) == 1 else ModuleList(models))


# --- device and precision ------------------------------------------------------------------------------------------


def device_named(requested: str | None, kind: str) -> torch.device:
    """Return the requested device; else one of the type that the step ran on; else the CPU."""
    if requested is None:
        return torch.device(kind if kind == "cuda" and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise BadInput(f"--device {requested}: not available here ({first}).") from error
    return device


def precision_for(requested: str | None, contents: CapsuleContents, device: torch.device) -> TrainPrecision | None:
    """Return the requested precision, if any; raise if the device does not support it, or the capsule's own."""
    said, name = "--precision", requested
    if name is None:
        said, name = "the capsule's precision", contents.precision or "fp32"
    try:
        precision = precision_named(name)
    except AmpwiseError as error:
        if name.startswith(EMULATE):  # that error says what is wrong with the format
            raise
        raise UnknownName("precision", name[:40], PRECISIONS, listing=f"A replay runs in {NAMES}.") from error
    if _needs_special_layers(precision.name):
        if requested is not None:
            raise BadInput(f"{said} {name}: it needs special layers or weights. A replay runs in {NAMES}.")
        precision = REPLACEMENT
    facts = precisions_of(device)
    if precision.name in facts.lacks:
        lacking = facts.lacks[precision.name]
        raise PrecisionUnavailable(f"{said} {name}: {lacking} Give --precision: {' or '.join(facts.runs)}.")
    return None if requested is None else precision


# --- weights -------------------------------------------------------------------------------------------------------


def load_weights(contents: CapsuleContents, models: Sequence[Module]) -> None:
    """Load the capsule's weights and buffers into the model; BadInput, with nothing changed, if they do not fit."""
    if not contents.weights:
        return
    holder = ReplayStep(run=lambda settings: None, device=torch.device("cpu"), models=models)
    pairs = [(holder.parameters(), contents.weights, "weight"), (holder.buffers(), contents.buffers, "buffer")]
    may_widen = _needs_special_layers(contents.precision)
    for here, saved, what in pairs:
        parts = []
        for said, have, need in (("the model has no", here, saved), ("the capsule has no", saved, here)):
            if names := [name for name in need if name not in have]:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                parts.append(f"{said} {', '.join(map(repr, names[:SHOWN]))}{more}")
        if parts:
            raise BadInput(f"the capsule's {what}s do not match the model: {'; '.join(parts)}. Build the same model.")
        for name, tensor in saved.items():
            target = here[name]
            if is_lazy(target) or target.device.type == "meta":
                raise BadInput(
                    f"the {what} {name!r} is not initialized in the model that was built. Run the model once, or use "
                    "to_empty()."
                )
            widens = may_widen and torch.promote_types(target.dtype, tensor.dtype) == target.dtype
            if target.shape != tensor.shape or not (target.dtype == tensor.dtype or widens):
                model, capsule = (
                    f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (target, tensor)
                )
                raise BadInput(
                    f"the {what} {name!r} is {model} in the model and {capsule} in the capsule. Build the same model."
                )
    with torch.no_grad():
        for here, saved, _ in pairs:
            for name, tensor in saved.items():
                here[name].copy_(tensor)
