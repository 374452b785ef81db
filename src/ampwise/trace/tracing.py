"""``trace``: run a function, and report the first operation that produced a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.diagnosis import diagnose_recorded, findings_about, swallowed_infinities
from ampwise.trace.module_paths import current_autocast
from ampwise.trace.replay import RecordedReplay, Replay, ReplaySettings, ReplayStep, tensors_of

__all__ = ["trace"]


def trace(function: Callable[..., Any], /, *args: Any, swallowed: bool = False, **kwargs: Any) -> list[Finding]:
    """Run ``function(*args, **kwargs)`` and its backward pass, and explain a NaN or an infinity in loss or gradients.

    Returns findings; none if everything is finite. The backward pass starts at the loss that the function returns,
    unless that needs no gradient or the function has already called it. swallowed: also report infinities that
    disappeared again and left finite values.

    If a value is not finite, the function is run a few more times, to inspect the operation and to try fixes. Weights,
    buffers, gradients, arguments and random state are restored.

    >>> weight = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> for finding in trace(lambda x: (x * weight).sqrt().sum(), torch.ones(2)):
    ...     print(finding.rule.name)
    infinite-derivative
    """
    if not callable(function):
        raise BadInput(
            f"trace() expects a function and its arguments, trace(loss_fn, x, y); got {type(function).__name__}."
        )
    returned: list[type] = []  # the type of each run's result
    subject = _subject(function, args, kwargs, returned)
    with torch.enable_grad(), Replay(subject) as replay:
        taped = replay.taped(ReplaySettings(only_if_finite=True))
        if taped.ended.finite:
            _refuse_unchecked(taped, returned[-1])
            found = swallowed_infinities(replay, taped) if swallowed else ()
            return [finding for failure in found for finding in findings_about(failure)]
        return findings_about(diagnose_recorded(replay, taped))


def _refuse_unchecked(taped: RecordedReplay, returned: type) -> None:
    """Raise if nothing was found only because there was no tensor result and no gradient to check."""
    went_back = taped.ended.gradients or any(op.phase != "forward" for op in taped.tape.ops)
    if taped.results or went_back or (returned is NoneType and len(taped.tape)):
        return
    if any(map(taped.tape.made, taped.tape.ops)):
        raise BadInput(
            f"trace(): expected a function that returns the loss as a tensor, got {returned.__name__}; NaN or inf "
            "occurred in it, perhaps on purpose. Return the loss tensor to learn where."
        )
    raise BadInput(
        f"trace(): expected a function that returns the loss as a tensor, got {returned.__name__}; no operation was "
        "seen to fail. Return the loss tensor."
    )


def _subject(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: list[type]
) -> ReplayStep:
    """Return the function call as a step to replay; each run appends the type of its result to ``returned``."""
    batch = named_tensors(function, args, kwargs)

    def run(settings: ReplaySettings) -> Any:
        result = function(*args, **kwargs)
        returned.append(type(result))
        found = list(tensors_of(result))
        loss = next((each for each in found if each.numel() == 1 and each.is_floating_point()), None)
        trained = loss if loss is not None and loss.requires_grad else _sum_of_results(found)
        if trained is not None and settings.goes_back_from(trained):
            _backward(trained)
        return result if loss is None else loss

    return ReplayStep(
        run=run,
        device=_device(batch.values(), function),
        models=(function,) if isinstance(function, Module) else (),
        batch=batch,
        precision=current_autocast(),
        ran=False,
        function=function,
    )


def _sum_of_results(found: list[Tensor]) -> Tensor | None:
    """Return the sum of all results that require gradients, for a backward pass without a loss."""
    trained = [each.float().sum() for each in found if each.requires_grad and each.is_floating_point()]
    return torch.stack(trained).sum() if trained else None


def _backward(loss: Tensor) -> None:
    kind = loss.device.type
    try:
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else torch.enable_grad():
            loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):  # the function has called backward itself
            raise


def _device(tensors: Any, function: Any) -> torch.device:
    parameters = function.parameters() if isinstance(function, Module) else ()
    for tensor in (*tensors, *parameters):
        if tensor.device.type != "cpu":
            return torch.device(tensor.device)
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
