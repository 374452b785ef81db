"""``ampwise.advise``: from what a caller gives to the question, and from the question to the advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput, MissingDependency
from ampwise.hardware.catalog import Gpu
from ampwise.hardware.target import target_named, unknown_target
from ampwise.tune.advise.advice import Advice
from ampwise.tune.advise.choice import PrecisionChoice, parse_scaling
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.model import ModelFacts, parse_count

if TYPE_CHECKING:
    from torch.nn import Module


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

    Args:
        model: a torch.nn.Module, a function that makes one with a batch, or its name, ``"train:make"``. It is
            inspected, not run; a function is called without allocating memory. Or give ``params`` and ``arch`` only.
        params: number of parameters, such as ``"124M"`` or ``7e9``.
        arch: kind of model, such as ``"transformer"`` or ``"cnn"``.
        gpu: a device of the catalog (``ampwise gpu --list``) or a family such as ``"a100"``, a compute capability such
            as ``"8.6"``, or ``"cpu"``; by default this machine's.
        want, scaling: what you plan to use: ``"bf16"``; ``"none"``, ``"dynamic"`` or ``"manual:1000"``.
        symptom, ideas: what goes wrong, and what was proposed; ``ampwise advise --ideas`` lists both.
        measured: the speed-up of 16 bits over FP32, if you have measured it.

    Returns:
        the recommendation; ``print`` shows it. Its ``findings`` say what speaks against what you plan or propose.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.
        UnknownName: no such device, symptom, idea or precision.

    >>> import ampwise
    >>> advice = ampwise.advise(params="124M", arch="transformer", gpu="v100-sxm2-16", want="bf16")
    >>> advice.precision, advice.refused, advice.findings[0].rule.code
    ('fp16', True, 'AMP701')
    >>> ampwise.advise(gpu="h200", params="7B").loss_scale is None  # BF16 needs none
    True
    """
    want, arch, symptom = (None if name is None else name.strip().lower() for name in (want, arch, symptom))
    if model is not None and params is not None:
        raise BadInput("advise(): give either a model or params; a model's parameters are counted.")
    facts = ModelFacts(parameters=None if params is None else parse_count(params), kind=arch)
    choice = PrecisionChoice(  # it checks the names, before torch is imported to look at this machine or the model
        target=unknown_target(""),
        model=facts,
        want=want,
        scaling=None if scaling is None else parse_scaling(scaling),
        ideas=tuple(dict.fromkeys([ideas] if isinstance(ideas, str) else ideas)),
        symptom=symptom,
        measured=measured,
    )
    target = target_named(gpu)
    if model is not None:
        try:
            from ampwise.tune.advise.read_model import read
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingDependency(
                "advise needs torch to inspect a model: pip install 'ampwise[torch]'. "
                "Or give its size and kind: --params 124M --arch transformer."
            ) from error
        facts = read(model)
        facts = facts if arch is None else replace(facts, kind=arch, guessed=False)
    return decide(replace(choice, target=target, model=facts))
