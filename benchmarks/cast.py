"""Speed of rounding a tensor to a format, relative to copying it.

On a GPU: the fused kernels, as a share of the bandwidth of a copy in the same run, both counted as one read and one
write. On a CPU, where there are only torch's operations: how many copies it costs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ampwise import Engine, cast
from ampwise.numbers.emulation.recipe import round_operand
from ampwise.numbers.formats import find_format
from benchmarks.harness import Result, gpu_ms, host_ms
from benchmarks.subjects import gpt2, small_gpt

FORMATS = ("bf16", "fp16", "e4m3", "e5m2", "e2m1", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
WAYS = ("nearest", "along dim 0", "stochastic")
SHAPE = (16384, 16384)  # a GiB of FP32: far more than any cache holds
ODD_SHAPE = (16383, 16381)


def main() -> None:
    if torch.cuda.is_available():
        on_gpu().publish()
        steps("gpu").publish()
    else:
        on_cpu().publish()
        steps("cpu").publish()


def on_gpu() -> Result:
    result = Result(
        name="cast_gpu",
        title="Rounding to a format on a GPU",
        claim="Bandwidth of the fused cast over that of a copy, both one read and one write of the tensor, in one run.",
        columns=["format", "dtype", "shape", "copy TB/s", *WAYS, "scaled", "without kernels"],
    )
    for dtype in (torch.float32, torch.bfloat16):
        result.rows += [_row(name, torch.randn(SHAPE, device="cuda", dtype=dtype)) for name in FORMATS]
    odd = torch.randn(ODD_SHAPE, device="cuda")
    result.rows += [_row(name, odd) for name in ("e4m3", "mxfp8", "nvfp4")]
    result.notes = [
        "Medians of 30 replays of a CUDA graph. Target: at least 0.5 to nearest. Copy: the faster of Tensor.clone "
        "and an elementwise kernel.",
        "scaled: as products are emulated, the largest magnitude found first, which is one read more; NVFP4 needs that "
        "read always. Results are those of the reference, bit for bit (tests/numbers/formats/test_cast_cuda.py).",
        "without kernels: the same in torch's operations, to nearest.",
    ]
    return result


def _row(name: str, values: Tensor) -> list[str | float]:
    fmt = find_format(name)
    copied = min(gpu_ms(values.clone), gpu_ms(values.neg))
    nearest = gpu_ms(partial(cast, values, fmt))
    along = gpu_ms(partial(cast, values, fmt, dim=0))
    by_chance = gpu_ms(partial(cast, values, fmt, "stochastic"))
    same_dtype = values.dtype == torch.float32  # products read FP32, whatever the tensor is in
    scaled = gpu_ms(partial(round_operand, values, fmt, -1, scaled=True)) if same_dtype else None
    moved = 2 * values.numel() * values.element_size()
    return [
        name, str(values.dtype).removeprefix("torch."), "x".join(map(str, values.shape)), moved / copied / 1e9,
        copied / nearest, copied / along, copied / by_chance,
        "" if scaled is None else copied / scaled, copied / _without_kernels(values, name),
    ]  # fmt: skip


def _without_kernels(values: Tensor, name: str) -> float:
    """Of a sixteenth, as it needs many times the tensor's memory."""
    from ampwise.numbers.formats import cast as module

    kernels_for, module.kernels_for = module.kernels_for, lambda *_: None
    try:
        part = values[: values.shape[0] // 16]
        return 16 * gpu_ms(partial(cast, part, name), repeats=5, per_graph=1)
    finally:
        module.kernels_for = kernels_for


def steps(where: str) -> Result:
    """What emulation makes of a training step."""
    device, make = ("cuda", partial(gpt2, 4)) if where == "gpu" else ("cpu", partial(small_gpt, 2))
    result = Result(
        name=f"cast_steps_{where}",
        title="Training steps on emulated products",
        claim="Time of a step over that of the same step in FP32, in one run.",
        columns=["model", "precision", "ms", "times FP32"],
        notes=["A step of Engine: forward, backward, AdamW. FP32 runs its own attention kernel; emulated attention is "
               "two products, and its weights are kept."],
    )  # fmt: skip
    fp32 = None
    for precision in (
        "fp32",
        "emulate:e4m3",
        "emulate:mxfp8",
        "emulate:nvfp4,plain",
        "emulate:nvfp4,plain,stochastic",
        "emulate:nvfp4",
    ):
        torch.manual_seed(0)
        with torch.device(device):
            model, batch, loss_fn = make()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), precision, trace=False)
        taken = host_ms(partial(engine.step, loss_fn, *batch), 5)
        fp32 = fp32 or taken
        result.rows.append([make.func.__name__, precision, taken, taken / fp32])
    return result


def on_cpu() -> Result:
    values = torch.randn(2048, 2048)
    copied = host_ms(values.clone)
    return Result(
        name="cast_cpu",
        title="Rounding to a format on a CPU",
        claim="Time of a cast over that of a copy, in one run.",
        columns=["format", *WAYS],
        rows=[
            [
                name,
                host_ms(partial(cast, values, name), 5) / copied,
                host_ms(partial(cast, values, name, dim=0), 5) / copied,
                host_ms(partial(cast, values, name, "stochastic"), 5) / copied,
            ]
            for name in FORMATS
        ],
    )


if __name__ == "__main__":
    main()
