"""``ampwise.align``: run a training step once and find matmuls whose sizes do not suit tensor cores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable
from ampwise.hardware.catalog import Gpu, find_gpu, gpu_named
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.rules import run_checks
from ampwise.trace.user_code import describe_error
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.precision import PRECISIONS, choose_precision
from ampwise.tune.align.alignment import multiple_for
from ampwise.tune.align.matmul_recorder import MatmulRecorder
from ampwise.tune.align.matmuls import StepMatmuls
from ampwise.tune.align.padding_plan import PaddingRequest
from ampwise.tune.align.padding_planner import plan_padding
from ampwise.tune.align.result import Alignment
from ampwise.tune.align.timing import median_ms, time_products
from ampwise.tune.compare.clocks import clock_for
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.train_case import CaseFactory, TrainCase, load_factory, make_factory

__all__ = ["align"]

FORWARD_ONLY = "Only the forward pass was checked: the loss has no graph for a backward pass."

Progress = Callable[[str], object]


def align(
    make: str | Callable[..., Any],
    *,
    precision: str = "bf16",
    gpu: str | None = None,
    batch: int | None = None,
    to: int | None = None,
    device: str | None = None,
    progress: Progress = lambda text: None,
) -> Alignment:
    """Find the matmuls of a training step whose sizes tensor cores cannot load in whole words.

    The step runs once, forward and backward. On a GPU, the gain from better sizes is measured; without one, the step
    runs on tensors without memory, and costs are derived from the FLOPs.

    >>> import torch, ampwise
    >>> def make(batch=4096):
    ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4093), torch.nn.ReLU(), torch.nn.Linear(4093, 1024))
    ...     return model, torch.randn(batch, 1024), lambda x: model(x).square().mean()
    >>> found = ampwise.align(make, device="cpu")
    >>> for layer in found.off:
    ...     print(layer.name, layer.product.shape, *layer.off, found.advice(layer))
    2 4096×1024×4093 inputs 4093 → 4096 ampwise.pad_(model)
    0 4096×4093×1024 outputs 4093 → 4096 ampwise.pad_(model)
    >>> [finding.rule.code for finding in found.findings]
    ['AMP503', 'AMP503']

    make: "train:make", or the function itself, which returns model, batch and loss function.
    precision: the precision to train in: fp32, tf32, fp16, bf16 or fp8.
    gpu: the GPU to train on, by a name of `ampwise gpu --list`; default: the one in this machine.
    batch: rows of the batch.
    to: make sizes multiples of this.
    device: "cuda" or "cpu"; default: a GPU, if this machine has one that matches ``gpu``.
    """
    multiple_for(precision, to)
    target = None if gpu is None else _checked_gpu(gpu, precision)
    place = _device(device, target)
    factory = load_factory(make) if isinstance(make, str) else make_factory(make)
    run = _on_device if place.type == "cuda" else _without_device
    recorded = run(factory, _Request(precision, batch, to, place, progress))
    return _judged(recorded, target, device)


class _Request(NamedTuple):
    precision: str
    batch: int | None
    to: int | None
    device: torch.device
    progress: Progress


class _Recording(NamedTuple):
    case: TrainCase
    products: StepMatmuls
    notes: tuple[str, ...]


def _checked_gpu(name: str, precision: str) -> Gpu:
    found = gpu_named(name)
    if precision != "fp32" and found.has_tensor_cores(precision) is False:
        runs = ", ".join(fmt for fmt in found.tensor_core_formats or ()) or "none"
        raise PrecisionUnavailable(
            f"align(precision={precision!r}, gpu={name!r}): {found.name} has no {precision.upper()} tensor cores, so "
            f"there is nothing to align for. Its tensor cores take: {runs}."
        )
    return found


def _device(asked: str | None, gpu: Gpu | None) -> torch.device:
    """Choose the device to run the step on."""
    here = torch.cuda.is_available()
    if asked is not None:
        place = _named(asked)
        if place.type == "cuda" and not here:
            raise BadInput(f"device {asked!r}: torch sees no CUDA device. Omit it to derive the costs on the CPU.")
        return place
    fits = gpu is None or (here and find_gpu(torch.cuda.get_device_name()) == gpu)
    return torch.device("cuda" if here and fits else "cpu")


def _named(asked: str) -> torch.device:
    try:
        place = torch.device(asked)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise BadInput(f"device {asked!r}: expected cpu or cuda, such as cuda:1.")
    return place


def _arithmetic(precision: str, device: torch.device) -> PrecisionContexts:
    """Return the arithmetic of the step; FP8 uses BF16's, as the sizes of its matmuls are the same."""
    name = "bf16" if precision == "fp8" else precision
    chosen = choose_precision(name, device).precision if device.type == "cuda" else PRECISIONS[name]
    return PrecisionContexts(chosen, device.type)


def _on_device(factory: CaseFactory, request: _Request) -> _Recording:
    arithmetic = _arithmetic(request.precision, request.device)
    request.progress(f"running a step on {request.device}")
    try:
        case = factory.make(request.device, request.batch)
        recorder = _recorded(case, request.precision, arithmetic)
        clock = clock_for(request.device)
        step_ms = median_ms(lambda: _step(case, arithmetic), clock)
        products = _products(case, recorder, request, step_ms=step_ms)
        with arithmetic.pass_context():
            products = time_products(products, recorder.calls, request.device, clock, request.progress)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"{factory.name}: a step does not fit in the memory of {request.device}. Try a smaller --batch."
        ) from error
    facts = torch.cuda.get_device_properties(request.device)
    return _Recording(case, replace(products, gpu=facts.name, processors=facts.multi_processor_count), ())


def _without_device(factory: CaseFactory, request: _Request) -> _Recording:
    arithmetic = _arithmetic(request.precision, request.device)
    request.progress("running a step without memory")
    notes: tuple[str, ...] = ()
    try:
        with without_memory(), _unlogged():
            case = factory.make("cpu", request.batch)
            recorder = _recorded(case, request.precision, arithmetic)
    except AmpwiseError as error:
        if error.__cause__ is None:
            raise  # our own error, on a bad argument
        # Code may read values, which tensors without memory do not have; any other mistake fails again.
        request.progress("running a step on the CPU")
        case = factory.make("cpu", request.batch)
        recorder = _recorded(case, request.precision, arithmetic)
        notes = (f"The step ran on the CPU, as it does not run on tensors without values: {_cause(error)}.",)
    return _Recording(case, _products(case, recorder, request), notes)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log of failures on tensors without values, as the step is then retried with values."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _cause(error: AmpwiseError) -> str:
    return describe_error(error.__cause__ or error)


def _recorded(case: TrainCase, precision: str, arithmetic: PrecisionContexts) -> MatmulRecorder:
    recorder = MatmulRecorder(case.model, precision)
    try:
        with recorder.recording(), run_eagerly():
            _step(case, arithmetic)
    except (AmpwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(f"{case.name}: the training step failed: {describe_error(error)}.") from error
    return recorder


def _step(case: TrainCase, arithmetic: PrecisionContexts) -> None:
    switches = arithmetic.pass_context() if case.device.type == "cuda" else nullcontext()  # only CUDA has them
    with switches:
        with arithmetic.forward():
            loss = case.loss()
        if loss.requires_grad:
            loss.backward()
    case.model.zero_grad(set_to_none=True)


def _products(
    case: TrainCase, recorder: MatmulRecorder, request: _Request, step_ms: float | None = None
) -> StepMatmuls:
    return StepMatmuls(
        subject=case.name,
        precision=request.precision,
        device=request.device.type,
        to=request.to,
        rows=case.rows,
        tokens=case.tokens,
        products=recorder.products,
        step_ms=step_ms,
    )


def _judged(recording: _Recording, target: Gpu | None, device: str | None) -> Alignment:
    products, model = recording.products, recording.case.model
    wish = PaddingRequest(precision=products.precision, to=products.to)
    padding = plan_padding(model, wish)
    heads = [each.name for each in padding.left if each.needs_head]
    if len(heads) == 1:  # with several candidates, do not guess which one makes the logits
        padding = plan_padding(model, replace(wish, head=heads[0]))
    forward_only = () if any(each.backward for each in products.products) else (FORWARD_ONLY,)
    return Alignment(
        products=products if target is None or products.gpu else replace(products, gpu=target.name),
        findings=tuple(run_checks(products)),
        padding=padding,
        basis=_basis(products, target, device),
        head=heads[0] if len(heads) == 1 else None,
        notes=(*recording.notes, *(forward_only if products.products else ())),
    )


def _basis(products: StepMatmuls, target: Gpu | None, device: str | None) -> str:
    if products.step_ms is not None:
        return f"measured here, on {products.gpu}"
    if target is not None:
        why = f"{target.name} is not here"
    else:
        why = "device='cpu' was given" if device is not None and torch.cuda.is_available() else "no GPU here"
    return f"derived, not measured: {why}"
