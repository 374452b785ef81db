"""Replay the step of a capsule, with its weights, in its own precision or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.parameter import is_lazy

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.finding import Finding
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.capsule.builder import BuiltModel
from ampwise.trace.capsule.contents import CapsuleContents
from ampwise.trace.diagnosis import explain
from ampwise.trace.replay import Replay, ReplayResult, ReplaySettings, ReplayStep, autocast_forced_to, tensors_of
from ampwise.trace.user_code import describe_error
from ampwise.train.emulation_plugin import make_emulation
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
    precision = requested or _own(contents)
    stands_in = requested is None and _is_beyond(contents.precision)
    other = stands_in or (requested is not None and requested.name != contents.precision)
    try:
        for model in built.models:
            model.to(device)
            _set_modes(model, contents.evaluating)
        with _policy(contents, precision, built.models):
            subject = _subject(contents, built, precision, device, other)
            done = _rerun(subject, as_it_was=not other and device.type == contents.device)
            own = (_without_weights(built),) if not contents.weights else ()
            stand_in = (_stand_in_note(contents),) if stands_in else ()
            return replace(done, summed=built.loss_fn in built.models, remarks=(*own, *stand_in))
    except AmpwiseError:
        raise
    except Exception as error:
        raise BadInput(f"the step cannot be run again: {describe_error(error)}.") from error


def _own(contents: CapsuleContents) -> TrainPrecision:
    """Return the capsule's precision, or its replacement."""
    precision = precision_named(contents.precision or "fp32")
    return REPLACEMENT if _is_beyond(precision.name) else precision


def _is_beyond(name: str) -> bool:
    return name.partition(",")[0] in EXTRA_PRECISIONS


def _stand_in_note(contents: CapsuleContents) -> str:
    return (
        f"The step ran in {contents.precision}, with special layers or weights; this replay uses autocast to "
        f"{REPLACEMENT.name}."
    )


def _set_modes(model: Module, evaluating: Sequence[str] | None) -> None:
    """Set each module's training mode as it was: a frozen BatchNorm computes something else in training."""
    for name, module in named_modules(model).items() if evaluating is not None else ():
        module.training = name not in (evaluating or ())


def _rerun(subject: ReplayStep, *, as_it_was: bool) -> CapsuleReplay:
    with Replay(subject) as replay:
        ended = replay.plain(ReplaySettings())
        scaled = replay.plain(ReplaySettings(scale=subject.scale)) if ended.finite and subject.scale != 1 else None
    findings = () if ended.finite else explain(subject)
    return CapsuleReplay(
        precision=subject.precision or "fp32",
        as_it_was=as_it_was,
        device=subject.device,
        ended=ended,
        scaled=scaled,
        findings=findings,
    )


def _subject(
    contents: CapsuleContents, built: BuiltModel, precision: TrainPrecision, device: torch.device, other: bool
) -> ReplayStep:
    return ReplayStep(
        run=_run(contents, built, _arithmetic(contents, precision, device, built.models), device if other else None),
        device=device,
        models=built.models,
        batch=named_tensors(built.loss_fn, contents.args, contents.kwargs),
        precision=precision.name if other else contents.precision,
        scale=1.0 if other and not precision.scaled else contents.scale,
        random=contents.random,
        loss=None if other else contents.loss,
        step=contents.step,
        remarks=tuple(_remarks(contents, built, device)),
    )


def _arithmetic(
    contents: CapsuleContents, precision: TrainPrecision, device: torch.device, models: Sequence[Module]
) -> PrecisionContexts:
    if precision.recipe is None:
        return PrecisionContexts(precision, device.type)
    policy = Policy(precision.name) if contents.policy is None else Policy.from_dict(contents.policy)
    return PrecisionContexts(precision, device.type, around=make_emulation(policy, precision.recipe, models).on)


def _run(
    contents: CapsuleContents, built: BuiltModel, arithmetic: PrecisionContexts, other: torch.device | None
) -> Callable[[ReplaySettings], Tensor]:
    """Return the function that runs the step.

    other: the device, if the replay uses another precision than the step did; it then also applies to autocast in the
    model.
    """

    def run(settings: ReplaySettings) -> Tensor:
        name = arithmetic.precision.name if other is not None and settings.precision is None else None
        with torch.enable_grad(), arithmetic.pass_context(), autocast_forced_to(name, other or torch.device("cpu")):
            with arithmetic.forward():
                returned = built.loss_fn(*contents.args, **contents.kwargs)
            loss = _loss_of(returned, built)
            if settings.goes_back_from(loss):
                with arithmetic.backward():
                    _scaled(loss, settings.scale).backward()
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


def _scaled(loss: Tensor, scale: float) -> Tensor:
    """Multiply the loss by a tensor, as scalers do: an FP16 loss becomes FP32 and does not overflow by itself."""
    return loss if scale == 1 else loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)


def _remarks(contents: CapsuleContents, built: BuiltModel, device: torch.device) -> Iterable[str]:
    if contents.device != device.type:
        yield f"The step ran on {contents.device}; this replay runs on {device.type}."
    version = contents.environment.get("torch")
    if version != str(torch.__version__):
        yield f"The step ran with torch {version}; this replay uses torch {torch.__version__}."
    if not contents.weights:
        yield _without_weights(built)
    if built.loss_fn in built.models:
        yield "There is no loss function: the backward pass starts at the sum of the model's outputs."


def _without_weights(built: BuiltModel) -> str:
    return f"The capsule has no weights: the replay uses those that {built.made_by}() made."


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
    said, name = (
        ("--precision", requested)
        if requested is not None
        else ("the capsule's precision", contents.precision or "fp32")
    )
    precision = _named(name, f"A replay runs in {NAMES}.")
    facts = precisions_of(device)
    if _is_beyond(precision.name):
        if requested is not None:
            raise BadInput(f"{said} {name}: it needs special layers or weights. A replay runs in {NAMES}.")
        precision = REPLACEMENT
    if precision.name in facts.lacks:
        lacking = facts.lacks[precision.name]
        raise PrecisionUnavailable(f"{said} {name}: {lacking} Give --precision: {' or '.join(facts.runs)}.")
    return None if requested is None else precision


def _named(name: str, listing: str) -> TrainPrecision:
    try:
        return precision_named(name)
    except AmpwiseError as error:
        if name.startswith(EMULATE):  # that error says what is wrong with the format
            raise
        raise UnknownName("precision", name[:40], PRECISIONS, listing=listing) from error


# --- weights -------------------------------------------------------------------------------------------------------


def load_weights(contents: CapsuleContents, models: Sequence[Module]) -> None:
    """Load the capsule's weights and buffers into the model; BadInput, with nothing changed, if they do not fit."""
    if not contents.weights:
        return
    holder = ReplayStep(run=lambda settings: None, device=torch.device("cpu"), models=models)
    pairs = [(holder.parameters(), contents.weights, "weight"), (holder.buffers(), contents.buffers, "buffer")]
    for here, saved, what in pairs:
        _refuse_other_names(here, saved, what)
        for name, tensor in saved.items():
            _refuse_other_kind(here[name], tensor, f"the {what} {name!r}", may_widen=_is_beyond(contents.precision))
    with torch.no_grad():
        for here, saved, _ in pairs:
            for name, tensor in saved.items():
                here[name].copy_(tensor)


def _refuse_other_names(here: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    only_here, only_saved = [name for name in here if name not in saved], [name for name in saved if name not in here]
    parts = []
    if only_saved:
        parts.append(f"the model has no {_listed(only_saved)}")
    if only_here:
        parts.append(f"the capsule has no {_listed(only_here)}")
    if parts:
        raise BadInput(f"the capsule's {what}s do not match the model: {'; '.join(parts)}. Build the same model.")


def _refuse_other_kind(here: Tensor, saved: Tensor, what: str, *, may_widen: bool) -> None:
    if is_lazy(here) or here.device.type == "meta":
        raise BadInput(f"{what} is not initialized in the model that was built. Run the model once, or use to_empty().")
    holds = here.dtype == saved.dtype or (may_widen and torch.promote_types(here.dtype, saved.dtype) == here.dtype)
    if here.shape != saved.shape or not holds:
        raise BadInput(f"{what} is {_kind(here)} in the model and {_kind(saved)} in the capsule. Build the same model.")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
