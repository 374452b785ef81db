"""Time each misaligned matmul as it is and padded, in turns, on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampwise.tune.align.matmul_recorder import RecordedCall
from ampwise.tune.align.matmuls import MatmulSize, PaddingTiming, StepMatmul, StepMatmuls
from ampwise.tune.compare.clocks import Clock

__all__ = ["median_ms", "time_products"]

LEAST_SHARE = 0.005  # of the FLOPs of all matmuls: below this, a layer is not worth measuring
ROUNDS, TIMES, WARM_UP = 15, 5, 3
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Work = Callable[[], object]
Progress = Callable[[str], object]


def time_products(
    products: StepMatmuls, calls: dict[StepMatmul, RecordedCall], device: torch.device, clock: Clock, progress: Progress
) -> StepMatmuls:
    """Return the products with times for those that are misaligned and large enough."""
    wanted = [
        product
        for layer in products.layers
        if products.off_share(layer) >= LEAST_SHARE
        for product in layer.products
        if product.off(products.to)
    ]
    known: dict[object, PaddingTiming | None] = {}  # equal layers have equal products
    found: dict[StepMatmul, PaddingTiming | None] = {}
    for product in wanted:
        key = _alike(product)
        if key not in known:
            progress(f"timing {product.op} {product.shape}")
            known[key] = _timing(product, products.to, calls.get(product), device, clock)
        found[product] = known[key]
    return replace(products, products=tuple(replace(each, timing=found.get(each)) for each in products.products))


def median_ms(work: Work, clock: Clock) -> float:
    """Return the median milliseconds of a step, after a warm-up."""
    for _ in range(2):
        work()
    return statistics.median(1e3 * clock(work, 1) for _ in range(5))


def _alike(product: StepMatmul) -> object:
    return replace(
        product,
        layer="",
        backward=False,
        count=1,
        flops=0.0,
        m=_without_role(product.m),
        n=_without_role(product.n),
        k=_without_role(product.k),
    )


def _without_role(size: MatmulSize) -> MatmulSize:
    return replace(size, role="")


def _timing(
    product: StepMatmul, to: int | None, call: RecordedCall | None, device: torch.device, clock: Clock
) -> PaddingTiming | None:
    padded = product.padded(to)
    works = [_work(each, call, device) for each in (product, padded)]
    if None in works:
        return None
    plain_ms, padded_ms = _times_in_turns([work for work in works if work is not None], clock)
    differences = [one - other for one, other in zip(plain_ms, padded_ms, strict=True)]
    quarter, _, three_quarters = statistics.quantiles(differences, n=4)
    return PaddingTiming(
        ms=statistics.median(plain_ms), padded_ms=statistics.median(padded_ms), spread_ms=three_quarters - quarter
    )


def _times_in_turns(works: Sequence[Work], clock: Clock) -> list[list[float]]:
    """Return milliseconds of each over the rounds; taking turns, all are slowed alike."""
    for work in works:
        for _ in range(WARM_UP):
            work()
    times: list[list[float]] = [[] for _ in works]
    turns = list(zip(works, times, strict=True))
    for _ in range(ROUNDS):
        for work, its in turns:
            its.append(1e3 * clock(work, TIMES))
        turns.reverse()
    return times


def _work(product: StepMatmul, call: RecordedCall | None, device: torch.device) -> Work | None:
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


def _convolution(product: StepMatmul, call: RecordedCall, device: torch.device) -> Work | None:
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
        return lambda: call.function(*tensors, None, *settings)
    gradient = _like(call.args[0], device, {1: channels["out"]})
    wanted = [*settings[6][:2], False]  # without the bias, which is not a matmul
    return lambda: call.function(gradient, *tensors, None, *settings[:6], wanted)


def _like(tensor: Any, device: torch.device, sizes: dict[int, int]) -> Tensor:
    """Return random numbers of the same shape but for some sizes, with the same memory format."""
    shape = [sizes.get(place, size) for place, size in enumerate(tensor.shape)]
    last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    made = torch.randn(shape, device=device).to(tensor.dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made
