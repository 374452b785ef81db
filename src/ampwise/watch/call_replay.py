"""Replay a model's calls by themselves: forward with the inputs they had, backward from the gradients they received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, stop_stack_search
from ampwise.trace.failure_facts import Origin
from ampwise.trace.ranks import collectives_refused
from ampwise.trace.replay import ReplaySettings, is_finite
from ampwise.train.random_state import restore_random
from ampwise.watch.inspection import floats_in
from ampwise.watch.model_calls import OUTPUTS, ModelCall

__all__ = ["CallReplay", "eager_model", "finite_gradients", "is_finite_unrecorded", "placed_at_call"]


def eager_model(model: nn.Module) -> nn.Module:
    """Return the eager module inside of a compiled one, which would warn about the replay's hooks."""
    parts = dict(model._modules)
    return model if parts.get("_orig_mod") is None else parts["_orig_mod"]  # type: ignore[return-value]


def is_finite_unrecorded(tensor: Tensor) -> bool:
    with _disable_current_modes(), torch.no_grad():  # not an operation of the model
        return is_finite(tensor)


def finite_gradients(call: ModelCall) -> dict[int, list[Tensor]]:
    """Return the finite gradients that reached the call's outputs, by output. Syncs with the device.

    If a model returns logits and a loss computed from them, the gradients of the logits come from the model itself.
    """
    return {position: many for position, many in call.gradients.items() if all(map(is_finite_unrecorded, many))}


def placed_at_call(origin: Origin | None, called_at: CallSite) -> Origin | None:
    """Place an operation of a library's module at the script's line that called the model."""
    if origin is None or (origin.site.file and code_owner(origin.site.file) == "own"):
        return origin
    through = "" if not origin.site.file else f"{'/'.join(origin.site.file.split('/')[-2:])}:{origin.site.line}"
    return replace(origin, site=replace(called_at, through=through))


class CallReplay:
    """Callable that runs the calls again and returns their non-finite outputs."""

    def __init__(self, calls: Sequence[ModelCall], scale: float, *, backward: bool) -> None:
        self.calls, self.scale, self._backward = calls, scale, backward
        self._gradients = {call: finite_gradients(call) for call in calls if backward}
        self.culprit: ModelCall | None = None  # the first whose output was not finite

    def __call__(self, settings: ReplaySettings) -> list[Tensor]:
        bad: list[Tensor] = []
        with collectives_refused():
            for call in self.calls:
                outputs = _outputs_of(call)
                found = [each for each in outputs if not is_finite_unrecorded(each)]
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
    autocast: Any = nullcontext()
    if (state := call.autocast) is not None:
        torch.autocast_increment_nesting()
        nested = torch.autocast_decrement_nesting() > 0
        # Inside an autocast region of the script, cached casts of weights have graphs that are freed.
        cache = state.cache and not nested
        autocast = torch.autocast(state.device, dtype=state.dtype, enabled=state.enabled, cache_enabled=cache)

    def detached(thing: Any) -> Any:
        """Detach tensors that require gradients, so that the script's own get none."""
        if isinstance(thing, Tensor):
            return thing.detach().requires_grad_() if thing.requires_grad else thing
        if type(thing) in (list, tuple):
            return type(thing)(map(detached, thing))
        return {key: detached(each) for key, each in thing.items()} if type(thing) is dict else thing

    @stop_stack_search  # frames further out are not those that called the model
    def run_model(args: Any, kwargs: Any) -> Any:
        return eager_model(call.model)(*args, **kwargs)

    with torch.inference_mode(False), torch.enable_grad(), autocast:
        return list(islice(floats_in(run_model(detached(call.args), detached(call.kwargs))), OUTPUTS))


def _backward(outputs: Sequence[Tensor], gradients: Mapping[int, Tensor]) -> None:
    wanted = {
        position: gradient
        for position, gradient in gradients.items()
        if position < len(outputs) and outputs[position].requires_grad and gradient.shape == outputs[position].shape
    }
    # Nodes that other outputs depend on: with logits and a loss, the gradient comes through the loss.
    inner: set[Any] = set()
    ends = [outputs[position].grad_fn for position in wanted if len(wanted) > 1]
    pending: list[Any] = [node for end in ends if end for node, _ in end.next_functions]
    while pending:
        node = pending.pop()
        if node is not None and node not in inner:
            inner.add(node)
            pending += [each for each, _ in node.next_functions]
    pairs = [(outputs[position], each) for position, each in wanted.items() if outputs[position].grad_fn not in inner]
    if pairs:
        with torch.autocast(pairs[0][0].device.type, enabled=False):
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
