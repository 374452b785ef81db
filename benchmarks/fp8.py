"""Gain of FP8 over BF16: whole compiled training steps, with ampwise's recipes and torchao's.

    python -m benchmarks.fp8
    python -m benchmarks.fp8 --part d4096

gpt1300m, d4096   a GPT of 1.3 B parameters, and one of 8 layers and width 4096: BF16 against every recipe.
roofline_gpt1300m, roofline_d4096
                  where the time of their steps goes, kernel by kernel, and what FP8 could gain at most.
block             Fp8("block") in turns with BF16 and with current scales, in both of them.
block_casts       what its casts take, against a copy and against the cast of current scales.
accumulate        steps of four micro-batches: weights cast once per step, against once per micro-batch.
layers_5b         the four linear layers of a block of a GPT of 5 B parameters, alone: with casts, and matmuls only.
never_slower_compiled, never_slower_eager
                  Fp8("measured") against BF16 on the four models of benchmarks/subjects.py.
auto_compiled     Fp8("auto") against BF16 on two of them.

Each contender takes turns with BF16, and a ratio is the median of those within a round.
"""

from __future__ import annotations

import gc
import importlib
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ampwise import Engine, Fp8
from ampwise.train.float8.backends import make_forward
from ampwise.train.float8.block_cast import cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_check import blas_has_blocks
from ampwise.train.float8.block_matmul import block_matmul
from ampwise.train.float8.fp8_cast import E4M3, E5M2, cast_to_fp8
from ampwise.train.float8.layer_forward import install_forward
from ampwise.train.precision.contexts import NO_CONTEXT
from ampwise.tune.train_case import TrainCase, make_factory
from benchmarks import subjects
from benchmarks.gpt import GPT, Shape
from benchmarks.harness import Contender, Result, Times, alternate, gpu_ms, note, publish_parts
from benchmarks.subjects import GPT_1_3B

__all__ = ["main"]

D4096 = Shape(name="GPT d=4096 8 layers", layers=8, width=4096, heads=32, vocabulary=50304, length=1024, batch=8)
LOSS_AT = 20  # a step that all contenders come to
COLUMNS = ["contender", "step ms", "× over BF16", "low", "high", f"loss at step {LOSS_AT}", "peak GiB", "layers in FP8"]
CLAIM = (
    "Whole training steps (forward, backward, clip to 1.0, fused AdamW), compiled block by block, each in turns with "
    "BF16; × is the median of ratios within a round, low and high the least and the most."
)
OURS = ("current", "delayed", "block")  # "measured" has a part of its own: its choice takes longer than the race
MEASURED = Fp8("measured", backend="ampwise")  # torchao's recipes, compiled for each shape, would take minutes more
AUTO = Fp8("auto")
TORCHAO = ("tensorwise", "rowwise")
BLOCK = ("current", "block")
BF16 = "BF16"
FP8_MATMULS, BF16_MATMULS, CASTS, OTHER = "matmuls in FP8", "matmuls in BF16", "casts to FP8", "other"
KINDS = {  # kernels by name, the first that fits; cuBLAS writes FP8 operands as q and r
    FP8_MATMULS: r"nvjet_\w*_q[qr]|e4m3|e5m2|^multiply_blocks_kernel",
    BF16_MATMULS: r"nvjet|gemm|cutlass|xmma",
    "attention": r"sdpa|flash|fmha|cudnn",
    CASTS: r"^(cast|cast_strips|cast_tiles|amax|transpose)_kernel",
    "clip and optimizer": r"adam|check_kernel|multi_tensor|decide",
    "fused by torch.compile": r"^triton_",
}
TOKENS_5B = 31 * 512
LAYERS_BY = ("bf16", "fp8", "blocks")
LAYERS_5B = (
    ("queries, keys, values", 4096, 3 * 4096),
    ("projection", 4096, 4096),
    ("up", 4096, 16384),
    ("down", 16384, 4096),
)
H200_FP8 = 1979e12  # dense, datasheet
ROUNDS, CALLS = 7, 3
MICRO_BATCHES = 4


class Trained:
    """A model in training: a contender, and what is to be said of it."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        fp8: str | Fp8 | None,
        *,
        converted: str = "",
        compiled: bool,
        graph: bool = False,
        micro_batches: int = 1,
    ) -> None:
        torch.manual_seed(0)
        self.micro_batches = micro_batches
        self.name = name
        self.subject: TrainCase = make_factory(make, name).make(torch.device("cuda"))
        if converted:
            _convert(self.subject.model, converted)
        optimizer = torch.optim.AdamW(self.subject.parameters, lr=1e-5, fused=True)
        model = self.subject.model
        self.engine = Engine(
            model, optimizer, Fp8(fp8) if isinstance(fp8, str) else fp8 or "bf16", clip_norm=1.0, graph=graph,
            accumulate=micro_batches,
        )  # fmt: skip
        self.steps, self.loss = 0, float("nan")
        if compiled:
            model.compile_parts() if isinstance(model, GPT) else model.compile(dynamic=False)

    def __call__(self) -> None:
        for _ in range(self.micro_batches):
            step = self.engine.step(self.subject.loss_fn, *self.subject.args, **self.subject.kwargs)
        self.steps += 1
        if self.steps == LOSS_AT:
            self.loss = step.loss

    @property
    def layers(self) -> int:
        """In FP8."""
        modules = self.subject.model.modules()
        return sum("forward" in each.__dict__ or type(each).__name__ == "Float8Linear" for each in modules)


def _convert(model: nn.Module, recipe: str) -> None:
    float8: Any = importlib.import_module("torchao.float8")
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name(recipe))


def raced(wide: Trained, other: Trained) -> tuple[Times, Times, float]:
    """Both in turns; the peak is the other's."""
    for _ in range(4):
        other()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        other()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + _held(other)
    mine, its = alternate(
        [Contender(name=wide.name, work=wide), Contender(name=other.name, work=other)], rounds=ROUNDS, calls=CALLS
    )
    return mine, its, peak / 2**30


def _held(trained: Trained) -> int:
    """Weights and the optimizer's state."""
    states = [each for state in trained.engine.optimizers[0].state.values() for each in state.values()]
    tensors = [*trained.subject.model.parameters(), *(each for each in states if isinstance(each, torch.Tensor))]
    return sum(each.numel() * each.element_size() for each in tensors)


def row(wide: Trained, other: Trained) -> list[str | float]:
    mine, its, peak = raced(wide, other)
    ratios = [a / b for a, b in zip(mine.ms, its.ms, strict=True)]
    found: list[str | float] = [
        other.name, its.median_ms, statistics.median(ratios), min(ratios), max(ratios), other.loss, peak,
        other.layers,
    ]  # fmt: skip
    note(f"{other.name}: {its.median_ms:.4g} ms, ×{statistics.median(ratios):.3f}, loss {other.loss:.4f}")
    return found


def speed(name: str, shape: Shape, wanted: float) -> Result:
    def make(batch: int = shape.batch) -> Any:
        return subjects.gpt(shape)

    torch._dynamo.reset()
    result = Result(
        name=f"fp8_{name}_gpu", title=f"FP8, {shape.name}, {shape.tokens} tokens", claim=CLAIM, columns=COLUMNS
    )
    wide = Trained(BF16, make, None, compiled=True)
    for _ in range(3):
        wide()
    result.rows.append(row(wide, wide))
    result.rows.append(tried(wide, "BF16, graph", make, graph=True))
    for recipe in OURS:
        result.rows.append(tried(wide, f"ampwise {recipe}", make, recipe))
        result.rows.append(tried(wide, f"ampwise {recipe}, graph", make, recipe, graph=True))
    for recipe in TORCHAO:
        result.rows.append(tried(wide, f"torchao {recipe}, converted by itself", make, converted=recipe))
    result.notes.append(
        "graph: Engine(graph=True), which the host has almost nothing to do for. "
        "Its peak leaves out what a graph keeps."
    )
    result.notes.append(f"Wanted: ≥ {wanted} over BF16.")
    return result


def roofline(name: str, shape: Shape) -> Result:
    """Where a step's time goes in BF16 and in FP8, and how fast it could be."""

    def make(batch: int = shape.batch) -> Any:
        return subjects.gpt(shape)

    torch._dynamo.reset()
    wide, narrow = (Trained(each, make, fp8, compiled=True) for each, fp8 in ((BF16, None), ("FP8", "current")))
    for _ in range(4):
        wide()
    mine, its, _ = raced(wide, narrow)
    spent = [kernel_ms(wide), kernel_ms(narrow)]
    steps = [mine.median_ms, its.median_ms]
    result = Result(
        name=f"fp8_roofline_{name}_gpu",
        title=f"Where the time of a step goes, {shape.name}, {shape.tokens} tokens",
        claim="Milliseconds of a step by kind of kernel, from a profile of two steps after the race; idle is the rest "
        "of the median step. FP8 by current scales.",
        columns=["work", "BF16 ms", "FP8 ms", "saved ms"],
    )
    for kind in [*KINDS, OTHER]:
        a, b = (each.get(kind, 0.0) for each in spent)
        if a or b:
            result.rows.append([kind, a, b, f"{a - b:+.2f}"])
    idle = [max(0.0, step - sum(each.values())) for step, each in zip(steps, spent, strict=True)]
    result.rows.append(["idle", *idle, f"{idle[0] - idle[1]:+.2f}"])
    result.rows.append(["step", *steps, f"{steps[0] - steps[1]:+.2f}"])
    blocks: Any = narrow.subject.model.blocks
    flops = 6 * shape.tokens * sum(each.numel() for each in blocks.parameters() if each.ndim == 2)
    in_fp8, casts = spent[1][FP8_MATMULS], spent[1][CASTS]
    in_bf16 = spent[0][BF16_MATMULS] - spent[1][BF16_MATMULS]  # the head's are BF16 in both
    at_peak = flops / H200_FP8 * 1e3
    result.notes += [
        f"Measured: {steps[0] / steps[1]:.3f} times as fast as BF16. The blocks' matmuls, {flops / 1e12:.1f} TFLOP a "
        f"step: {flops / in_bf16 / 1e9:.0f} TFLOP/s in BF16, {flops / in_fp8 / 1e9:.0f} in FP8.",
        f"With casts at no cost it would be {steps[0] / (steps[1] - casts):.2f}; with matmuls at the datasheet's "
        f"{H200_FP8 / 1e12:.0f} TFLOP/s besides, which no power limit allows, "
        f"{steps[0] / (steps[1] - casts - in_fp8 + at_peak):.2f}.",
        f"Casts are {casts / steps[1]:.1%} of the FP8 step. Magnitudes of activations and gradients are found in "
        "kernels fused by torch.compile, biases' gradients in the casts.",
    ]
    return result


def blocks() -> Result:
    """A scale for each block against one for each tensor: whole steps, and what their kernels take."""
    result = Result(
        name="fp8_block_gpu",
        title="FP8 with a scale for each block",
        claim="Whole training steps as above, of three contenders in turns; × are medians of ratios within a round, "
        "low and high of those over BF16. Kernels from a profile of two steps after the race.",
        columns=[
            "model", "contender", "step ms", "× over BF16", "low", "high", "× over current", "FP8 matmuls ms",
            "casts ms", "own matmuls", f"loss at step {LOSS_AT}", "layers in FP8",
        ],
    )  # fmt: skip
    for shape in (GPT_1_3B, D4096):
        result.rows += _block_rows(shape)
        gc.collect()
        torch.cuda.empty_cache()
    return result


def _block_rows(shape: Shape) -> list[list[str | float]]:
    def make(batch: int = shape.batch) -> Any:
        return subjects.gpt(shape)

    torch._dynamo.reset()
    several = [Trained(BF16, make, None, compiled=True), *(Trained(each, make, each, compiled=True) for each in BLOCK)]
    for each in several:
        for _ in range(4):
            each()
    times = alternate([Contender(name=each.name, work=each) for each in several], rounds=ROUNDS, calls=CALLS)
    rows: list[list[str | float]] = []
    for each, its in zip(several, times, strict=True):
        spent = kernel_ms(each)
        over = [a / b for a, b in zip(times[0].ms, its.ms, strict=True)]
        rows.append([
            shape.name, each.name, its.median_ms, statistics.median(over), min(over), max(over),
            times[1].ratio(its), spent.get(FP8_MATMULS, 0.0), spent.get(CASTS, 0.0),
            _by_own_kernel() if each.name == BLOCK[1] else "-", each.loss, each.layers,
        ])  # fmt: skip
        note(f"{shape.name}, {each.name}: {its.median_ms:.4g} ms, ×{statistics.median(over):.3f}")
    return rows


def _by_own_kernel() -> str:
    return "no" if blas_has_blocks(torch.device("cuda", torch.cuda.current_device())) else "yes"


def accumulate() -> Result:
    """Weights cast once per step against weights cast in each micro-batch, the rest being equal."""
    result = Result(
        name="fp8_accumulate_gpu",
        title=f"FP8 with current scales, steps of {MICRO_BATCHES} micro-batches, {GPT_1_3B.name}",
        claim="Whole training steps, compiled block by block, of all contenders in turns; × are medians of ratios "
        "within a round, low and high of those over casts in each micro-batch. Casts from a profile after the race.",
        columns=["contender", "step ms", "× over BF16", "× over each", "low", "high", "casts ms", "loss", "peak GiB"],
    )

    def make(batch: int = GPT_1_3B.batch) -> Any:
        return subjects.gpt(GPT_1_3B)

    torch._dynamo.reset()
    several = [
        Trained(name, make, fp8, compiled=True, micro_batches=MICRO_BATCHES)
        for name, fp8 in ((BF16, None), ("weights cast in each micro-batch", "current"), ("once per step", "current"))
    ]
    before_kept: Any = several[1].engine._plugin
    before_kept.micro_batch_context = lambda first: NO_CONTEXT
    peaks = []
    for each in several:
        for _ in range(3):
            each()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        each()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - before + _held(each)) / 2**30)
    times = alternate([Contender(name=each.name, work=each) for each in several], rounds=ROUNDS, calls=CALLS)
    for each, its, peak in zip(several, times, peaks, strict=True):
        over = [a / b for a, b in zip(times[1].ms, its.ms, strict=True)]
        result.rows.append([
            each.name, its.median_ms, times[0].ratio(its), statistics.median(over), min(over), max(over),
            kernel_ms(each).get(CASTS, 0.0), each.loss, peak,
        ])  # fmt: skip
        note(f"{each.name}: {its.median_ms:.4g} ms, ×{statistics.median(over):.3f}")
    result.notes.append(
        "Peaks are those within a step over what is allocated before it, and weights and the optimizer's state; kept "
        "copies, 2 bytes per weight, are allocated before."
    )
    return result


def block_casts() -> Result:
    """The casts alone, and how fast they move their bytes."""
    result = Result(
        name="fp8_block_casts_gpu",
        title="Casts to FP8 with a scale for each block, alone",
        claim="Median of 30 replays of a CUDA graph; share: of a copy's bandwidth, in bytes read once and written once "
        "in both layouts. The cast of current scales reads twice where no kernel before it finds the magnitude.",
        columns=["cast", "dtype", "rows", "columns", "µs", "share of a copy", "current µs"],
    )
    for rows, columns in ((8192, 2048), (8192, 8192), (15872, 16384)):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(columns, 2048, device="cuda")
        for name, values, cast in (
            ("activation", x, partial(cast_to_strips, rows=True, columns=True)),
            ("gradient, with sums", x, partial(cast_to_strips, rows=True, columns=True, sums=True)),
            ("weight", weight, partial(cast_to_tiles, rows=True, columns=True)),
            ("weight", weight.bfloat16(), partial(cast_to_tiles, rows=True, columns=True)),
        ):
            current = partial(cast_to_fp8, scale=None, e5m2=False, rows=True, columns=True, sums=name.endswith("sums"))
            copied, own, other = (gpu_ms(partial(each, values)) for each in (torch.clone, cast, current))
            moved = (values.element_size() + 2) / (2 * values.element_size())
            dtype = str(values.dtype).removeprefix("torch.")
            result.rows.append([name, dtype, *values.shape, own * 1e3, copied * moved / own, other * 1e3])
    return result


def layers_5b() -> Result:
    """Linear layers alone, in the shapes for which NVIDIA publishes Transformer Engine's gains."""
    result = Result(
        name="fp8_layers_gpu",
        title=f"Linear layers alone, {TOKENS_5B} tokens: FP8 with current scales, and with a scale for each block",
        claim="Forward and backward of each layer, compiled, with weights and inputs in BF16 and all casts; and the "
        "same three matmuls of operands that are in FP8 already. In turns with BF16.",
        columns=[
            "layer", "inputs", "outputs", "BF16 ms", "FP8 ms", "× over BF16", "blocks ms", "× over BF16",
            "matmuls BF16 ms", "FP8 ms", "×", "blocks ms", "×",
        ],
    )  # fmt: skip
    sums = [0.0] * 6
    for name, inputs, outputs in LAYERS_5B:
        torch._dynamo.reset()
        cells: list[str | float] = [name, inputs, outputs]
        ms = []
        for make in (_layer, _matmuls):
            times = alternate([make(each, inputs, outputs) for each in LAYERS_BY], rounds=ROUNDS, calls=20)
            wide, *others = times
            cells.append(wide.median_ms)
            for each in others:
                cells += [each.median_ms, wide.ratio(each)]
            ms += [each.median_ms for each in times]
        sums = [total + each for total, each in zip(sums, ms, strict=True)]
        result.rows.append(cells)
        torch.cuda.empty_cache()
    ratios = [[wide, a, wide / a, b, wide / b] for wide, a, b in (sums[:3], sums[3:])]
    result.rows.append(["all", "", "", *ratios[0], *ratios[1]])
    result.notes.append(
        "Shapes of Transformer Engine's published example of 5 B parameters: width 4096, 16384 within, 31 × 512 "
        "tokens. A layer alone finds the magnitudes of its operands itself; in a model torch.compile finds most "
        "of them in the kernels before it."
    )
    return result


def _layer(name: str, inputs: int, outputs: int) -> Contender:
    layer = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
    if name != "bf16":
        install_forward(layer, make_forward(layer, Fp8("block" if name == "blocks" else "current")))
    layer.compile(dynamic=False)
    x = torch.randn(TOKENS_5B, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(TOKENS_5B, outputs, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(gradient)

    return _warm(Contender(name=name, work=work))


def _matmuls(name: str, inputs: int, outputs: int) -> Contender:
    """The output, the input's gradient and the weight's gradient."""
    shapes = ((TOKENS_5B, inputs, outputs), (TOKENS_5B, outputs, inputs), (outputs, TOKENS_5B, inputs))
    operands = [
        [torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, columns)]
        for rows, inner, columns in shapes
    ]
    one = torch.ones((), device="cuda")
    if name == "fp8":
        operands = [[a.to(E4M3 if not place else E5M2), b.to(E4M3)] for place, (a, b) in enumerate(operands)]
    if name == "blocks":
        blas = blas_has_blocks(torch.device("cuda", torch.cuda.current_device()))
        strips, tiles = (partial(cast, rows=True, columns=False) for cast in (cast_to_strips, cast_to_tiles))
        in_blocks = [(strips(a), (strips if place == 2 else tiles)(b)) for place, (a, b) in enumerate(operands)]

    def work() -> None:
        for place, (a, b) in enumerate(operands):
            if name == "blocks":
                x, y = in_blocks[place]
                block_matmul(x.rows, y.rows, x.of_rows, y.of_rows, torch.bfloat16, tiles=place != 2, blas=blas)
            elif name == "fp8":
                torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=not place)
            else:
                a @ b.t()

    return _warm(Contender(name=name, work=work))


def _warm(contender: Contender) -> Contender:
    for _ in range(3):
        contender.work()
    return contender


def kernel_ms(trained: Trained, steps: int = 2) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            trained()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for kernel in profile.key_averages():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.key)), OTHER)
        spent[kind] = spent.get(kind, 0.0) + kernel.self_device_time_total / 1e3 / steps
    return spent


def tried(
    wide: Trained,
    name: str,
    make: Callable[..., Any],
    fp8: str | None = None,
    *,
    converted: str = "",
    graph: bool = False,
) -> list[str | float]:
    try:
        return row(wide, Trained(name, make, fp8, converted=converted, compiled=True, graph=graph))
    except Exception as error:  # one that fails is a row too
        note(f"{name}: {type(error).__name__}: {error}"[:500])
        return [name, *["-"] * (len(COLUMNS) - 2), f"{type(error).__name__}: {error}"[:80].partition("\n")[0]]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def never_slower(compiled: bool, fp8: Fp8 = MEASURED) -> Result:
    way = "compiled" if compiled else "eager"
    result = Result(
        name=f"fp8_{fp8.recipe}_{way}_gpu",
        title=f'Fp8("{fp8.recipe}") against BF16, {way}',
        claim="Whole training steps in turns; noise is BF16 against itself, the most that a round is off.",
        columns=["model", "BF16 ms", "FP8 ms", "× over BF16", "low", "high", "noise ±%", "layers in FP8"],
    )
    models = (subjects.gpt_1_3b, subjects.gpt2, subjects.resnet50, subjects.relevance)
    for make in models[:2] if fp8 == AUTO else models:
        torch._dynamo.reset()
        result.rows.append(_against(make, compiled, fp8))
        gc.collect()
        torch.cuda.empty_cache()
    result.notes.append(f"{fp8.recipe}: among ampwise's own recipes. A model whose layers all stay in BF16 is BF16.")
    return result


def _against(make: Callable[..., Any], compiled: bool, fp8: Fp8) -> list[str | float]:
    name = make.__name__
    note(name)
    wide = Trained(BF16, make, None, compiled=compiled)
    narrow = Trained(name, make, fp8, compiled=compiled)
    for _ in range(3):
        wide()
    first, second, _ = raced(wide, wide)
    noise = max(abs(a / b - 1) for a, b in zip(first.ms, second.ms, strict=True))
    mine, its, _ = raced(wide, narrow)
    ratios = [a / b for a, b in zip(mine.ms, its.ms, strict=True)]
    note(f"{name}: ×{statistics.median(ratios):.3f}")
    return [
        name, mine.median_ms, its.median_ms, statistics.median(ratios), min(ratios), max(ratios), 100 * noise,
        narrow.layers,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parts: dict[str, Callable[[], Result]] = {
        "d4096": lambda: speed("d4096", D4096, 1.42),
        "gpt1300m": lambda: speed("gpt1300m", GPT_1_3B, 1.20),
        "roofline_d4096": lambda: roofline("d4096", D4096),
        "roofline_gpt1300m": lambda: roofline("gpt1300m", GPT_1_3B),
        "accumulate": accumulate,
        "block": blocks,
        "block_casts": block_casts,
        "layers_5b": layers_5b,
        "never_slower_compiled": lambda: never_slower(compiled=True),
        "auto_compiled": lambda: never_slower(compiled=True, fp8=AUTO),
        "never_slower_eager": lambda: never_slower(compiled=False),
    }
    assert __doc__ is not None
    publish_parts("fp8", __doc__.partition("\n")[0], parts, tuple(parts), arguments)


if __name__ == "__main__":
    main()
