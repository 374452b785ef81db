"""``ampwise.align``: run a training step once and find matmuls whose sizes do not suit tensor cores."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable
from ampwise.finding.registry import run_checks
from ampwise.hardware.catalog import Gpu, find_gpu, gpu_named
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.trace.user_code import describe_error
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.precision import PRECISIONS, choose_precision
from ampwise.tune.align.matmul_recorder import MatmulRecorder
from ampwise.tune.align.matmuls import MatmulSize, PaddingTiming, StepMatmul, StepMatmuls, multiple_for
from ampwise.tune.align.padding_plan import plan_padding
from ampwise.tune.align.result import Alignment
from ampwise.tune.bench.clocks import Clock, clock_for
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.train_case import CaseFactory, TrainCase, make_factory

FORWARD_ONLY = "Only the forward pass was checked: the loss has no graph for a backward pass."
LEAST_SHARE = 0.005  # of the FLOPs of all matmuls: below this, a layer is not worth measuring
ROUNDS, TIMES, WARM_UP = 15, 5, 3
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Work = Callable[[], object]
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

    Args:
        make: "train:make", or the function itself, which returns model, batch and loss function.
        precision: the precision to train in: fp32, tf32, fp16, bf16 or fp8.
        gpu: the GPU to train on, by a name of `ampwise gpu --list`; default: the one in this machine.
        batch: rows of the batch.
        to: make sizes multiples of this.
        device: "cuda" or "cpu"; default: a GPU, if this machine has one that matches ``gpu``.
        progress: called with the current activity.

    Returns:
        the misaligned layers, what each costs, and what to do; ``print`` shows it.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

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
    """
    multiple_for(precision, to)
    target = None if gpu is None else _checked_gpu(gpu, precision)
    place = _device(device, target)
    factory = make_factory(make)
    run = _on_device if place.type == "cuda" else _without_device
    case, products, notes = run(factory, precision, batch, to, place, progress)
    if products.step_ms is not None:
        basis = f"measured here, on {products.gpu}"
    else:
        here = "device='cpu' was given" if device is not None and torch.cuda.is_available() else "no GPU here"
        basis = f"derived, not measured: {here if target is None else f'{target.name} is not here'}"
    padding = plan_padding(case.model, precision=precision, to=to)
    heads = [each.name for each in padding.left if each.needs_head]
    head = heads[0] if len(heads) == 1 else None  # with several candidates, do not guess which one makes the logits
    if head is not None:
        padding = plan_padding(case.model, precision=precision, to=to, head=head)
    if products.products and not any(each.backward for each in products.products):
        notes = (*notes, FORWARD_ONLY)
    return Alignment(
        products=products if target is None or products.gpu else replace(products, gpu=target.name),
        findings=tuple(run_checks(products)),
        padding=padding,
        basis=basis,
        head=head,
        notes=notes,
    )


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
        try:
            place = torch.device(asked)
        except RuntimeError:
            place = torch.device("meta")
        if place.type not in ("cpu", "cuda"):
            raise BadInput(f"device {asked!r}: expected cpu or cuda, such as cuda:1.")
        if place.type == "cuda" and not here:
            raise BadInput(f"device {asked!r}: torch sees no CUDA device. Omit it to derive the costs on the CPU.")
        return place
    fits = gpu is None or (here and find_gpu(torch.cuda.get_device_name()) == gpu)
    return torch.device("cuda" if here and fits else "cpu")


# --- the step --------------------------------------------------------------------------------------------------------

Recording = tuple[TrainCase, StepMatmuls, tuple[str, ...]]  # with notes


def _on_device(
    factory: CaseFactory, precision: str, batch: int | None, to: int | None, device: torch.device, progress: Progress
) -> Recording:
    arithmetic = _arithmetic(precision, device)
    progress(f"running a step on {device}")
    try:
        case = factory.make(device, batch)
        recorder = _recorded(case, precision, arithmetic)
        clock = clock_for(device)
        for _ in range(2):
            _step(case, arithmetic)
        step_ms = statistics.median(1e3 * clock(lambda: _step(case, arithmetic), 1) for _ in range(5))
        products = replace(_products(case, recorder, precision, device, to), step_ms=step_ms)
        with arithmetic.pass_context():
            products = _timed(products, recorder.calls, device, clock, progress)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"{factory.name}: a step does not fit in the memory of {device}. Try a smaller --batch."
        ) from error
    facts = torch.cuda.get_device_properties(device)
    return case, replace(products, gpu=facts.name, processors=facts.multi_processor_count), ()


def _without_device(
    factory: CaseFactory, precision: str, batch: int | None, to: int | None, device: torch.device, progress: Progress
) -> Recording:
    arithmetic = _arithmetic(precision, device)
    progress("running a step without memory")
    notes: tuple[str, ...] = ()
    try:
        with without_memory():
            case = factory.make("cpu", batch)
            recorder = _recorded(case, precision, arithmetic)
    except AmpwiseError as error:
        if error.__cause__ is None:
            raise  # our own error, on a bad argument
        # Code may read values, which tensors without memory do not have; any other mistake fails again.
        progress("running a step on the CPU")
        case = factory.make("cpu", batch)
        recorder = _recorded(case, precision, arithmetic)
        why = describe_error(error.__cause__)
        notes = (f"The step ran on the CPU, as it does not run on tensors without values: {why}.",)
    return case, _products(case, recorder, precision, device, to), notes


def _arithmetic(precision: str, device: torch.device) -> PrecisionContexts:
    """Return the arithmetic of the step; FP8 uses BF16's, as the sizes of its matmuls are the same."""
    name = "bf16" if precision == "fp8" else precision
    chosen = choose_precision(name, device).precision if device.type == "cuda" else PRECISIONS[name]
    return PrecisionContexts(chosen, device.type)


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
    case: TrainCase, recorder: MatmulRecorder, precision: str, device: torch.device, to: int | None
) -> StepMatmuls:
    return StepMatmuls(
        name=case.name,
        precision=precision,
        device=device.type,
        to=to,
        rows=case.rows,
        tokens=case.tokens,
        products=recorder.products,
    )


# --- times of misaligned matmuls, as they are and padded, in turns on the device -------------------------------------


def _timed(
    products: StepMatmuls, calls: dict[StepMatmul, partial[Any]], device: torch.device, clock: Clock, progress: Progress
) -> StepMatmuls:
    """Return the products with times for those that are misaligned and large enough."""

    def without_role(size: MatmulSize) -> MatmulSize:
        return replace(size, role="")

    wanted = [
        product
        for layer in products.layers
        if products.off_share(layer) >= LEAST_SHARE
        for product in layer.products
        if product.off(products.to)
    ]
    known: dict[StepMatmul, PaddingTiming | None] = {}  # equal layers have equal products
    found: dict[StepMatmul, PaddingTiming | None] = {}
    for product in wanted:
        m, n, k = map(without_role, product.sizes)
        key = replace(product, layer="", backward=False, count=1, flops=0.0, m=m, n=n, k=k)
        if key not in known:
            progress(f"timing {product.op} {product.shape}")
            works = [_work(each, calls.get(product), device) for each in (product, product.padded(products.to))]
            known[key] = None if None in works else _timing([work for work in works if work is not None], clock)
        found[product] = known[key]
    return replace(products, products=tuple(replace(each, timing=found.get(each)) for each in products.products))


def _timing(works: Sequence[Work], clock: Clock) -> PaddingTiming:
    """Time the work as it is and padded; taking turns, both are slowed alike."""
    for work in works:
        for _ in range(WARM_UP):
            work()
    times: list[list[float]] = [[] for _ in works]
    turns = list(zip(works, times, strict=True))
    for _ in range(ROUNDS):
        for work, its in turns:
            its.append(1e3 * clock(work, TIMES))
        turns.reverse()
    plain_ms, padded_ms = times
    differences = [one - other for one, other in zip(plain_ms, padded_ms, strict=True)]
    quarter, _, three_quarters = statistics.quantiles(differences, n=4)
    return PaddingTiming(
        ms=statistics.median(plain_ms), padded_ms=statistics.median(padded_ms), spread_ms=three_quarters - quarter
    )


def _work(product: StepMatmul, call: partial[Any] | None, device: torch.device) -> Work | None:
    """Return a call of the product on random numbers; None if it cannot be called with other sizes."""
    if product.precision not in DTYPES:
        return None
    if product.kind in ("linear", "product"):
        left, right = _matrices(product, device)
        return lambda: torch.matmul(left, right)
    return _convolution(product, call, device) if product.kind == "convolution" and call is not None else None


def _matrices(product: StepMatmul, device: torch.device) -> Iterator[Tensor]:
    sizes = {"m": product.m.size, "n": product.n.size, "k": product.k.size}
    for letters, along in zip(("mk", "kn"), product.stored, strict=False):
        by_columns = along == letters[0]
        shape = [sizes[letter] for letter in (reversed(letters) if by_columns else letters)]
        batch = [product.batches] if product.batches > 1 else []
        made = torch.randn(*batch, *shape, device=device).to(DTYPES[product.precision])
        yield made.mT if by_columns else made


def _convolution(product: StepMatmul, call: partial[Any], device: torch.device) -> Work | None:
    """Return the call with the product's number of channels; None for grouped or transposed convolutions."""
    backward = product.backward
    settings = call.args[4:] if backward else call.args[3:]
    transposed, groups = settings[3], settings[5]
    if groups != 1 or transposed:
        return None
    given, weight = call.args[1:3] if backward else call.args[:2]
    channels = {"in": product.k.size, "out": product.n.size}
    tensors = [
        _like(given, device, {1: channels["in"]}),
        _like(weight, device, {0: channels["out"], 1: channels["in"]}),
    ]
    if not backward:
        return lambda: call.func(*tensors, None, *settings)
    gradient = _like(call.args[0], device, {1: channels["out"]})
    wanted = [*settings[6][:2], False]  # without the bias, which is not a matmul
    return lambda: call.func(gradient, *tensors, None, *settings[:6], wanted)


def _like(tensor: Any, device: torch.device, sizes: dict[int, int]) -> Tensor:
    """Return random numbers of the same shape but for some sizes, with the same memory format."""
    shape = [sizes.get(place, size) for place, size in enumerate(tensor.shape)]
    last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    made = torch.randn(shape, device=device).to(tensor.dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made
