"""``trace``: run a function, and report the first operation that produced a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.diagnosis import (
    compiler_failure,
    diagnose_recorded,
    findings_about,
    spoiled_weights,
    swallowed_infinities,
)
from ampwise.trace.module_paths import current_autocast
from ampwise.trace.python_state import random_position
from ampwise.trace.replay import Replay, ReplaySettings, ReplayStep, tensors_of
from ampwise.trace.sample_draws import with_origin_in_loader

__all__ = ["trace"]

MOST_DRAWS = 8  # runs with other random numbers


def trace(function: Callable[..., Any], /, *args: Any, swallowed: bool = False, **kwargs: Any) -> list[Finding]:
    """Run ``function(*args, **kwargs)`` and its backward pass, and explain a NaN or an infinity in loss or gradients.

    The backward pass starts at the loss that the function returns,
    unless that needs no gradient or the function has already called it.

    If a value is not finite, the function is run a few more times, to inspect the operation and to try fixes. Weights,
    buffers, gradients, arguments and random state are restored.

    Call it before the optimizer's step, which would change the weights. A function that draws random numbers, as for
    dropout, draws those that come next: call ``torch.set_rng_state`` first with the state of before the bad step. While
    it is finite, it is run a few more times with others.

    Args:
        function: returns the loss.
        *args: passed to it.
        swallowed: also report infinities that disappeared again and left finite values.
        **kwargs: passed to the function.

    Returns:
        findings, the cause first; none if everything is finite.

    Raises:
        BadInput: the function does not return a loss.

    >>> weight = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> for finding in trace(lambda x: (x * weight).sqrt().sum(), torch.ones(2)):
    ...     print(finding.rule.name)
    infinite-derivative
    """
    if not callable(function):
        raise BadInput(
            f"trace() expects a function and its arguments, trace(loss_fn, x, y); got {type(function).__name__}."
        )
    returned: type = NoneType  # the type of the last run's result
    seed: int | None = None  # of the random numbers of further runs
    draws = False

    def run(settings: ReplaySettings) -> Any:
        nonlocal returned, draws
        if seed is not None:
            torch.manual_seed(seed)
        before = random_position()
        result = function(*args, **kwargs)
        draws = random_position() != before
        returned = type(result)
        found = list(tensors_of(result))
        loss = next((each for each in found if each.numel() == 1 and each.is_floating_point()), None)
        trained = loss
        if loss is None or not loss.requires_grad:  # go back from the sum of all results
            sums = [each.float().sum() for each in found if each.requires_grad and each.is_floating_point()]
            trained = torch.stack(sums).sum() if sums else None
        if trained is not None and settings.goes_back_from(trained):
            kind = trained.device.type
            try:
                with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else torch.enable_grad():
                    trained.backward()
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):  # the function has done it itself
                    raise
        return result if loss is None else loss

    batch = named_tensors(function, args, kwargs)
    models = (function,) if isinstance(function, Module) else ()
    tensors = (*batch.values(), *(parameter for model in models for parameter in model.parameters()))
    usual = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    subject = ReplayStep(
        run=run,
        device=next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), usual),
        models=models,
        batch=batch,
        precision=current_autocast(),
        ran=False,
        touched=(function,),
    )
    with torch.enable_grad(), Replay(subject) as replay:
        taped = replay.taped(ReplaySettings(only_if_finite=True))
        failure = diagnose_recorded(replay, taped) or spoiled_weights(replay, taped)
        for other in range(MOST_DRAWS if draws and failure is None else 0):
            seed = other
            failure = diagnose_recorded(replay, replay.taped(ReplaySettings(only_if_finite=True)))
            if failure is not None:
                break
        if failure is not None:
            return findings_about(with_origin_in_loader(failure, batch))
        seed = None
        ops = taped.tape.ops
        went_back = taped.ended.gradients or any(op.phase != "forward" for op in ops)
        if not (taped.results or went_back or (returned is NoneType and ops)):  # there was nothing to check
            if any(map(taped.tape.made, ops)):
                seen = "NaN or inf occurred in it, perhaps on purpose. Return the loss tensor to learn where."
            else:
                seen = "no operation was seen to fail. Return the loss tensor."
            raise BadInput(
                f"trace(): expected a function that returns the loss as a tensor, got {returned.__name__}; {seen}"
            )
        failure = compiler_failure(replay)
        if failure is not None:
            return findings_about(failure)
        found = swallowed_infinities(replay, taped) if swallowed else ()
        return [finding for each in found for finding in findings_about(each)]
