"""Replay bad steps of a watched script: the script's own code from the model's call to the loss, and backward.

Where that code cannot be run on its own, the models' forward calls are replayed alone, and backward from the gradients
that they received; if the models are finite, the result says so. The script must not notice the replay.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import run_checks
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.call_site import calling_site
from ampwise.trace.diagnosis import bad_weight, compiler_failure, diagnose, findings_about, swallowed_in_backward
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import OptimizerFacts
from ampwise.trace.numpy_errors import NumpyError, numpy_errors
from ampwise.trace.python_state import attributes_restored, muted_output
from ampwise.trace.ranks import CollectiveInReplay, collectives_refused, is_multi_rank
from ampwise.trace.replay import OptimizerPast, Replay, ReplaySettings, ReplayStep, is_compiled
from ampwise.train.random_state import restore_random
from ampwise.watch.batch_draws import BatchDraws
from ampwise.watch.call_replay import CallReplay, eager_model, finite_gradients, is_finite_unrecorded, placed_at_call
from ampwise.watch.findings import FROM_ANOTHER_RANK
from ampwise.watch.inspection import has_fsdp1
from ampwise.watch.loss_code import LossCode, code_between, data_code
from ampwise.watch.model_calls import KeptLoss, LossStart, ModelCall
from ampwise.watch.models import without_hooks
from ampwise.watch.outside_values import OutsideValues
from ampwise.watch.run_events import ScaleInLoss

__all__ = ["ReplayedStep", "StepToReplay", "replay_step"]

COMPILED = "The model is compiled; the eager replay fails too."
MODEL_ALONE = "Only the model was replayed, not the code between its output and the loss."
FOLLOWS = 0.1  # relative change of a loss with the loss scale that rounding does not explain
MEAN = "Fixes were tried on the mean of the model's output, not on the loss."
OTHER_NUMBERS = "The step was replayed with other random numbers: those that it had are not known."
MOST_DRAWS = 8  # replays with other random numbers


@dataclass(frozen=True, slots=True)
class StepToReplay:
    """A bad step to replay."""

    number: int
    loss: float | None
    scale: float | None  # None without a scaler
    optimizers: tuple[Optimizer, ...] = ()
    pasts: tuple[OptimizerPast, ...] = ()  # of the optimizers
    scalers: tuple[GradScaler, ...] = ()  # of the script
    raised: bool = False  # torch's anomaly detection has raised an error: a NaN may not have reached any gradient
    draws: BatchDraws | None = None  # the batches of the step
    outside: OutsideValues | None = None
    usual: tuple[Tensor, Callable[[], LossCode | None]] | None = None  # see ``ModelCalls``
    by_hand: OptimizerFacts | None = None  # of updates without an optimizer

    @property
    def bad_loss(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def may_be_ordinary(self) -> bool:
        """Whether the loss scale alone may explain the step."""
        return self.loss is not None and math.isfinite(self.loss) and (self.scale or 1.0) > 1


class ReplayedStep(NamedTuple):
    """Findings of a replay, or why there are none."""

    findings: list[Finding]
    why_not: str = ""
    call: ModelCall | None = None  # the call with the bad output, if known
    after_model: bool = False  # the models are finite; the bad value arises after them


def replay_step(calls: Sequence[ModelCall], losses: Sequence[KeptLoss], step: StepToReplay) -> ReplayedStep:
    """Replay the code of the losses, or else the calls; the weights must still be those of the step."""
    sharded = any(map(has_fsdp1, step.optimizers))
    models = list(dict.fromkeys(each for loss in losses for each in loss.models()))
    models += [each for each in dict.fromkeys(call.model for call in calls) if each not in models]
    for model in models:
        if sharded or any(hasattr(each, "placements") for each in model.parameters()):
            failure = bad_weight(
                ReplayStep(
                    run=lambda _: None,
                    device=next(model.parameters()).device,
                    models=[model],
                    step=step.number,
                    loss=step.loss,
                    optimizers=step.optimizers,
                    pasts=step.pasts,
                )
            )
            if failure is not None:
                return ReplayedStep(findings_about(failure))
            why_not = f"the weights of {type(model).__name__} are sharded over ranks"
            return ReplayedStep([], f"Step {step.number} could not be replayed: {why_not}.")
    for call in calls:
        call.compiled = is_compiled(call.model)
    try:
        with ExitStack() as stack:
            for context in (
                without_hooks(models),
                attributes_restored(models),
                muted_output(),
                _outside_ddp(models, losses, step.optimizers),
            ):
                stack.enter_context(context)
            _reset_bad_statistics(models)
            for module in [each for model in models for each in model.modules()]:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                for name, part in module._modules.items() if "_orig_mod" not in module._modules else ():
                    module._modules[name] = None if part is None else eager_model(part)
            for loss in losses:
                explained = _explain_loss(loss, calls, step)
                if explained is not None:
                    return explained
            return _explain_calls(calls, step)
    except CollectiveInReplay as error:
        return ReplayedStep([], f"Step {step.number} could not be replayed: {error}.")


@contextmanager
def _outside_ddp(
    models: Sequence[nn.Module], losses: Sequence[KeptLoss], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Within the context, run the modules inside of DDP wrappers, with parameters that DDP's hooks do not see.

    The same memory, but other leaves of the graph: DDP counts the gradients of its own, also in a replay.
    """
    named = [each for loss in losses if loss.code is not None for each in loss.code.objects()]
    held = [each for thing in named for each in getattr(thing, "__dict__", {}).values()]
    every = [*models, *named, *held]
    wrappers = {each for each in every if isinstance(each, DistributedDataParallel)}
    others: dict[nn.Parameter, nn.Parameter] = {}
    modules = [module for wrapper in wrappers for module in wrapper.modules()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if modules]
    before = [(group, group["params"]) for group in groups]
    for module in modules:
        for name, each in module._parameters.items():
            if each is not None:
                module._parameters[name] = others.setdefault(each, nn.Parameter(each.detach(), each.requires_grad))
    for group, params in before:
        group["params"] = [others.get(each, each) for each in params]
    for wrapper in wrappers:
        wrapper.__dict__["forward"] = wrapper.module
    try:
        yield
    finally:
        back = {new: old for old, new in others.items()}
        for module in modules:
            for name, each in module._parameters.items():
                module._parameters[name] = back.get(each, each)  # type: ignore[arg-type]
        for group, params in before:
            group["params"] = params
        for wrapper in wrappers:
            del wrapper.__dict__["forward"]


def _reset_bad_statistics(models: Sequence[nn.Module]) -> None:
    """Reset batch-norm statistics that the bad step left NaN; in training mode they are not read."""
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, _NormBase) and module.training:
            for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                buffer = module._buffers.get(name)
                if buffer is not None and not is_finite_unrecorded(buffer):
                    module._buffers[name] = torch.full_like(buffer, value)


def _explain_calls(calls: Sequence[ModelCall], step: StepToReplay) -> ReplayedStep:
    """Explain a bad step by running the models' calls again, each by itself."""
    if not calls:
        return ReplayedStep([])
    if why_not := next(filter(None, map(_why_not, calls)), ""):
        return ReplayedStep([], f"Step {step.number} could not be replayed: {why_not}.")
    # Calls that received only non-finite gradients: the bad value arose in them or after them.
    reached = [call for call in calls if call.gradients and not finite_gradients(call)]
    others = [call for call in calls if call not in reached]
    for some, backward in ((reached, False), (others, True)):
        if not some:
            continue
        again = CallReplay(some, step.scale or 1.0, backward=backward)
        failure = _failure(again, step, backward=backward)
        if failure is None:
            continue
        source = failure.source
        if source is not None and source.what == "batch":
            tensor = _batch(some)[source.name]
            if any(call.was_computed(tensor) for call in some):
                why_not = (
                    f"Step {step.number} was replayed: the model's input `{source.name}`, which the script has "
                    "computed, is not finite; the code that computes it is outside of the models and cannot be "
                    "replayed."
                )
                return ReplayedStep([], why_not)
        return ReplayedStep(findings_about(failure), call=again.culprit)
    if step.may_be_ordinary:
        return ReplayedStep([])
    names = " and ".join(dict.fromkeys(type(call.model).__name__ for call in calls))
    large = max(call.too_large for call in calls)
    if reached or step.bad_loss:
        found = (
            f"Step {step.number} was replayed, and {names} is finite. The bad value arises after its output, which "
            "cannot be replayed, or is not reproducible; `ampwise.trace(loss_fn, batch)` can look there"
        )
    elif large:
        found = (
            f"Step {step.number}: the backward pass of {names} could not be replayed, as the gradient of its output "
            f"({large / 2**20:.0f} MiB) was too large to keep"
        )
    else:
        reason = f"{FROM_ANOTHER_RANK}, or is" if is_multi_rank() else "it is"
        found = (
            f"Step {step.number} was replayed, and {names} is finite, forward and backward: {reason} not reproducible"
        )
    if any(call.compiled for call in calls):  # eager code may differ in the last bits
        found += "; the model is compiled, and was replayed eagerly"
    return ReplayedStep([], f"{found}.", after_model=bool(reached) or step.bad_loss)


def _explain_loss(loss: KeptLoss, calls: Sequence[ModelCall], step: StepToReplay) -> ReplayedStep | None:
    """Explain a bad step by running the script's code of a loss again, with the model's part; None if it is finite."""
    code, start, failure = loss.code, loss.start, None
    is_bad = not is_finite_unrecorded(loss.value)
    is_partial = loss.value.numel() != 1  # parts of a loss, of which the script drops those that are bad
    own = [call for call in calls if call.model in start.models]
    if (step.bad_loss and not is_bad) or any(map(_why_not, own)):
        return None
    if code is not None and code.is_unchanged and all(map(is_finite_unrecorded, code.computed())):
        carried = None if is_bad or is_partial else _scale_in_loss(code, loss, step)
        if carried is not None:
            return ReplayedStep(run_checks(carried), call=own[0] if own else None)
        failure = _run_again(code, loss, calls, step)
    if is_bad and not is_partial and (failure is None or (failure.source is not None and failure.source.drawn is None)):
        # Perhaps the data were bad, and the script's own code has computed them.
        code = data_code(frame_of(loss), (loss.used_at or (None, 0))[1], loaded=bool(step.draws))
        errors: list[NumpyError] = []
        with numpy_errors(errors):
            found = None if code is None else _run_from_data(code, loss, calls, step)
        if found is not None:
            failure = _from_data(failure, found, [each.site for each in errors if each.kind != "overflow"])
    if failure is None and not is_bad and code is not None and code.is_unchanged and step.scale is None:
        frame = frame_of(loss)  # perhaps the script has changed the gradients since
        change = None if frame is None else code_between(frame, (loss.used_at or (None, 0))[1])
        if change is not None:
            failure = _run_again(code, loss, calls, step, afterwards=change)
    if failure is not None and is_partial:
        failure = None if failure.origin is None else failure.but(symptom="result")  # NaN in data may mean "unknown"
    return None if failure is None else ReplayedStep(findings_about(failure), call=own[0] if own else None)


def _run_from_data(code: LossCode, loss: KeptLoss, calls: Sequence[ModelCall], step: StepToReplay) -> Failure | None:
    """Run the code that computes bad data, and the loss; while it is finite, a few times with other random numbers.

    Those it had are known only if nothing has drawn any between the step before and this code, as an agent does that
    acts in between.
    """
    start, known = loss.start, loss.start.data_random
    try:
        for number in range(MOST_DRAWS):
            states: list[Tensor] = []
            found = _run_again(code, loss, calls, step, from_data=True, states=states)
            if found is not None:
                return found.but(remarks=(*found.remarks, OTHER_NUMBERS)) if number else found
            began = start.data_random if start.data_random is not None else start.random.get("torch")
            if not states or began is None or torch.equal(states[0], began):
                return None
            start.data_random = states[0]
    finally:
        start.data_random = known
    return None


def frame_of(loss: KeptLoss) -> FrameType | None:
    """Return the frame of the function that used the loss, if it is still running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (loss.used_at is None or frame.f_code is not loss.used_at[0]):
        frame = frame.f_back
    return frame


def _run_again(
    code: LossCode,
    loss: KeptLoss,
    calls: Sequence[ModelCall],
    step: StepToReplay,
    *,
    from_data: bool = False,
    afterwards: Callable[[], None] = lambda: None,
    states: list[Tensor] | None = None,
) -> Failure | None:
    """Run the code of a loss and its backward pass; None if they are finite, or do not run on their own.

    from_data: the code begins before the model. afterwards: what the script does with the gradients. states: gets
    torch's random state after each run of the code.
    """
    start = loss.start
    run = _runner(code, start, step.scalers, from_data=from_data, afterwards=afterwards, states=states)

    def run_usual(settings: ReplaySettings) -> Any:
        with torch.inference_mode(False), torch.enable_grad(), collectives_refused():
            return usual.run()  # type: ignore[union-attr]

    usual = step.usual[1]() if step.usual is not None and is_finite_unrecorded(step.usual[0]) else None
    has_usual = usual is not None and usual.is_unchanged and all(map(is_finite_unrecorded, usual.computed()))
    # Of a batch that is computed again, the old values are not its source.
    batch = {} if from_data else {**_batch(calls), **code.batch()}
    try:
        return _diagnosis(
            *(run, start, calls, step),
            models=loss.models(),
            batch=batch,
            touched=[*code.objects(), *(usual.objects() if usual is not None and has_usual else ())],
            usual=run_usual if has_usual else None,
        )
    except Exception:  # the statements do not run on their own
        return None


def _runner(
    code: LossCode,
    start: LossStart,
    scalers: Sequence[GradScaler],
    *,
    from_data: bool = False,
    afterwards: Callable[[], None] = lambda: None,
    states: list[Tensor] | None = None,
) -> Callable[[ReplaySettings], Any]:
    """Return what runs the code of a loss and its backward pass; scalers that the code calls have the same scale."""

    def run(settings: ReplaySettings) -> Any:
        if from_data and start.data_random is not None:
            torch.set_rng_state(start.data_random)
        elif start.random:
            restore_random(start.random, start.device)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            collectives_refused(),
            _at_scale(scalers, settings.scale),
        ):
            found = code.run()
            if states is not None:
                states.append(torch.default_generator.get_state())
            if not isinstance(found, Tensor):
                raise BadInput(f"The code of the loss gave {type(found).__name__}, not a tensor.")
            if found.requires_grad and settings.goes_back_from(found):
                (found * settings.scale if settings.scale != 1 else found).sum().backward()
                afterwards()
        return found

    return run


@contextmanager
def _at_scale(scalers: Sequence[GradScaler], scale: float) -> Iterator[None]:
    """Within the context, these scalers have another loss scale."""
    before = [(scaler, scaler._scale) for scaler in scalers if scaler._scale is not None]
    for scaler, own in before:
        scaler._scale = torch.full_like(own, scale)
    try:
        yield
    finally:
        for scaler, own in before:
            scaler._scale = own


def _scale_in_loss(code: LossCode, loss: KeptLoss, step: StepToReplay) -> ScaleInLoss | None:
    """Return that a part of the loss is multiplied by the loss scale: it follows the scale; None if it does not.

    A part that is divided again may overflow, or underflow, at another scale, but not between a scale and its half.
    """
    scale, sites = step.scale or 1.0, dict[CallSite, None]()
    if scale == 1 or not step.scalers:
        return None
    run = _runner(code, loss.start, step.scalers)
    subject = ReplayStep(
        run=run, device=loss.start.device, models=loss.models(), scale=scale, touched=code.objects(), step=step.number
    )
    try:
        with Replay(subject) as replay, ExitStack() as stack:
            for scaler in step.scalers:
                stack.enter_context(_calls_noted(scaler, sites))
            at_scale, at_half = (
                replay.plain(ReplaySettings(backward=False, scale=each)).loss if number == 0 or sites else None
                for number, each in enumerate((scale, scale / 2))
            )
    except Exception:  # the statements do not run on their own
        return None
    if at_scale is None or at_half is None or not (math.isfinite(at_scale) and math.isfinite(at_half)):
        return None
    change = abs(at_scale - at_half)
    if change <= FOLLOWS * max(abs(at_scale), abs(at_half)) or abs(at_scale - 2 * at_half) <= FOLLOWS * abs(at_scale):
        return None  # all of the loss may be scaled, as it should be
    return ScaleInLoss(site=next(iter(sites)), scale=scale, loss=at_scale, at_half=at_half)


@contextmanager
def _calls_noted(scaler: GradScaler, sites: dict[CallSite, None]) -> Iterator[None]:
    """Within the context, note where ``scaler.scale`` is called."""

    def scale(outputs: Any) -> Any:
        sites[calling_site()] = None
        return original(outputs)

    original = scaler.scale
    before = scaler.__dict__.get("scale")
    scaler.__dict__["scale"] = scale
    try:
        yield
    finally:
        if before is None:
            del scaler.__dict__["scale"]
        else:
            scaler.__dict__["scale"] = before


def _from_data(failure: Failure | None, found: Failure, faults: Sequence[CallSite]) -> Failure:
    """Return what explains bad data best. found: in a replay that has computed them again; faults: of numpy in it."""
    origin, source = found.origin, (failure or found).source
    if origin is not None and found.kind != "cancelled-infinities":
        return found
    if source is not None and origin is None and faults:
        return (failure or found).but(source=replace(source, made_at=faults[0]))
    return failure or found


def _why_not(call: ModelCall) -> str:
    """Return why a call cannot be replayed; "" if it can."""
    name = type(call.model).__name__
    if not call.inputs_unchanged:
        return f"the inputs of {name} have been modified since"
    if call.model.training != call.in_training_mode:
        return f"{name} has been switched between train() and eval() since"
    return ""


def _diagnosis(
    run: Callable[[ReplaySettings], Any],
    start: ModelCall | LossStart,
    calls: Sequence[ModelCall],
    step: StepToReplay,
    *,
    models: Sequence[nn.Module],
    batch: Mapping[str, Tensor],
    touched: Sequence[Any] = (),
    remarks: tuple[str, ...] = (),
    usual: Callable[[ReplaySettings], Any] | None = None,
) -> Failure | None:
    """Replay and diagnose a bad step; None if it is finite, or would be without the loss scale.

    run: runs it again, with the random state of each call. start: where it begins.
    """
    scale = step.scale or 1.0
    subject = ReplayStep(
        run=run,
        device=start.device,
        models=list(dict.fromkeys(map(eager_model, models))),
        batch=batch,
        precision=start.precision,
        scale=scale,
        random=None,
        loss=step.loss if step.may_be_ordinary else None,
        step=step.number,
        optimizers=step.optimizers,
        pasts=step.pasts,
        touched=touched,
        usual=usual,
        compiled=any(call.compiled for call in calls),
        remarks=(*remarks, COMPILED) if any(call.compiled for call in calls) else remarks,
    )
    with Replay(subject) as replay:
        if replay.plain(ReplaySettings(scale=scale, only_if_finite=True)).finite:
            if step.raised:
                return swallowed_in_backward(replay, replay.taped(ReplaySettings()))
            compiled = not step.may_be_ordinary and any(call.compiled for call in calls)
            return compiler_failure(replay) if compiled else None
    failure = diagnose(subject)
    if failure is None or failure.not_reproduced:
        return None
    if step.by_hand is not None and step.by_hand.has_exploded and failure.optimizer is None:
        failure = failure.but(optimizer=step.by_hand)
    if step.draws is not None:
        failure = step.draws.explained(failure, subject.batch)
    if step.outside is not None:
        failure = step.outside.explained(failure, subject.batch, step.draws)
    if is_multi_rank():
        return failure.but(rank=torch.distributed.get_rank(), ranks=torch.distributed.get_world_size())
    return failure


def _batch(calls: Sequence[ModelCall]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, call in enumerate(calls, 1):
        for name, tensor in named_tensors(eager_model(call.model).forward, call.args, call.kwargs).items():
            found.setdefault(name if number == 1 else f"{name} ({number})", tensor)
    return found


def _failure(again: CallReplay, step: StepToReplay, *, backward: bool) -> Failure | None:
    """Replay the calls. Return None if they are finite, or would be without the loss scale."""
    calls = again.calls
    models = [call.model for call in calls]
    remarks = () if backward else (MODEL_ALONE,)
    failure = _diagnosis(again, calls[0], calls, step, models=models, batch=_batch(calls), remarks=remarks)
    if failure is None:
        return None
    if not backward and any(trial.finite for trial in failure.trials):
        failure = failure.but(remarks=(*failure.remarks, MEAN))
    called_at, source = (again.culprit or calls[0]).site, failure.source
    return failure.but(
        # The replay returned the model's output, while the run saw the step's loss.
        symptom="result" if failure.symptom == "loss" and not step.bad_loss else failure.symptom,
        loss=step.loss,
        origin=placed_at_call(failure.origin, called_at),
        nan_origin=placed_at_call(failure.nan_origin, called_at),
        source=None if source is None else replace(source, first_use=placed_at_call(source.first_use, called_at)),
    )
