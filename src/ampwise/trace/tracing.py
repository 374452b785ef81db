"""``trace``: run a function, and say which operation went bad first, if one did."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.trace.explaining import findings_of, found_alone, swallowed_in
from ampwise.trace.names import named_tensors
from ampwise.trace.paths import autocast_here
from ampwise.trace.replay import Replay, Settings, Subject, Taped, tensors_of

__all__ = ["trace"]


def trace(function: Callable[..., Any], /, *args: Any, swallowed: bool = False, **kwargs: Any) -> list[Finding]:
    """Run ``function(*args, **kwargs)`` and its backward pass, and explain a NaN or an infinity in loss or gradients.

    Returns findings; none where all is finite. The backward pass is that of the loss it returns, unless it has none or
    the function has called it. swallowed: report infinities, too, that arose on the way and left finite values.

    It is run up to a few times more when it fails: for a closer look, and to try what would mend it. Weights, buffers,
    gradients, arguments and random numbers are left as they were.

    >>> weight = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> for finding in trace(lambda x: (x * weight).sqrt().sum(), torch.ones(2)):
    ...     print(finding.rule.name)
    infinite-derivative
    """
    if not callable(function):
        raise BadInput(
            "trace() takes a function, and what it is to be given: trace(loss_fn, x, y). "
            f"Not {type(function).__name__}."
        )
    returned: list[type] = []  # of what it has returned
    subject = _subject(function, args, kwargs, returned)
    with torch.enable_grad(), Replay(subject) as replay:
        taped = replay.taped(Settings(only_if_finite=True))
        if taped.ended.finite:
            _refuse_unseen(taped, returned[-1])
            found = swallowed_in(replay, taped) if swallowed else ()
            return [finding for incident in found for finding in findings_of(incident)]
        return findings_of(found_alone(replay, taped))


def _refuse_unseen(taped: Taped, returned: type) -> None:
    """Nothing was found; but nothing came back to be looked at, and there were no gradients."""
    went_back = taped.ended.gradients or any(op.phase != "forward" for op in taped.tape.ops)
    if taped.results or went_back or (returned is NoneType and len(taped.tape)):
        return
    if any(map(taped.tape.made, taped.tape.ops)):
        raise BadInput(
            f"trace(): the function returned no tensor but {returned.__name__}, and NaN or inf arose in it, perhaps on "
            "purpose; return the loss, not a number, and it says where."
        )
    raise BadInput(
        "trace(): the function returned no tensor, and no operation of it was seen to fail; return the loss, not a "
        "number."
    )


def _subject(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: list[type]
) -> Subject:
    """returned: where the type of what the function returns is put."""
    batch = named_tensors(function, args, kwargs)

    def run(settings: Settings) -> Any:
        result = function(*args, **kwargs)
        returned.append(type(result))
        found = list(tensors_of(result))
        loss = next((each for each in found if each.numel() == 1 and each.is_floating_point()), None)
        trained = loss if loss is not None and loss.requires_grad else _together(found)
        if trained is not None and settings.goes_back_from(trained):
            _backward(trained)
        return result if loss is None else loss

    return Subject(
        run=run,
        device=_device(batch.values(), function),
        models=(function,) if isinstance(function, Module) else (),
        batch=batch,
        precision=autocast_here(),
        ran=False,
        function=function,
    )


def _together(found: list[Tensor]) -> Tensor | None:
    """Something to go back from where there is no loss."""
    trained = [each.float().sum() for each in found if each.requires_grad and each.is_floating_point()]
    return torch.stack(trained).sum() if trained else None


def _backward(loss: Tensor) -> None:
    kind = loss.device.type
    try:
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else torch.enable_grad():
            loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):  # else the function has done it
            raise


def _device(tensors: Any, function: Any) -> torch.device:
    parameters = function.parameters() if isinstance(function, Module) else ()
    for tensor in (*tensors, *parameters):
        if tensor.device.type != "cpu":
            return torch.device(tensor.device)
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
