"""Speed of a census, relative to the fastest way to read the tensors.

On a GPU: the whole census of all gradients, in one launch, as a share of the bandwidth a copy reaches.
On a CPU: the time of a census over the time of ``torch.linalg.vector_norm``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ampwise import census
from benchmarks.harness import Result, gpu_ms, host_ms
from benchmarks.models import GPT2_124M, GPT_1_3B, gradients_like


def main() -> None:
    if torch.cuda.is_available():
        on_gpu().publish()
    else:
        on_cpu().publish()


def on_gpu() -> Result:
    result = Result(
        name="census_gpu",
        title="Census of all gradients on a GPU",
        claim="Norm, finiteness, extremes, zeros and the full histogram by exponent of every tensor, in one "
        "launch: ratio of its bandwidth to that of a copy (read plus write), same run.",
        columns=["gradients", "dtype", "tensors", "GB", "copy TB/s", "census", "portable census", "_foreach_norm"],
    )
    for label, shapes in (("GPT-2 124M", GPT2_124M), ("GPT 1.3B", GPT_1_3B)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            gradients = [values.view(-1) for values in gradients_like(shapes, "cuda", dtype).values()]
            result.rows.append([label, str(dtype).removeprefix("torch."), *_ratios(gradients)])
    for label, values in _awkward().items():
        result.rows.append([label, "float32", *_ratios([values])])
    named = gradients_like(GPT_1_3B, "cuda")
    result.notes = [
        "Medians of 30 replays of a CUDA graph; the census includes clearing its table of results.",
        "portable: the same kernel with tl.histogram in place of its lines of PTX.",
        "Copy bandwidth: the better of Tensor.copy_ and an elementwise kernel over as many bytes.",
        f"Wall time of census(gradients).fetch() at 1.3B, Python and the copy to the host included: "
        f"{host_ms(lambda: census(named).fetch()):.2f} ms; before the kernel starts: {_launch_ms(named):.2f} ms.",
    ]
    return result


def _awkward() -> dict[str, Tensor]:
    """Data that could slow a histogram down, or send it the slow way round."""
    n = 1 << 28
    bits = torch.randint(-(2**31), 2**31, (n,), device="cuda", dtype=torch.int64).to(torch.int32)
    fields = (((bits >> 26) & 0x3F) + 95) << 23 | 0x00400000  # exponents from -32 to 31
    return {
        "all values equal": torch.full((n,), 0.3, device="cuda"),
        "all zeros": torch.zeros(n, device="cuda"),
        "64 exponents, evenly": fields.view(torch.float32),
        "1 NaN per 1M values": torch.randn(n, device="cuda").index_fill_(
            0, torch.arange(0, n, 1 << 20, device="cuda"), float("nan")
        ),
        "random bits (all slow)": bits.view(torch.float32),
    }


def _ratios(tensors: list[Tensor]) -> list[str | float]:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    copy = 2 * size / _copy_ms(size)
    return [
        str(len(tensors)),
        size / 1e9,
        copy / 1e9,
        size / gpu_ms(_counting(tensors, ptx=True)) / copy,
        size / gpu_ms(_counting(tensors, ptx=False)) / copy,
        size / gpu_ms(lambda: torch._foreach_norm(tensors)) / copy,
    ]


def _copy_ms(size: int) -> float:
    source = torch.empty(size // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    return min(
        host_ms(lambda: target.copy_(source)),
        gpu_ms(lambda: torch.mul(source, 1.0, out=target)),
        gpu_ms(lambda: target.copy_(source)),
    )


def _counting(tensors: list[Tensor], *, ptx: bool) -> Callable[[], None]:
    from ampwise.numbers.census.launch import TensorBatch, count_into_, new_buffer

    batch = TensorBatch(tensors)
    batch.has_ptx = ptx
    buffer = new_buffer(batch)

    def count() -> None:
        buffer.zero_()
        count_into_(buffer, batch)

    return count


def _launch_ms(gradients: dict[str, Tensor]) -> float:
    """What a call costs the host when nothing waits: few calls, so that the queue never fills."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        census(gradients)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def on_cpu(n: int = 100_000_000) -> Result:
    result = Result(
        name="census_cpu",
        title="Census on a CPU",
        claim=f"Full census of {n // 1_000_000} M values over torch.linalg.vector_norm of the same tensor.",
        columns=["dtype", "vector_norm ms", "census ms", "ratio"],
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = (torch.randn(n) * 1e-3).to(dtype)
        norm, counted = host_ms(partial(torch.linalg.vector_norm, values)), host_ms(partial(census, values))
        result.rows.append([str(dtype).removeprefix("torch."), norm, counted, counted / norm])
    exact = torch.full((50_000_000,), 0.001).double().square().sum().sqrt().item()
    values = torch.full((50_000_000,), 0.001)
    error = abs(torch.linalg.vector_norm(values).item() / exact - 1)
    ours = abs(census(values).norm / exact - 1)
    result.notes.append(f"Relative error of the norm of 50 M equal values: vector_norm {error:.1e}, census {ours:.1e}.")
    return result


if __name__ == "__main__":
    main()
