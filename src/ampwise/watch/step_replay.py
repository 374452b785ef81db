"""Replay a bad step of a watched script: its models' forward calls, and backward from the gradients they received.

The code between a model's output and the loss is the script's own and cannot be called: where the model is finite, the
result says so. The script must not notice the replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.call_site import code_owner
from ampwise.trace.diagnosis import diagnose, findings_about
from ampwise.trace.failure import BadTensor, Failure, Origin
from ampwise.trace.python_state import attributes_restored, muted_output
from ampwise.trace.refuse_collectives import CollectiveInReplay, collectives_refused, is_multi_rank
from ampwise.trace.replay import Replay, ReplaySettings, ReplayStep, is_compiled, is_finite
from ampwise.trace.stack_lines import stop_stack_search
from ampwise.train.random_state import restore_random
from ampwise.watch.inspection import floats_in, has_fsdp1
from ampwise.watch.model_calls import OUTPUTS, ModelCall
from ampwise.watch.models import without_hooks
from ampwise.watch.rank_findings import FROM_ANOTHER_RANK

__all__ = ["StepReplayResult", "StepToReplay", "replay_step"]

COMPILED = "The model is compiled; the eager replay fails too."
MODEL_ALONE = "Only the model was replayed, not the code between its output and the loss."
MEAN = "Fixes were tried on the mean of the model's output, not on the loss."


@dataclass(frozen=True, slots=True)
class StepToReplay:
    """A bad step to replay."""

    number: int
    loss: float | None
    scale: float | None  # None without a scaler
    optimizers: tuple[Optimizer, ...] = ()

    @property
    def bad_loss(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def may_be_ordinary(self) -> bool:
        """Whether the loss scale alone may explain the step."""
        return self.loss is not None and math.isfinite(self.loss) and (self.scale or 1.0) > 1


class StepReplayResult(NamedTuple):
    """Findings of a replay, or why there are none."""

    findings: list[Finding]
    why_not: str = ""
    call: ModelCall | None = None  # the call with the bad output, if known
    after_model: bool = False  # the models are finite; the bad value arises after them


def replay_step(calls: Sequence[ModelCall], step: StepToReplay) -> StepReplayResult:
    """Replay the calls; the weights must still be those of the step."""
    why_not = next((why for call in calls if (why := _why_not(call, step))), "")
    if why_not:
        return StepReplayResult([], f"Step {step.number} could not be replayed: {why_not}.")
    models = list(dict.fromkeys(call.model for call in calls))
    for call in calls:
        call.compiled = is_compiled(call.model)
    try:
        with ExitStack() as stack:
            for context in (without_hooks(models), attributes_restored(models), muted_output()):
                stack.enter_context(context)
            _reset_bad_statistics(models)
            _unwrap_compiled(models)
            return _explained(calls, step)
    except CollectiveInReplay as error:
        return StepReplayResult([], f"Step {step.number} could not be replayed: {error}.")


def _why_not(call: ModelCall, step: StepToReplay) -> str:
    name = type(call.model).__name__
    if not call.inputs_unchanged:
        return f"the inputs of {name} have been modified since"
    if call.model.training != call.in_training_mode:
        return f"{name} has been switched between train() and eval() since"
    if any(hasattr(each, "placements") for each in call.model.parameters()) or any(map(has_fsdp1, step.optimizers)):
        return f"the weights of {name} are sharded over ranks"
    return ""


def _explained(calls: Sequence[ModelCall], step: StepToReplay) -> StepReplayResult:
    # Calls that received only non-finite gradients: the bad value arose in them or after them.
    reached = [call for call in calls if call.gradients and not _finite_gradients(call)]
    others = [call for call in calls if call not in reached]
    for some, backward in ((reached, False), (others, True)):
        again = CallReplay(some, step.scale or 1.0, backward=backward)
        failure = _failure(again, step, backward=backward) if some else None
        if failure is not None and _input_was_computed(failure, some):
            return StepReplayResult([], _computed_input_sentence(failure, step))
        if failure is not None:
            return StepReplayResult(findings_about(failure), call=again.culprit)
    if step.may_be_ordinary:
        return StepReplayResult([])
    return StepReplayResult([], _not_found_sentence(calls, reached, step), after_model=bool(reached) or step.bad_loss)


def _input_was_computed(failure: Failure, calls: Sequence[ModelCall]) -> bool:
    """Whether the bad value was in an input that the script computed between its models."""
    source = failure.source
    if source is None or source.what != "batch":
        return False
    tensor = _batch(calls)[source.name]
    return any(call.was_computed(tensor) for call in calls)


def _computed_input_sentence(failure: Failure, step: StepToReplay) -> str:
    assert failure.source is not None
    return (
        f"Step {step.number} was replayed: the model's input `{failure.source.name}`, which the script has computed, "
        "is not finite; the code that computes it is outside of the models and cannot be replayed."
    )


def _finite_gradients(call: ModelCall) -> dict[int, list[Tensor]]:
    """Return the finite gradients that reached the call's outputs, by output. Syncs with the device.

    If a model returns logits and a loss computed from them, the gradients of the logits come from the model itself.
    """
    return {position: many for position, many in call.gradients.items() if all(map(_is_finite, many))}


def _not_found_sentence(calls: Sequence[ModelCall], reached: Sequence[ModelCall], step: StepToReplay) -> str:
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
    return f"{found}{_compiled_remark(calls)}."


def _compiled_remark(calls: Sequence[ModelCall]) -> str:
    """Remark for compiled models: eager code may differ in the last bits."""
    return "; the model is compiled, and was replayed eagerly" if any(call.compiled for call in calls) else ""


# One replay


def _failure(again: CallReplay, step: StepToReplay, *, backward: bool) -> Failure | None:
    """Replay the calls. Return None if they are finite, or would be without the loss scale."""
    calls, scale = again.calls, again.scale
    subject = ReplayStep(
        run=again,
        device=calls[0].device,
        models=list(dict.fromkeys(_eager(call.model) for call in calls)),
        batch=_batch(calls),
        precision=calls[0].precision,
        scale=scale,
        random=None,  # each call restores its own
        loss=step.loss if step.may_be_ordinary else None,
        step=step.number,
        optimizers=step.optimizers,
        remarks=_remarks(calls, backward=backward),
    )
    with Replay(subject) as replay:
        if replay.plain(ReplaySettings(scale=scale)).finite:
            return None
    failure = diagnose(subject)
    if failure is None or failure.not_reproduced:
        return None
    if not backward and any(trial.finite for trial in failure.trials):
        failure = failure.but(remarks=(*failure.remarks, MEAN))
    return _placed(_of_step(failure, step), (again.culprit or calls[0]).site)


def _remarks(calls: Sequence[ModelCall], *, backward: bool) -> tuple[str, ...]:
    remarks = () if backward else (MODEL_ALONE,)
    return (*remarks, COMPILED) if any(call.compiled for call in calls) else remarks


def _batch(calls: Sequence[ModelCall]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, call in enumerate(calls, 1):
        for name, tensor in named_tensors(_eager(call.model).forward, call.args, call.kwargs).items():
            found.setdefault(name if number == 1 else f"{name} ({number})", tensor)
    return found


class CallReplay:
    """Callable that runs the calls again and returns their non-finite outputs."""

    def __init__(self, calls: Sequence[ModelCall], scale: float, *, backward: bool) -> None:
        self.calls, self.scale, self._backward = calls, scale, backward
        self._gradients = {call: _finite_gradients(call) for call in calls if backward}
        self.culprit: ModelCall | None = None  # the first whose output was not finite

    def __call__(self, settings: ReplaySettings) -> list[Tensor]:
        bad: list[Tensor] = []
        with collectives_refused():
            for call in self.calls:
                outputs = _outputs_of(call)
                found = [each for each in outputs if not _is_finite(each)]
                if settings.backward:
                    self._go_back(call, outputs, settings.scale, sound=not found)
                if found and self.culprit is None:
                    self.culprit = call
                bad += found
        return bad

    def _go_back(self, call: ModelCall, outputs: list[Tensor], scale: float, *, sound: bool) -> None:
        roots: dict[int, Tensor] = {}
        if self._backward:
            factor = scale / self.scale
            for position, many in self._gradients[call].items():
                whole = many[0] if len(many) == 1 else torch.stack(many).sum(0)
                roots[position] = whole if factor == 1 else whole * factor
        elif sound and self.culprit is not None:  # fixed by something that is tried: is the backward pass finite, too?
            roots = {number: torch.full_like(each, scale / each.numel()) for number, each in enumerate(outputs)}
        _backward(outputs, roots)


def _outputs_of(call: ModelCall) -> list[Tensor]:
    restore_random(call.random, call.device)
    with torch.inference_mode(False), torch.enable_grad(), _autocast(call):
        result = _run_model(call, _detached(call.args), _detached(call.kwargs))
        return list(islice(floats_in(result), OUTPUTS))


@stop_stack_search  # frames further out are not those that called the model
def _run_model(call: ModelCall, args: Any, kwargs: Any) -> Any:
    return _eager(call.model)(*args, **kwargs)


def _detached(thing: Any) -> Any:
    """Detach tensors that require gradients, so that the script's own get none."""
    if isinstance(thing, Tensor):
        return thing.detach().requires_grad_() if thing.requires_grad else thing
    if type(thing) in (list, tuple):
        return type(thing)(map(_detached, thing))
    return {key: _detached(each) for key, each in thing.items()} if type(thing) is dict else thing


def _autocast(call: ModelCall) -> AbstractContextManager[Any]:
    state = call.autocast
    if state is None:
        return nullcontext()
    # Inside an autocast region of the script, cached casts of weights have graphs that are freed.
    cache = state.cache and not _in_autocast()
    return torch.autocast(state.device, dtype=state.dtype, enabled=state.enabled, cache_enabled=cache)


def _in_autocast() -> bool:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _backward(outputs: Sequence[Tensor], gradients: Mapping[int, Tensor]) -> None:
    wanted = {
        position: gradient
        for position, gradient in gradients.items()
        if position < len(outputs) and outputs[position].requires_grad and gradient.shape == outputs[position].shape
    }
    inner = _inner([outputs[position] for position in wanted])
    pairs = [(outputs[position], each) for position, each in wanted.items() if outputs[position].grad_fn not in inner]
    if pairs:
        with torch.autocast(pairs[0][0].device.type, enabled=False):
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _inner(outputs: Sequence[Tensor]) -> set[Any]:
    """Return nodes that other outputs depend on: with logits and a loss, the gradient comes through the loss."""
    seen: set[Any] = set()
    pending = [node for each in outputs if len(outputs) > 1 and each.grad_fn for node, _ in each.grad_fn.next_functions]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [each for each, _ in node.next_functions]
    return seen


def _is_finite(tensor: Tensor) -> bool:
    with _disable_current_modes(), torch.no_grad():  # not an operation of the model
        return is_finite(tensor)


# Preparation and placement


def _reset_bad_statistics(models: Sequence[nn.Module]) -> None:
    """Reset batch-norm statistics that the bad step left NaN; in training mode they are not read."""
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, _NormBase) and module.training:
            for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                buffer = module._buffers.get(name)
                if buffer is not None and not _is_finite(buffer):
                    module._buffers[name] = torch.full_like(buffer, value)


def _eager(model: nn.Module) -> nn.Module:
    """Return the eager module inside of a compiled one, which would warn about the replay's hooks."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _unwrap_compiled(models: Sequence[nn.Module]) -> None:
    for module in [each for model in models for each in model.modules()]:
        for name, part in module._modules.items() if "_orig_mod" not in module._modules else ():
            module._modules[name] = None if part is None else _eager(part)


def _of_step(failure: Failure, step: StepToReplay) -> Failure:
    """Adapt the symptom: the replay returned the model's output, while the run saw the step's loss."""
    symptom = failure.symptom
    if symptom == "loss" and not step.bad_loss:
        symptom = "result"
    if is_multi_rank():
        ranks = torch.distributed.get_world_size()
        failure = failure.but(rank=torch.distributed.get_rank(), ranks=ranks)
    return failure.but(symptom=symptom, loss=step.loss)


def _placed(failure: Failure, called_at: CallSite) -> Failure:
    """Place operations of library modules at the script's line that called the model."""
    source = failure.source
    return failure.but(
        origin=_origin_at(failure.origin, called_at),
        nan_origin=_origin_at(failure.nan_origin, called_at),
        source=None if source is None else _source_at(source, called_at),
    )


def _source_at(source: BadTensor, called_at: CallSite) -> BadTensor:
    return replace(source, first_use=_origin_at(source.first_use, called_at))


def _origin_at(origin: Origin | None, called_at: CallSite) -> Origin | None:
    if origin is None or (origin.site.file and code_owner(origin.site.file) == "own"):
        return origin
    through = "" if not origin.site.file else f"{'/'.join(origin.site.file.split('/')[-2:])}:{origin.site.line}"
    return replace(origin, site=replace(called_at, through=through))
