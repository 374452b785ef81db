"""A step that went bad under the watch, run again: the calls of its models, and back from the gradients they got.

What lies between a model's output and the loss is the script's own code, which nobody can call: where the model's part
is sound, that is said. The script must not notice any of it.
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

from ampwise.evidence.conduct import Site
from ampwise.evidence.incident import Birth, Incident, Source
from ampwise.finding import Finding
from ampwise.randomness import restore_random
from ampwise.site import kind_of
from ampwise.trace.alone import Exchange, exchanges_refused, several_ranks
from ampwise.trace.explaining import findings_of, incident_of
from ampwise.trace.kept import as_they_were, silent
from ampwise.trace.names import named_tensors
from ampwise.trace.replay import Replay, Settings, Subject, is_compiled, is_finite
from ampwise.trace.where import outermost
from ampwise.watch.asking import floats_in, has_fsdp1
from ampwise.watch.calls import OUTPUTS, Call
from ampwise.watch.models import bare
from ampwise.watch.ranks import FROM_ANOTHER

__all__ = ["BadOne", "Told", "explain"]

COMPILED = "It runs compiled; the replay, as written, fails too."
MODEL_ALONE = "The model was replayed, and not the code between its output and the loss."
MEAN = "The remedies were tried on the model's output: gradients are those of its mean."


@dataclass(frozen=True, slots=True)
class BadOne:
    """A step that went bad, as far as it is known."""

    number: int
    loss: float | None
    scale: float | None  # None without a scaler
    optimizers: tuple[Optimizer, ...] = ()

    @property
    def bad_loss(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def may_be_ordinary(self) -> bool:
        """Nothing wrong but the loss scale, perhaps."""
        return self.loss is not None and math.isfinite(self.loss) and (self.scale or 1.0) > 1


class Told(NamedTuple):
    """What was found, or why nothing was."""

    findings: list[Finding]
    why_not: str = ""
    call: Call | None = None  # the one to blame, where it is known
    after_model: bool = False  # the models are finite: it is what the script makes of their outputs


def explain(calls: Sequence[Call], step: BadOne) -> Told:
    """Run these calls again, the weights being what they were."""
    why_not = next((why for call in calls if (why := _why_not(call, step))), "")
    if why_not:
        return Told([], f"Step {step.number} could not be replayed: {why_not}.")
    models = list(dict.fromkeys(call.model for call in calls))
    for call in calls:
        call.compiled = is_compiled(call.model)
    try:
        with ExitStack() as stack:
            for context in (bare(models), as_they_were(models), silent()):
                stack.enter_context(context)
            _forget_poisoned_statistics(models)
            _take_out_compiled(models)
            return _explained(calls, step)
    except Exchange as error:
        return Told([], f"Step {step.number} could not be replayed: {error}.")


def _why_not(call: Call, step: BadOne) -> str:
    name = type(call.model).__name__
    if not call.inputs_unchanged:
        return f"what {name} was given was written to since"
    if call.model.training != call.in_training_mode:
        return f"{name} is in another mode since"
    if any(hasattr(each, "placements") for each in call.model.parameters()) or any(map(has_fsdp1, step.optimizers)):
        return f"the weights of {name} are spread over ranks"
    return ""


def _explained(calls: Sequence[Call], step: BadOne) -> Told:
    # No gradient that came into them is finite: it arose within, or after them.
    reached = [call for call in calls if call.gradients and not _sound_gradients(call)]
    others = [call for call in calls if call not in reached]
    for some, backward in ((reached, False), (others, True)):
        again = Again(some, step.scale or 1.0, backward=backward)
        incident = _incident(again, step, backward=backward) if some else None
        if incident is not None and _came_computed(incident, some):
            return Told([], _not_from_here(incident, step))
        if incident is not None:
            return Told(findings_of(incident), call=again.guilty)
    if step.may_be_ordinary:
        return Told([])
    return Told([], _not_found(calls, reached, step), after_model=bool(reached) or step.bad_loss)


def _came_computed(incident: Incident, calls: Sequence[Call]) -> bool:
    """What is bad came in, from code of the script's between its models: a batch it is not."""
    source = incident.source
    if source is None or source.what != "batch":
        return False
    tensor = _batch(calls)[source.name]
    return any(call.was_computed(tensor) for call in calls)


def _not_from_here(incident: Incident, step: BadOne) -> str:
    assert incident.source is not None
    return (
        f"Step {step.number} was replayed: `{incident.source.name}`, which the script has computed and given to its "
        "model, is not finite; what computes it lies outside of models, where a run cannot replay."
    )


def _sound_gradients(call: Call) -> dict[int, list[Tensor]]:
    """Those that came into its outputs, and are finite. Waits for the device.

    Of a model that gives logits and the loss that it makes of them, the gradients of the logits are its own.
    """
    return {position: many for position, many in call.gradients.items() if all(map(_is_finite, many))}


def _not_found(calls: Sequence[Call], reached: Sequence[Call], step: BadOne) -> str:
    names = " and ".join(dict.fromkeys(type(call.model).__name__ for call in calls))
    large = max(call.too_large for call in calls)
    if reached or step.bad_loss:
        found = (
            f"Step {step.number} was replayed, and {names} is finite. What went bad lies after its output, which a run "
            "cannot replay, or does not come again; `ampwise.trace(loss_fn, batch)` can look there"
        )
    elif large:
        found = (
            f"Step {step.number}: the backward pass of {names} could not be replayed, as the gradient of its output "
            f"({large / 2**20:.0f} MiB) was too large to keep"
        )
    else:
        whence = f"{FROM_ANOTHER}, or does" if several_ranks() else "it does"
        found = f"Step {step.number} was replayed, and {names} is finite, forward and backward: {whence} not come again"
    return f"{found}{_compiled(calls)}."


def _compiled(calls: Sequence[Call]) -> str:
    """Eager code has other last bits."""
    return "; it runs compiled, and was replayed as written" if any(call.compiled for call in calls) else ""


# One replay


def _incident(again: Again, step: BadOne, *, backward: bool) -> Incident | None:
    """None if these calls are finite, or would be but for the loss scale."""
    calls, scale = again.calls, again.scale
    subject = Subject(
        run=again,
        device=calls[0].device,
        models=list(dict.fromkeys(_as_written(call.model) for call in calls)),
        batch=_batch(calls),
        precision=calls[0].precision,
        scale=scale,
        random=None,  # each call has its own
        loss=step.loss if step.may_be_ordinary else None,
        step=step.number,
        optimizers=step.optimizers,
        remarks=_remarks(calls, backward=backward),
    )
    with Replay(subject) as replay:
        if replay.plain(Settings(scale=scale)).finite:
            return None
    incident = incident_of(subject)
    if incident is None or incident.not_reproduced:
        return None
    if not backward and any(trial.finite for trial in incident.trials):
        incident = incident.but(remarks=(*incident.remarks, MEAN))
    return _placed(_of_step(incident, step), (again.guilty or calls[0]).site)


def _remarks(calls: Sequence[Call], *, backward: bool) -> tuple[str, ...]:
    remarks = () if backward else (MODEL_ALONE,)
    return (*remarks, COMPILED) if any(call.compiled for call in calls) else remarks


def _batch(calls: Sequence[Call]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, call in enumerate(calls, 1):
        for name, tensor in named_tensors(_as_written(call.model).forward, call.args, call.kwargs).items():
            found.setdefault(name if number == 1 else f"{name} ({number})", tensor)
    return found


class Again:
    """Runs calls once more; returns those of their outputs that are not finite."""

    def __init__(self, calls: Sequence[Call], scale: float, *, backward: bool) -> None:
        self.calls, self.scale, self._backward = calls, scale, backward
        self._gradients = {call: _sound_gradients(call) for call in calls if backward}
        self.guilty: Call | None = None  # the first whose output was not finite

    def __call__(self, settings: Settings) -> list[Tensor]:
        bad: list[Tensor] = []
        with exchanges_refused():
            for call in self.calls:
                outputs = _outputs_of(call)
                found = [each for each in outputs if not _is_finite(each)]
                if settings.backward:
                    self._go_back(call, outputs, settings.scale, sound=not found)
                if found and self.guilty is None:
                    self.guilty = call
                bad += found
        return bad

    def _go_back(self, call: Call, outputs: list[Tensor], scale: float, *, sound: bool) -> None:
        roots: dict[int, Tensor] = {}
        if self._backward:
            factor = scale / self.scale
            for position, many in self._gradients[call].items():
                whole = many[0] if len(many) == 1 else torch.stack(many).sum(0)
                roots[position] = whole if factor == 1 else whole * factor
        elif sound and self.guilty is not None:  # mended, by something that is tried: does it go back as well?
            roots = {number: torch.full_like(each, scale / each.numel()) for number, each in enumerate(outputs)}
        _backward(outputs, roots)


def _outputs_of(call: Call) -> list[Tensor]:
    restore_random(call.random, call.device)
    with torch.inference_mode(False), torch.enable_grad(), _autocast(call):
        result = _called(call, _anew(call.args), _anew(call.kwargs))
        return list(islice(floats_in(result), OUTPUTS))


@outermost  # further out are the lines that the script runs now, which are not those that have called the model
def _called(call: Call, args: Any, kwargs: Any) -> Any:
    return _as_written(call.model)(*args, **kwargs)


def _anew(thing: Any) -> Any:
    """Tensors that are trained, such that their gradients are nobody's."""
    if isinstance(thing, Tensor):
        return thing.detach().requires_grad_() if thing.requires_grad else thing
    if type(thing) in (list, tuple):
        return type(thing)(map(_anew, thing))
    return {key: _anew(each) for key, each in thing.items()} if type(thing) is dict else thing


def _autocast(call: Call) -> AbstractContextManager[Any]:
    state = call.autocast
    if state is None:
        return nullcontext()
    # Within a region of the script's, copies of weights that it keeps have graphs that are gone.
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
    """Operations that others come after: of a model that gives logits and a loss, the gradient comes by the loss."""
    seen: set[Any] = set()
    pending = [node for each in outputs if len(outputs) > 1 and each.grad_fn for node, _ in each.grad_fn.next_functions]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [each for each, _ in node.next_functions]
    return seen


def _is_finite(tensor: Tensor) -> bool:
    with _disable_current_modes(), torch.no_grad():  # no operation of the model's
        return is_finite(tensor)


# Before, and after


def _forget_poisoned_statistics(models: Sequence[nn.Module]) -> None:
    """The bad step has left them NaN; in training they are written, and not read."""
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, _NormBase) and module.training:
            for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                buffer = module._buffers.get(name)
                if buffer is not None and not _is_finite(buffer):
                    module._buffers[name] = torch.full_like(buffer, value)


def _as_written(model: nn.Module) -> nn.Module:
    """Not what torch.compile has made of it, which would warn of the hooks that are on in a replay."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _take_out_compiled(models: Sequence[nn.Module]) -> None:
    for module in [each for model in models for each in model.modules()]:
        for name, part in module._modules.items() if "_orig_mod" not in module._modules else ():
            module._modules[name] = None if part is None else _as_written(part)


def _of_step(incident: Incident, step: BadOne) -> Incident:
    """What the replay returned is the model's output; what was seen is the step's loss."""
    symptom = incident.symptom
    if symptom == "loss" and not step.bad_loss:
        symptom = "result"
    if several_ranks():
        ranks = torch.distributed.get_world_size()
        incident = incident.but(rank=torch.distributed.get_rank(), ranks=ranks)
    return incident.but(symptom=symptom, loss=step.loss)


def _placed(incident: Incident, called_at: Site) -> Incident:
    """Operations of a library's modules: at the line that has called the model."""
    source = incident.source
    return incident.but(
        birth=_birth_at(incident.birth, called_at),
        nan_birth=_birth_at(incident.nan_birth, called_at),
        source=None if source is None else _source_at(source, called_at),
    )


def _source_at(source: Source, called_at: Site) -> Source:
    return replace(source, first_use=_birth_at(source.first_use, called_at))


def _birth_at(birth: Birth | None, called_at: Site) -> Birth | None:
    if birth is None or (birth.site.file and kind_of(birth.site.file) == "own"):
        return birth
    through = "" if not birth.site.file else f"{'/'.join(birth.site.file.split('/')[-2:])}:{birth.site.line}"
    return replace(birth, site=replace(called_at, through=through))
