"""What better sizes would save, on the device: each product as it is and padded, by turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampwise.evidence.products import Product, Products, Size, Timing
from ampwise.tune.align.recorder import Call
from ampwise.tune.compare.timing import Clock

__all__ = ["median_ms", "timed"]

LEAST_SHARE = 0.005  # of the matrix work: a layer with less is not worth the time to measure it
ROUNDS, TIMES, WARM_UP = 15, 5, 3
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Work = Callable[[], object]
Told = Callable[[str], object]


def timed(products: Products, calls: dict[Product, Call], device: torch.device, clock: Clock, tell: Told) -> Products:
    """The same products, with the times of those that lie badly and are worth it."""
    wanted = [
        product
        for layer in products.layers
        if products.off_share(layer) >= LEAST_SHARE
        for product in layer.products
        if product.off(products.to)
    ]
    known: dict[object, Timing | None] = {}  # layers alike have products alike
    found: dict[Product, Timing | None] = {}
    for product in wanted:
        key = _alike(product)
        if key not in known:
            tell(f"timing {product.op} {product.shape}")
            known[key] = _timing(product, products.to, calls.get(product), device, clock)
        found[product] = known[key]
    return replace(products, products=tuple(replace(each, timing=found.get(each)) for each in products.products))


def median_ms(work: Work, clock: Clock) -> float:
    """Of a step, after some to warm up."""
    for _ in range(2):
        work()
    return statistics.median(1e3 * clock(work, 1) for _ in range(5))


def _alike(product: Product) -> object:
    return replace(
        product,
        layer="",
        backward=False,
        count=1,
        flops=0.0,
        m=_bare(product.m),
        n=_bare(product.n),
        k=_bare(product.k),
    )


def _bare(size: Size) -> Size:
    return replace(size, role="")


def _timing(product: Product, to: int | None, call: Call | None, device: torch.device, clock: Clock) -> Timing | None:
    padded = product.padded(to)
    works = [_work(each, call, device) for each in (product, padded)]
    if None in works:
        return None
    plain_ms, padded_ms = _by_turns([work for work in works if work is not None], clock)
    apart = [one - other for one, other in zip(plain_ms, padded_ms, strict=True)]
    quarter, _, three_quarters = statistics.quantiles(apart, n=4)
    return Timing(
        ms=statistics.median(plain_ms), padded_ms=statistics.median(padded_ms), spread_ms=three_quarters - quarter
    )


def _by_turns(works: Sequence[Work], clock: Clock) -> list[list[float]]:
    """Milliseconds of each, in rounds; what slows the device down for a while slows down all."""
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


def _work(product: Product, call: Call | None, device: torch.device) -> Work | None:
    """A call of the product on random numbers; None of what cannot be called with other sizes."""
    if product.precision not in DTYPES:
        return None
    if product.kind in ("linear", "product"):
        left, right = _matrices(product, device)
        return lambda: torch.matmul(left, right)
    return _convolution(product, call, device) if product.kind == "convolution" and call is not None else None


def _matrices(product: Product, device: torch.device) -> Iterator[Tensor]:
    sizes = {"m": product.m.size, "n": product.n.size, "k": product.k.size}
    for letters, along in zip(("mk", "kn"), product.stored, strict=False):
        by_columns = along == letters[0]
        shape = [sizes[letter] for letter in (reversed(letters) if by_columns else letters)]
        batch = [product.batches] if product.batches > 1 else []
        made = torch.randn(*batch, *shape, device=device).to(DTYPES[product.precision])
        yield made.mT if by_columns else made


def _convolution(product: Product, call: Call, device: torch.device) -> Work | None:
    """The call itself, with as many channels as the product has; of one group only, whose channels are the layer's."""
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
    wanted = [*settings[6][:2], False]  # without the bias, which is no product
    return lambda: call.function(gradient, *tensors, None, *settings[:6], wanted)


def _like(tensor: Any, device: torch.device, sizes: dict[int, int]) -> Tensor:
    """Random numbers of the same shape but for some sizes, in the same order in memory."""
    shape = [sizes.get(place, size) for place, size in enumerate(tensor.shape)]
    last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    made = torch.randn(shape, device=device).to(tensor.dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made
