"""The step of a capsule, run again: with the weights it had, in its precision or in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.parameter import is_lazy

from ampwise.emulation.by_policy import emulation_by
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.policy import Policy, named_modules
from ampwise.engine.precision.precision import BEYOND, EMULATE, PRECISIONS, Precision, facts_of, precision_named
from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.finding import Finding
from ampwise.trace.capsule.building import Built
from ampwise.trace.capsule.contents import Contents
from ampwise.trace.explaining import explain
from ampwise.trace.names import named_tensors
from ampwise.trace.replay import Ended, Replay, Settings, Subject, in_precision, tensors_of
from ampwise.user_code import failure

__all__ = ["Rerun", "device_named", "load_weights", "precision_for", "rerun"]

SHOWN = 3  # names in an error
STAND_IN = PRECISIONS["bf16"]  # for what has layers or weights of its own, which a model that is built anew has not
NAMES = f"{', '.join(PRECISIONS)}, and {EMULATE}mxfp8 or another format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """How it went."""

    precision: str
    device: torch.device
    as_it_was: bool  # in its own precision, on the kind of device that it ran on
    ended: Ended  # at a loss scale of 1
    scaled: Ended | None = None  # at the scale that it had; None: not tried, or it had none
    findings: Sequence[Finding] = ()
    summed: bool = False  # there was no loss function
    remarks: Sequence[str] = ()  # what else should be known


def rerun(contents: Contents, built: Built, device: torch.device, asked: Precision | None = None) -> Rerun:
    """Run the step, and explain it where it is not finite. What the user's own code raises is a BadInput.

    asked: the precision, instead of its own, also wherever the model itself turns autocast on.
    """
    # A capsule without a precision is of a model that sees to its own, under no other autocast.
    precision = asked or _own(contents)
    stands_in = asked is None and _is_beyond(contents.precision)
    other = stands_in or (asked is not None and asked.name != contents.precision)
    try:
        for model in built.models:
            model.to(device)
            _set_modes(model, contents.evaluating)
        with _policy(contents, precision, built.models):
            subject = _subject(contents, built, precision, device, other)
            done = _rerun(subject, as_it_was=not other and device.type == contents.device)
            own = (_without_weights(built),) if not contents.weights else ()
            stood_in = (_stood_in(contents),) if stands_in else ()
            return replace(done, summed=built.loss_fn in built.models, remarks=(*own, *stood_in))
    except AmpwiseError:
        raise
    except Exception as error:
        raise BadInput(f"the step cannot be run again: {failure(error)}.") from error


def _own(contents: Contents) -> Precision:
    """That of the capsule, or what stands in for it."""
    precision = precision_named(contents.precision or "fp32")
    return STAND_IN if _is_beyond(precision.name) else precision


def _is_beyond(name: str) -> bool:
    return name.partition(",")[0] in BEYOND


def _stood_in(contents: Contents) -> str:
    return (
        f"The step ran in {contents.precision}, with layers or weights of its own; this replay is in {STAND_IN.name}, "
        "by autocast."
    )


def _set_modes(model: Module, evaluating: Sequence[str] | None) -> None:
    """Each module as it was: a frozen BatchNorm computes something else in training."""
    for name, module in named_modules(model).items() if evaluating is not None else ():
        module.training = name not in (evaluating or ())


def _rerun(subject: Subject, *, as_it_was: bool) -> Rerun:
    with Replay(subject) as replay:
        ended = replay.plain(Settings())
        scaled = replay.plain(Settings(scale=subject.scale)) if ended.finite and subject.scale != 1 else None
    findings = () if ended.finite else explain(subject)
    return Rerun(
        precision=subject.precision or "fp32",
        as_it_was=as_it_was,
        device=subject.device,
        ended=ended,
        scaled=scaled,
        findings=findings,
    )


def _subject(contents: Contents, built: Built, precision: Precision, device: torch.device, other: bool) -> Subject:
    return Subject(
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


def _arithmetic(contents: Contents, precision: Precision, device: torch.device, models: Sequence[Module]) -> Arithmetic:
    if precision.recipe is None:
        return Arithmetic(precision, device.type)
    policy = Policy(precision.name) if contents.policy is None else Policy.from_dict(contents.policy)
    return Arithmetic(precision, device.type, around=emulation_by(policy, precision.recipe, models).on)


def _run(
    contents: Contents, built: Built, arithmetic: Arithmetic, other: torch.device | None
) -> Callable[[Settings], Tensor]:
    """other: the device, where it runs in another precision than it did: that holds for autocast in the model, too."""

    def run(settings: Settings) -> Tensor:
        name = arithmetic.precision.name if other is not None and settings.precision is None else None
        with torch.enable_grad(), arithmetic.products(), in_precision(name, other or torch.device("cpu")):
            with arithmetic.forward():
                returned = built.loss_fn(*contents.args, **contents.kwargs)
            loss = _loss_of(returned, built)
            if settings.goes_back_from(loss):
                with arithmetic.backward():
                    _scaled(loss, settings.scale).backward()
            return loss

    return run


def _loss_of(returned: Any, built: Built) -> Tensor:
    """What was returned first; of a model without a loss function, the sum of what it returns."""
    found = [each for each in tensors_of(returned) if each.requires_grad]
    if found and found[0].numel() == 1:
        return found[0]
    if found and built.loss_fn in built.models:
        return torch.stack([each.float().sum() for each in found]).sum()
    kind = f"a tensor of shape {tuple(found[0].shape)}" if found else type(returned).__name__
    raise BadInput(f"the loss function returned {kind}; expected is the loss, one number that leads back to weights.")


def _scaled(loss: Tensor, scale: float) -> Tensor:
    """By a tensor, as scalers do: a loss in FP16 becomes FP32 and does not overflow by itself."""
    return loss if scale == 1 else loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)


def _remarks(contents: Contents, built: Built, device: torch.device) -> Iterable[str]:
    if contents.device != device.type:
        yield f"The step ran on {contents.device}, and this replay on {device.type}."
    version = contents.environment.get("torch")
    if version != str(torch.__version__):
        yield f"The step ran with torch {version}, and this replay with {torch.__version__}."
    if not contents.weights:
        yield _without_weights(built)
    if built.loss_fn in built.models:
        yield "There was no loss function: the backward pass begins at the sum of what the model returns."


def _without_weights(built: Built) -> str:
    return f"The capsule has no weights: these are what {built.made_by}() made."


def _policy(contents: Contents, precision: Precision, models: Sequence[Module]) -> AbstractContextManager[Any]:
    """The exceptions by module; of FP32 throughout there are none."""
    if contents.policy is None or (precision.dtype is None and precision.recipe is None):
        return nullcontext()
    return Policy.from_dict(contents.policy).apply(models[0] if len(models) == 1 else ModuleList(models))


# --- what was asked for --------------------------------------------------------------------------------------------


def device_named(asked: str | None, kind: str) -> torch.device:
    """The device asked for; else one of the kind that the step ran on, or where there is none, the CPU."""
    if asked is None:
        return torch.device(kind if kind == "cuda" and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise BadInput(f"--device {asked}: torch has no such device here ({first}).") from error
    return device


def precision_for(asked: str | None, contents: Contents, device: torch.device) -> Precision | None:
    """The precision asked for, if one was; refused, as the capsule's own is, where the device has none such."""
    said, name = (
        ("--precision", asked) if asked is not None else ("the capsule's precision", contents.precision or "fp32")
    )
    precision = _named(name, f"A replay runs in {NAMES}.")
    facts = facts_of(device)
    if _is_beyond(precision.name):
        if asked is not None:
            raise BadInput(f"{said} {name}: it has layers or weights of its own. A replay runs in {NAMES}.")
        precision = STAND_IN
    if precision.name in facts.lacks:
        lacking = facts.lacks[precision.name]
        raise PrecisionUnavailable(f"{said} {name}: {lacking} Give --precision: {' or '.join(facts.runs)}.")
    return None if asked is None else precision


def _named(name: str, listing: str) -> Precision:
    try:
        return precision_named(name)
    except AmpwiseError as error:
        if name.startswith(EMULATE):  # which says what is wrong with the format
            raise
        raise UnknownName("precision", name[:40], PRECISIONS, listing=listing) from error


# --- weights -------------------------------------------------------------------------------------------------------


def load_weights(contents: Contents, models: Sequence[Module]) -> None:
    """Give the model the weights and buffers of the capsule; BadInput, and nothing changed, where they do not fit."""
    if not contents.weights:
        return
    holder = Subject(run=lambda settings: None, device=torch.device("cpu"), models=models)
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
        raise BadInput(f"the capsule's {what}s are not those of the model: {'; '.join(parts)}. Build the same model.")


def _refuse_other_kind(here: Tensor, saved: Tensor, what: str, *, may_widen: bool) -> None:
    if is_lazy(here) or here.device.type == "meta":
        raise BadInput(f"{what} has no values yet in the model that was built. Make them: run it once, or to_empty().")
    holds = here.dtype == saved.dtype or (may_widen and torch.promote_types(here.dtype, saved.dtype) == here.dtype)
    if here.shape != saved.shape or not holds:
        raise BadInput(f"{what} is {_kind(here)} in the model and {_kind(saved)} in the capsule. Build the same model.")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
