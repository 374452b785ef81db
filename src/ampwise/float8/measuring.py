"""Which layers gain by FP8: each distinct shape timed in BF16 and in each recipe, forward and backward with casts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.float8.by_torchao import float8_of_torchao
from ampwise.float8.by_transformer_engine import transformer_engine
from ampwise.float8.checking import refuse_wrong_kernels
from ampwise.float8.layer import fit
from ampwise.float8.layers import is_delayed, made
from ampwise.float8.recipe import OURS, RECIPES, TORCHAO, TRANSFORMER_ENGINE, Fp8

__all__ = ["GAIN", "Measured", "Shapes", "candidates", "in_turns", "measured", "replayed_in_turns", "verdict"]

GAIN = 0.03  # less than that, and the noise of a step hides it
ALIKE = 0.02  # of two recipes so near to each other, the one that stands first
CALLS, ROUNDS = 8, 7  # back to back, so that launching counts as it does in a step; and how often
WARM_UP = 3

Shapes = Mapping[nn.Linear, tuple[int, torch.dtype]]  # how many rows a layer is given, and of what type
Work = Callable[[], object]
Timer = Callable[[Mapping[str, Work], torch.device], dict[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a layer is to run in, and the times that say so."""

    recipe: str | None  # None: BF16
    why: str


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool
    weight_dtype: torch.dtype
    weight_trained: bool

    def __str__(self) -> str:
        return f"{self.rows}×{self.inputs}→{self.outputs}"


def measured(
    shapes: Shapes,
    fp8: Fp8,
    device: torch.device,
    *,
    compiled: bool,
    graphed: bool = False,
    timer: Timer | None = None,
) -> dict[nn.Linear, Measured]:
    """For each layer, what it is to run in; layers of the same shape are measured once. Waits for the device.

    Timed as they will run: compiled or not, and replayed by CUDA graphs, which spare the host its part, or not.
    """
    recipes = candidates(fp8, device)
    timer = timer or (replayed_in_turns if graphed else in_turns)
    found: dict[_Shape, Measured] = {}
    for module, given in shapes.items():
        shape = _shape_of(module, *given)
        if shape not in found:
            found[shape] = _one(shape, recipes, device, compiled, timer)
    return {module: found[_shape_of(module, *given)] for module, given in shapes.items()}


def candidates(fp8: Fp8, device: torch.device) -> list[Fp8]:
    """The recipes of those backends that are there, or of the one that was asked for."""
    backends = [fp8.backend] if fp8.backend else [OURS, TORCHAO]
    return [
        fp8.by(recipe)
        for recipe, possible in RECIPES.items()
        for backend in backends
        if backend in possible and _is_there(fp8, backend, recipe, device)
    ]


def verdict(times: Mapping[str, list[float]], shape: str) -> Measured:
    """From times in BF16 and in each recipe, in seconds."""
    wide = statistics.median(times["bf16"])
    noise = (max(times["bf16"]) - min(times["bf16"])) / wide / 2
    medians = {name: statistics.median(each) for name, each in times.items() if name != "bf16"}
    if not medians:
        return Measured(recipe=None, why=f"measured: no recipe could run {shape}")
    fastest = min(medians.values())
    best = next(name for name, each in medians.items() if each <= fastest * (1 + ALIKE))
    text = f"measured: {wide * 1e6:.0f} µs in bf16, {medians[best] * 1e6:.0f} µs {best}, {shape}"
    wins = medians[best] <= wide * (1 - max(GAIN, min(noise, 0.5)))
    return Measured(recipe=best if wins else None, why=text)


def in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, list[float]]:
    """Seconds of a call, for each work and round: works take turns, so that what slows the machine slows all."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(WARM_UP):
            work()
    for _ in range(ROUNDS):
        for name, work in works.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(CALLS):
                work()
            _wait(device)
            times[name].append((time.perf_counter() - start) / CALLS)
    return times


def replayed_in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, list[float]]:
    """The same of works that are captured first."""
    with torch.cuda.device(device):
        return in_turns({name: _captured(work) for name, work in works.items()}, device)


def _captured(work: Work) -> Work:
    for _ in range(WARM_UP):
        work()
    gc.collect()  # what a cycle holds of a backward pass belongs to another stream, which no capture bears
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _one(shape: _Shape, recipes: list[Fp8], device: torch.device, compiled: bool, timer: Timer) -> Measured:
    try:
        return verdict(timer(dict(_works(shape, recipes, device, compiled)), device), str(shape))
    except torch.OutOfMemoryError:
        return Measured(recipe=None, why=f"no memory left to measure {shape}")
    finally:
        gc.collect()


def _works(shape: _Shape, recipes: list[Fp8], device: torch.device, compiled: bool) -> Iterator[tuple[str, Work]]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        x = torch.randn(shape.rows, shape.inputs, device=device).to(shape.dtype).requires_grad_()
        gradient = torch.randn(shape.rows, shape.outputs, device=device).to(torch.bfloat16)
        first = _linear(shape, device)
    yield "bf16", _work(first, x, gradient, compiled)
    for fp8 in recipes:
        module = _linear(shape, torch.device("meta"))  # which draws no random numbers
        module.weight, module.bias = first.weight, first.bias
        fit(module, made(module, fp8), *(_delayed(device) if is_delayed(fp8) else ()))
        yield fp8.recipe, _work(module, x, gradient, compiled)


def _delayed(device: torch.device) -> tuple[Tensor, Tensor]:
    """A slot and scales."""
    return torch.zeros(3, 2, device=device, requires_grad=True), torch.ones(3, device=device)


def _work(module: nn.Linear, x: Tensor, gradient: Tensor, compiled: bool) -> Work:
    def call(x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return out

    # Compiled versions are kept with the code, a few for each; so each has code of its own.
    call.__code__ = call.__code__.replace()
    forward = torch.compile(call, dynamic=False) if compiled else call
    kind = x.device.type
    leaves = [x, *module.parameters()]

    def work() -> None:
        with torch.autocast(kind, torch.bfloat16):  # noqa: AMP303 (a GPU with FP8 has it)
            out = forward(x)
        out.backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    return work


def _linear(shape: _Shape, device: torch.device) -> nn.Linear:
    layer = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias, device=device, dtype=shape.weight_dtype)
    layer.weight.requires_grad_(shape.weight_trained)
    return layer


def _shape_of(module: nn.Linear, rows: int, dtype: torch.dtype) -> _Shape:
    return _Shape(
        rows, dtype, module.in_features, module.out_features, module.bias is not None, module.weight.dtype,
        module.weight.requires_grad,
    )  # fmt: skip


def _is_there(fp8: Fp8, backend: str, recipe: str, device: torch.device) -> bool:
    needed = fp8.backend is not None
    try:
        if backend == TORCHAO:
            float8_of_torchao(recipe)
        elif backend == TRANSFORMER_ENGINE:
            transformer_engine(recipe)
        else:
            refuse_wrong_kernels(fp8.by(recipe), device)
    except (MissingDependency, PrecisionUnavailable):
        if needed:
            raise
        return False
    return True


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
