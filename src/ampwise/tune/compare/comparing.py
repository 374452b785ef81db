"""The comparison, from a user's function to the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ampwise.engine.precision.precision import facts_of
from ampwise.errors import BadInput
from ampwise.evidence.speed import BASE, Speeds
from ampwise.evidence.speed_command import command_of
from ampwise.hardware.cpu import BF16_FEATURES, describe_cpu
from ampwise.hardware.torch_facts import read_device, read_fp32_switches
from ampwise.randomness import captured, restore_random
from ampwise.trace.capsule.rerunning import device_named
from ampwise.tune.compare.contender import contenders
from ampwise.tune.compare.measuring import Measuring, Progress, Settings
from ampwise.tune.compare.planning import checked_names, plan
from ampwise.tune.compare.result import PrecisionComparison
from ampwise.tune.compare.timing import Clock, clock_for
from ampwise.tune.step import make_optimizer
from ampwise.tune.subject import Maker, Subject, maker_named, maker_of

__all__ = ["compare"]

OPTIMIZER, CLIP_NORM, NO_CLIP = "adamw", 1.0, "none"  # as the verb has them, too


def compare(
    make: Callable[..., Any] | str,
    precisions: Iterable[str] | None = None,
    *,
    compiled: bool = False,
    batch: int | None = None,
    device: str | torch.device | None = None,
    optimizer: str = OPTIMIZER,
    clip_norm: float | None = CLIP_NORM,
    keep_fp32: Sequence[str] = (),
    rounds: int | None = None,
    steps: int | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> PrecisionComparison:
    """Train a few steps in each precision, in turns, and say which is faster, by how much, and why not more.

    ``make`` returns a model, a batch and the function that makes the loss; it is called once.

    >>> import torch, ampwise
    >>> def make(batch=4):
    ...     model = torch.nn.Linear(8, 1)
    ...     x = torch.randn(batch, 8)
    ...     return model, (x,), lambda x: model(x).square().mean()
    >>> result = ampwise.compare(make, ["fp32", "bf16"], device="cpu", rounds=2, steps=1)
    >>> [(row.label, row.loss.same) for row in result.rows]
    [('fp32', True), ('bf16', True)]

    ``precisions``: of fp32, tf32, fp16, bf16 and fp8; those the device runs by default. FP32 is there in any case.
    ``compiled``: measure each with ``torch.compile``, too. ``batch``: rows, where the function takes them, else its
    batch is cut or repeated. ``optimizer``: a name, used unless the function returns one of its own. ``keep_fp32``:
    patterns of modules that stay in FP32 where the others have 16 bits. ``rounds`` and ``steps`` of a turn are chosen
    by how long a step takes. ``progress`` is called with steps done, steps in all, and what is being done; ``clock``
    takes the place of the device's own. Weights, gradients and random numbers of yours are not touched, unless the
    function returns them.
    """
    names = None if precisions is None else checked_names(precisions)
    _check(rounds=rounds, steps=steps)
    maker = maker_named(make) if isinstance(make, str) else maker_of(make)
    where = device_named(None if device is None else str(device), "cuda")
    planned = plan(names, facts_of(where), where, compiled=compiled)
    with _random_numbers_kept(where):
        subject = maker.make(where, batch)
        if not subject.parameters:
            raise BadInput(f"{maker.name}: the model has no parameter that is trained, so there is no step to compare.")
        own = subject.optimizer or make_optimizer(optimizer, subject.parameters, fused=where.type == "cuda")
        fielded = contenders(planned.entries, subject, own, clip_norm=clip_norm, kept=keep_fp32)
        settings = Settings(rounds=rounds, steps=steps, progress=progress, clock=clock or clock_for(where))
        measured = Measuring(subject, fielded, settings)
        measured.run()
    asked = {
        "--device": None if device is None and where.type == "cuda" else where,
        "--precisions": None if names is None else ",".join(names),
        "--batch": batch,
        "--optimizer": None if optimizer == OPTIMIZER else optimizer,
        "--clip": None if clip_norm == CLIP_NORM else clip_norm or NO_CLIP,
        "--rounds": rounds,
        "--steps": steps,
    }
    speeds = Speeds(
        subject=maker.name,
        command=command_of(_typed(maker), _options(asked, compiled, keep_fp32)),
        device=where.type,
        device_name=_name(where),
        rows=(*measured.rows(), *planned.left_out),
        noise=measured.noise,
        rounds=measured.rounds,
        batch=subject.rows,
        tokens=subject.tokens,
        kept=tuple(keep_fp32),
        flops=measured.flops,
        layers=measured.layers(),
        clocks=measured.clocks,
        tf32_was_on=_tf32_was_on(subject),
        bf16_instructions=_bf16_instructions(where),
        not_measured=tuple(measured.not_measured()),
    )
    return PrecisionComparison(speeds)


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BadInput(f"compare: {name}={number!r} makes no sense: one is the least.")


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """What comes next, of torch, Python and numpy, is what would have come next."""
    before = captured(device)
    try:
        yield
    finally:
        restore_random(before, device)


def _typed(maker: Maker) -> str:
    """The function as one names it in a command."""
    return maker.name if ":" in maker.name else f"{_module(maker)}:{maker.name}"


def _options(asked: Mapping[str, object], compiled: bool, kept: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Those of the verb that are not as they are by default."""
    yield from ((name, str(value)) for name, value in asked.items() if value is not None)
    if compiled:
        yield ("--compile",)
    yield from (("--keep", f"{BASE}={pattern}") for pattern in kept)


def _module(maker: Maker) -> str:
    module = getattr(maker.function, "__module__", "__main__")
    if module != "__main__":
        return str(module)
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "train.py").name


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (describe_cpu().model or "CPU") if device.type == "cpu" else device.type


def _tf32_was_on(subject: Subject) -> tuple[str, ...]:
    """For what, where it has an effect."""
    device = subject.device
    if device.type != "cuda" or not read_device(torch, device.index or 0).has_matrix_units("tf32"):
        return ()
    switches = read_fp32_switches(torch)
    convolves = any(isinstance(module, _ConvNd) for module in nn.Module.modules(subject.model))
    on = {"matrix products": switches.matmul_tf32, "convolutions": switches.convolution_tf32 and convolves}
    return tuple(what for what, is_on in on.items() if is_on)


def _bf16_instructions(device: torch.device) -> bool | None:
    features = describe_cpu().features if device.type == "cpu" else None
    return None if features is None else any(feature in features for feature in BF16_FEATURES)
