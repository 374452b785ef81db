"""Find which layers run faster in FP8: time each distinct shape in BF16 and in each recipe, forward and backward."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor, nn

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.cuda_graphs import capture_graph
from ampwise.train.float8.backends import is_delayed, make_forward, refuse_wrong_kernels, transformer_engine
from ampwise.train.float8.layer_forward import SLOT, install_forward
from ampwise.train.float8.recipe import AUTO, MATMULS, OURS, RECIPES, TORCHAO, TRANSFORMER_ENGINE, Fp8
from ampwise.train.float8.torchao_backend import float8_of_torchao

__all__ = [
    "GAIN",
    "LayerShapes",
    "LayerTimes",
    "TimedRecipe",
    "candidate_recipes",
    "fastest_recipe",
    "time_graphs_in_turns",
    "time_in_turns",
    "time_layers",
    "time_recipes",
]

GAIN = 0.03  # required gain; less is hidden by the noise of a step
LOSSES = 1  # rounds of ROUNDS that a recipe may lose: by chance alone, that happens once in sixteen times
ALIKE = 0.02  # recipes that differ by less are ties: the first in the list wins
CALLS, ROUNDS = 8, 7  # calls back to back, so that launches count as in a step; and repetitions
TOGETHER = 4  # layers per call, which share the host's overhead per call
ENOUGH = 2**41  # operations, about 3 ms on a large GPU, that hide the overhead: then a layer is timed alone
WARM_UP = 3

LayerShapes = Mapping[nn.Linear, tuple[int, torch.dtype]]  # rows and dtype of each layer's input
Work = Callable[[], object]
Timer = Callable[[Mapping[str, Work], torch.device], dict[str, list[float]]]

_timed: dict[tuple[object, ...], LayerTimes] = {}  # in this process: another engine need not time again


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRecipe:
    """The fastest recipe for a layer, and the times behind it."""

    recipe: str | None  # None: BF16
    why: str
    matmuls: tuple[str, ...] = MATMULS  # in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer in BF16 and in each recipe, by ``Fp8.short``; a list with one time per round."""

    shape: str
    times: Mapping[str, list[float]]
    failed: Mapping[str, str]  # why a recipe could not run
    trouble: str = ""  # why nothing could be timed

    @property
    def complete(self) -> bool:
        """Whether all recipes could be timed; if not, that may change."""
        return not (self.failed or self.trouble)


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool
    weight_dtype: torch.dtype
    weight_trained: bool

    @classmethod
    def of(cls, module: nn.Linear, rows: int, dtype: torch.dtype) -> _Shape:
        has_bias, weight = module.bias is not None, module.weight
        return cls(rows, dtype, module.in_features, module.out_features, has_bias, weight.dtype, weight.requires_grad)

    def __str__(self) -> str:
        return f"{self.rows}×{self.inputs}→{self.outputs}"

    @property
    def together(self) -> int:
        """How many layers one call runs."""
        return 1 if 6 * self.rows * self.inputs * self.outputs > ENOUGH else TOGETHER


def time_recipes(
    shapes: LayerShapes,
    fp8: Fp8,
    device: torch.device,
    *,
    compiled: bool,
    graphed: bool = False,
    timer: Timer | None = None,
) -> dict[nn.Linear, TimedRecipe]:
    """Return the fastest recipe for each layer."""
    recipes = candidate_recipes(fp8, device)
    found = {}
    for module, layer in time_layers(shapes, recipes, device, compiled=compiled, graphed=graphed, timer=timer).items():
        fastest = fastest_recipe(layer.times, layer.shape)
        why = layer.trouble or "; ".join(
            [fastest.why, *(f"{name} failed: {each}" for name, each in layer.failed.items())]
        )
        found[module] = replace(fastest, why=why)
    return found


def time_layers(
    shapes: LayerShapes,
    recipes: Sequence[Fp8],
    device: torch.device,
    *,
    compiled: bool,
    graphed: bool = False,
    timer: Timer | None = None,
) -> dict[nn.Linear, LayerTimes]:
    """Return the times of each layer; each shape is timed once in a process. Syncs with the device.

    Layers are timed as they will run: compiled or not, and replayed by CUDA graphs, without host overhead, or not.
    """
    timer = timer or (time_graphs_in_turns if graphed else time_in_turns)
    found: dict[nn.Linear, LayerTimes] = {}
    new: set[tuple[object, ...]] = set()
    for module, given in shapes.items():
        shape = _Shape.of(module, *given)
        key = (shape, tuple(recipes), device, compiled, timer)
        if key not in _timed or not (_timed[key].complete or key in new):
            _timed[key] = _time_shape(shape, recipes, device, compiled, timer)
            new.add(key)
            gc.collect()  # modules with a bound forward are cycles, which keep the weights alive
        found[module] = _timed[key]
    return found


def candidate_recipes(fp8: Fp8, device: torch.device) -> list[Fp8]:
    """Return the recipes of all available backends, or of the one that was requested; raise if that is missing."""
    if fp8.recipe == AUTO:
        refuse_wrong_kernels(fp8.by("current"), device)
        # Of those that are equally fast the first is taken: the one with the fewest matmuls in FP8.
        some = (each for count in range(1, len(MATMULS) + 1) for each in combinations(MATMULS, count))
        return [fp8.by("current", matmuls) for matmuls in some]
    found = []
    for recipe, possible in RECIPES.items():
        for backend in [fp8.backend] if fp8.backend else [OURS, TORCHAO]:
            if backend not in possible:
                continue
            try:
                if backend == TORCHAO:
                    float8_of_torchao(recipe)
                elif backend == TRANSFORMER_ENGINE:
                    transformer_engine(recipe)
                else:
                    refuse_wrong_kernels(fp8.by(recipe), device)
            except (MissingDependency, PrecisionUnavailable):
                if fp8.backend is not None:
                    raise
            else:
                found.append(fp8.by(recipe))
    return found


def fastest_recipe(times: Mapping[str, list[float]], shape: str) -> TimedRecipe:
    """Pick the fastest from times in BF16 and in each recipe, in seconds; each list has one time per round.

    A recipe has to win almost every round, each compared within itself: a temporary slowdown affects both.
    """
    wide = times.get("bf16", [])
    ratios = {name: [a / b for a, b in zip(each, wide, strict=True)] for name, each in times.items() if name != "bf16"}
    if not ratios or not wide:
        return TimedRecipe(recipe=None, why=f"measured: no recipe could run {shape}")
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    fastest = min(medians.values())
    best = next(name for name, each in medians.items() if each <= fastest * (1 + ALIKE))
    in_bf16, in_best = (statistics.median(times[name]) * 1e6 for name in ("bf16", best))
    wins = medians[best] <= 1 - GAIN and sum(ratio > 1 for ratio in ratios[best]) <= LOSSES
    why = f"measured: {in_bf16:.0f} µs in bf16, {in_best:.0f} µs {best}, {shape}"
    return TimedRecipe(recipe=best if wins else None, why=why)


def time_in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds per call, by name and round. All take turns, so that a temporary slowdown affects all."""
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


def time_graphs_in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds per replay of CUDA graphs of these functions, without those that cannot be captured."""
    replays: dict[str, Work] = {}
    with torch.cuda.device(device):
        for name, work in works.items():
            for _ in range(WARM_UP):
                work()
            gc.collect()  # a garbage cycle may hold backward nodes of another stream, which would break the capture
            graph = torch.cuda.CUDAGraph()
            try:
                with capture_graph(graph):
                    work()
            except torch.OutOfMemoryError:
                raise
            except Exception:
                continue
            replays[name] = graph.replay
        return time_in_turns(replays, device)


def _time_shape(
    shape: _Shape, recipes: Sequence[Fp8], device: torch.device, compiled: bool, timer: Timer
) -> LayerTimes:
    failed: dict[str, str] = {}  # a recipe that fails must not end the training
    try:
        works = dict(_works(shape, recipes, device, compiled))
        for name, work in works.items():
            try:
                work()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed[name] = (str(error).strip() or type(error).__name__).partition("\n")[0]
        if "bf16" in failed:
            trouble = f"could not be measured, {shape}: {failed['bf16']}"
            return LayerTimes(shape=str(shape), times={}, failed={}, trouble=trouble)
        times = timer({name: each for name, each in works.items() if name not in failed}, device)
        of_one = {name: [each / shape.together for each in taken] for name, taken in times.items()}
        return LayerTimes(shape=str(shape), times=of_one, failed=failed)
    except torch.OutOfMemoryError:
        return LayerTimes(shape=str(shape), times={}, failed={}, trouble=f"no memory left to measure {shape}")


def _works(shape: _Shape, recipes: Sequence[Fp8], device: torch.device, compiled: bool) -> Iterator[tuple[str, Work]]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        numbers = [torch.randn(shape.rows, shape.inputs, device=device) for _ in range(shape.together)]
        inputs = [each.to(shape.dtype).requires_grad_() for each in numbers]
        gradient = torch.randn(shape.rows, shape.outputs, device=device).to(torch.bfloat16)
        wide = [_linear(shape, device) for _ in inputs]
    yield "bf16", _work(wide, inputs, gradient, compiled)
    for fp8 in recipes:
        narrow = []
        for layer in wide:
            module = _linear(shape, torch.device("meta"))  # draws no random numbers
            module.weight, module.bias = layer.weight, layer.bias
            slot_and_scales = (torch.zeros(3, 2, device=device, requires_grad=True), torch.ones(3, device=device))
            install_forward(module, make_forward(module, fp8), *(slot_and_scales if is_delayed(fp8) else ()))
            narrow.append(module)
        yield fp8.short, _work(narrow, inputs, gradient, compiled)


def _work(modules: Sequence[nn.Linear], inputs: Sequence[Tensor], gradient: Tensor, compiled: bool) -> Work:
    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [module(x) for module, x in zip(modules, inputs, strict=True)]

    # torch.compile keeps few compiled versions per code object; so give each function its own.
    call.__code__ = call.__code__.replace()
    forward = torch.compile(call, dynamic=False) if compiled else call
    slots = [slot for module in modules if (slot := module.__dict__.get(SLOT)) is not None]
    leaves = [*inputs, *slots, *(parameter for module in modules for parameter in module.parameters())]

    def work() -> None:
        with torch.autocast(gradient.device.type, torch.bfloat16):  # noqa: AMP303 (a GPU with FP8 has it)
            out = forward(inputs)
        torch.autograd.backward(out, [gradient] * len(out))
        for leaf in leaves:
            leaf.grad = None

    return work


def _linear(shape: _Shape, device: torch.device) -> nn.Linear:
    layer = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias, device=device, dtype=shape.weight_dtype)
    layer.weight.requires_grad_(shape.weight_trained)
    return layer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
