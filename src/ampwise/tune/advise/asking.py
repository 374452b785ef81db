"""From what a caller gives to the question, and from the question to the advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput, MissingDependency
from ampwise.hardware.catalog import Gpu, gpu_named
from ampwise.rules.evidence.choice.choice import LossScaling, PrecisionChoice, parse_scaling
from ampwise.rules.evidence.choice.model import ModelFacts, parse_count
from ampwise.rules.evidence.choice.target import (
    Target,
    target_for_capability,
    target_for_cpu,
    target_for_gpu,
    target_for_machine,
)
from ampwise.tune.advise.advice import Advice
from ampwise.tune.advise.deciding import decide

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["advise", "target_named"]

CPU = "cpu"


def advise(
    model: Module | Callable[..., Any] | str | None = None,
    *,
    params: int | str | None = None,
    arch: str | None = None,
    gpu: str | Gpu | None = None,
    want: str | None = None,
    symptom: str | None = None,
    ideas: str | Iterable[str] = (),
    scaling: str | None = None,
    measured: float | None = None,
) -> Advice:
    """Recommend a precision to train in, and say why: by the device, the model, the symptom, and measurements.

    >>> import ampwise
    >>> advice = ampwise.advise(params="124M", arch="transformer", gpu="v100-sxm2-16", want="bf16")
    >>> advice.precision, advice.refused, advice.findings[0].rule.code
    ('fp16', True, 'AMP701')
    >>> ampwise.advise(gpu="h200", params="7B").loss_scale is None  # BF16 needs none
    True

    model: a torch.nn.Module, a function that makes one with a batch, or its name, ``"train:make"``. It is inspected,
            not run; a function is called without allocating memory. Or give ``params`` and ``arch`` only.
    gpu: a device of the catalog (``ampwise gpu --list``), a compute capability such as ``"8.6"``, or ``"cpu"``; by
            default this machine's.
    want, scaling: what you plan to use: ``"bf16"``; ``"none"``, ``"dynamic"`` or ``"manual:1000"``.
    symptom, ideas: what goes wrong, and what was proposed; ``ampwise advise --ideas`` lists both.
    measured: the speed-up of 16 bits over FP32, if you have measured it.

    ``print`` shows the answer. ``findings`` say what speaks against what you plan or propose.
    """
    choice = PrecisionChoice(
        target=target_named(gpu),
        model=_model(model, params, arch),
        want=_lower(want),
        scaling=_scaling(scaling),
        ideas=tuple(dict.fromkeys([ideas] if isinstance(ideas, str) else ideas)),
        symptom=_lower(symptom),
        measured=measured,
    )
    return decide(choice)


def target_named(gpu: str | Gpu | None) -> Target:
    """A device by its name; without one this machine is asked, which imports torch."""
    if isinstance(gpu, Gpu):
        return target_for_gpu(gpu)
    if gpu is None:
        from ampwise.hardware import describe_machine

        return target_for_machine(describe_machine())
    if gpu.strip().lower() == CPU:
        from ampwise.hardware.cpu import describe_cpu

        return target_for_cpu(describe_cpu())
    return target_for_capability(gpu) or target_for_gpu(gpu_named(gpu))


def _model(model: Any, params: int | str | None, arch: str | None) -> ModelFacts:
    kind = _lower(arch)
    if model is None:
        return ModelFacts(parameters=_count(params), kind=kind)
    if params is not None:
        raise BadInput("advise(): give either a model or params; a model's parameters are counted.")
    facts = _read(model)
    return facts if kind is None else replace(facts, kind=kind, guessed=False)


def _read(model: Any) -> ModelFacts:
    try:
        from ampwise.tune.advise.reading import read
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            "advise needs torch to inspect a model: pip install 'ampwise[torch]'. "
            "Or give its size and kind: --params 124M --arch transformer."
        ) from error
    return read(model)


def _count(params: int | str | None) -> int | None:
    if params is None:
        return None
    return parse_count(str(params)) if not isinstance(params, bool) else parse_count(repr(params))


def _scaling(scaling: str | None) -> LossScaling | None:
    return None if scaling is None else parse_scaling(scaling)


def _lower(name: str | None) -> str | None:
    return None if name is None else name.strip().lower()
