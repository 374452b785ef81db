"""Which products of a training step miss the sizes that matrix units want: run once, judged, told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor

from ampwise.compiled import as_written
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.precision import PRECISIONS, choose
from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable
from ampwise.evidence.alignment import multiple_for
from ampwise.evidence.products import Products
from ampwise.hardware.catalog import Gpu, find_gpu, gpu_named
from ampwise.rules.judging import judged
from ampwise.tune.align.measuring import median_ms, timed
from ampwise.tune.align.plan import Wish
from ampwise.tune.align.planner import planned
from ampwise.tune.align.recorder import Recorder
from ampwise.tune.align.result import Alignment
from ampwise.tune.compare.timing import clock_for
from ampwise.tune.memory.fake import without_memory
from ampwise.tune.subject import Maker, Subject, maker_named, maker_of
from ampwise.user_code import failure

__all__ = ["align"]

FORWARD_ONLY = "Only the forward pass was looked at: the loss has no graph to go back through."

Tell = Callable[[str], object]


def align(
    make: str | Callable[..., Any],
    *,
    precision: str = "bf16",
    gpu: str | None = None,
    batch: int | None = None,
    to: int | None = None,
    device: str | None = None,
    tell: Tell = lambda text: None,
) -> Alignment:
    """Which matrix products of a training step have sizes that the matrix units cannot load in whole words.

    The step is run once, forward and backward: on a GPU if there is one, and then what other sizes would save is
    measured; else on tensors without memory, and costs are derived from the work.

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
    precision: what it is to be trained in: fp32, tf32, fp16, bf16 or fp8.
    gpu: what it is to run on, by a name of `ampwise gpu --list`; default: the one that is here.
    batch: rows of the batch.
    to: sizes are to be multiples of this.
    device: "cuda" or "cpu"; default: a GPU, if there is one and it is the one that was asked for.
    """
    multiple_for(precision, to)
    asked = None if gpu is None else _checked_gpu(gpu, precision)
    place = _device(device, asked)
    maker = maker_named(make) if isinstance(make, str) else maker_of(make)
    look = _on_device if place.type == "cuda" else _without_device
    seen = look(maker, _Asked(precision, batch, to, place, tell))
    return _judged(seen, asked, device)


class _Asked(NamedTuple):
    precision: str
    batch: int | None
    to: int | None
    device: torch.device
    tell: Tell


class _Looked(NamedTuple):
    subject: Subject
    products: Products
    notes: tuple[str, ...]


def _checked_gpu(name: str, precision: str) -> Gpu:
    found = gpu_named(name)
    if precision != "fp32" and found.has_matrix_units(precision) is False:
        runs = ", ".join(fmt for fmt in found.matrix_formats or ()) or "none"
        raise PrecisionUnavailable(
            f"align(precision={precision!r}, gpu={name!r}): {found.name} has no {precision.upper()} matrix units, so "
            f"there is nothing to align for. Its matrix units take: {runs}."
        )
    return found


def _device(asked: str | None, gpu: Gpu | None) -> torch.device:
    """Where to run the step."""
    here = torch.cuda.is_available()
    if asked is not None:
        place = _named(asked)
        if place.type == "cuda" and not here:
            raise BadInput(f"device {asked!r}: torch sees no CUDA device here. Leave it out: costs are then derived.")
        return place
    fits = gpu is None or (here and find_gpu(torch.cuda.get_device_name()) == gpu)
    return torch.device("cuda" if here and fits else "cpu")


def _named(asked: str) -> torch.device:
    try:
        place = torch.device(asked)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise BadInput(f"device {asked!r}: expected is cuda, such as cuda:1, or cpu.")
    return place


def _arithmetic(precision: str, device: torch.device) -> Arithmetic:
    """What the step runs in: the sizes of its products are the same in FP8 as in BF16."""
    name = "bf16" if precision == "fp8" else precision
    chosen = choose(name, device).precision if device.type == "cuda" else PRECISIONS[name]
    return Arithmetic(chosen, device.type)


def _on_device(maker: Maker, asked: _Asked) -> _Looked:
    arithmetic = _arithmetic(asked.precision, asked.device)
    asked.tell(f"running a step on {asked.device}")
    try:
        subject = maker.make(asked.device, asked.batch)
        recorder = _recorded(subject, asked.precision, arithmetic)
        clock = clock_for(asked.device)
        step_ms = median_ms(lambda: _step(subject, arithmetic), clock)
        products = _products(subject, recorder, asked, step_ms=step_ms)
        with arithmetic.products():
            products = timed(products, recorder.calls, asked.device, clock, asked.tell)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"{maker.name}: a step does not fit into the memory of {asked.device}. Try a smaller --batch."
        ) from error
    facts = torch.cuda.get_device_properties(asked.device)
    return _Looked(subject, replace(products, gpu=facts.name, processors=facts.multi_processor_count), ())


def _without_device(maker: Maker, asked: _Asked) -> _Looked:
    arithmetic = _arithmetic(asked.precision, asked.device)
    asked.tell("running a step without memory")
    notes: tuple[str, ...] = ()
    try:
        with without_memory(), _unlogged():
            subject = maker.make("cpu", asked.batch)
            recorder = _recorded(subject, asked.precision, arithmetic)
    except AmpwiseError as error:
        if error.__cause__ is None:
            raise  # ours, about what was asked
        # It may look at values, which tensors without memory have not; any other mistake is made again.
        asked.tell("running a step on the CPU")
        subject = maker.make("cpu", asked.batch)
        recorder = _recorded(subject, asked.precision, arithmetic)
        notes = (f"The step was run on the CPU, since it does not run without values: {_cause(error)}.",)
    return _Looked(subject, _products(subject, recorder, asked), notes)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Torch logs what fails without values, with all the frames of its own; here it is tried again, with values."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _cause(error: AmpwiseError) -> str:
    return failure(error.__cause__ or error)


def _recorded(subject: Subject, precision: str, arithmetic: Arithmetic) -> Recorder:
    recorder = Recorder(subject.model, precision)
    try:
        with recorder.recording(), as_written():
            _step(subject, arithmetic)
    except (AmpwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(f"{subject.name}: its step failed: {failure(error)}.") from error
    return recorder


def _step(subject: Subject, arithmetic: Arithmetic) -> None:
    switches = arithmetic.products() if subject.device.type == "cuda" else nullcontext()  # which others lack
    with switches:
        with arithmetic.forward():
            loss = subject.loss()
        if loss.requires_grad:
            loss.backward()
    subject.model.zero_grad(set_to_none=True)


def _products(subject: Subject, recorder: Recorder, asked: _Asked, step_ms: float | None = None) -> Products:
    return Products(
        subject=subject.name,
        precision=asked.precision,
        device=asked.device.type,
        to=asked.to,
        rows=subject.rows,
        tokens=subject.tokens,
        products=recorder.products,
        step_ms=step_ms,
    )


def _judged(looked: _Looked, asked: Gpu | None, device: str | None) -> Alignment:
    products, model = looked.products, looked.subject.model
    wish = Wish(precision=products.precision, to=products.to)
    padding = planned(model, wish)
    heads = [each.name for each in padding.left if each.needs_head]
    if len(heads) == 1:  # which of several makes the logits is not for us to guess
        padding = planned(model, replace(wish, head=heads[0]))
    forward_only = () if any(each.backward for each in products.products) else (FORWARD_ONLY,)
    return Alignment(
        products=products if asked is None or products.gpu else replace(products, gpu=asked.name),
        findings=tuple(judged(products, "model")),
        padding=padding,
        basis=_basis(products, asked, device),
        head=heads[0] if len(heads) == 1 else None,
        notes=(*looked.notes, *(forward_only if products.products else ())),
    )


def _basis(products: Products, asked: Gpu | None, device: str | None) -> str:
    if products.step_ms is not None:
        return f"measured here, on {products.gpu}"
    if asked is not None:
        why = f"{asked.name} is not here"
    else:
        why = "the CPU was asked for" if device is not None and torch.cuda.is_available() else "no GPU here"
    return f"derived, not measured: {why}"
