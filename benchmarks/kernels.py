"""Search attention for kernels that are wrong: forward and backward of each backend against FP64, over many shapes.

A backend is wrong where it returns NaN or inf and FP64 does not, or where it is off by far more than rounding can
explain. What it finds belongs in ``src/ampwise/hardware/kernel_faults.toml``, with a public report.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from benchmarks.harness import Result

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LENGTHS = (1, 16, 64, 65, 127, 128, 192, 320, 384, 500, 704, 1024, 1088)
WIDTHS = (32, 64, 128)
SHIFTS = (0.0, -120.0, 80.0)  # added to all logits by the values of queries and keys
MASKS = ("none", "causal", "bool", "added")
WRONG = 16.0  # times the rounding of the format, of the largest terms that are added up


class Case(NamedTuple):
    backend: str
    dtype: str
    length: int
    width: int
    mask: str
    shift: float


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA GPU")
        return
    search().publish()


def search() -> Result:
    result = Result(
        name="kernels_gpu",
        title="Attention kernels that are wrong on this GPU",
        claim="Cases in which a backend returns NaN or is far off FP64, of all cases that it runs.",
        columns=["backend", "dtype", "cases", "not finite", "far off", "shapes of those"],
    )
    for backend, dtype in product(BACKENDS, ("float16", "bfloat16", "float32")):
        ran = bad = off = 0
        shapes: dict[str, None] = {}
        for length, width, mask, shift in product(LENGTHS, WIDTHS, MASKS, SHIFTS):
            verdict = judge(Case(backend, dtype, length, width, mask, shift))
            if verdict is None:
                continue
            ran += 1
            bad += verdict.startswith("NaN")
            off += verdict.startswith("off")
            if verdict:
                shapes[f"{verdict} ({mask} mask, {length} keys, logits {shift:+.0f})"] = None
        if ran:
            shown = "; ".join(list(shapes)[:4]) + (f"; {len(shapes) - 4} more" if len(shapes) > 4 else "")
            result.rows.append([backend, dtype, str(ran), str(bad), str(off), shown])
    result.notes = [
        f"Lengths {', '.join(map(str, LENGTHS))}; head sizes {', '.join(map(str, WIDTHS))}; logits near 0, -120, 80.",
        f"far off: an error of more than {WRONG:.0f} times the format's rounding of the largest terms of the sum.",
    ]
    return result


def judge(case: Case) -> str | None:
    """Return what is wrong, "" if nothing; None if the backend does not run the case."""
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    shape = (1, 2, case.length, case.width)
    inputs = [torch.randn(shape, device="cuda") * 0.1 for _ in range(3)]
    inputs[0][..., 0], inputs[1][..., 0] = 1.0, case.shift * math.sqrt(case.width)
    inputs = [each.to(dtype) for each in inputs]
    upper = torch.randn(shape, device="cuda").to(dtype)
    mask = None
    if case.mask in ("bool", "added"):
        mask = torch.ones(case.length, case.length, dtype=torch.bool, device="cuda").tril()[None, None]
        if case.mask == "added":
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
    causal = case.mask == "causal"
    try:
        found = run(BACKENDS[case.backend], inputs, upper, mask, causal)
    except RuntimeError:  # no such kernel for this case
        return None
    exact = [each.double() for each in inputs]
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    right = run(SDPBackend.MATH, exact, upper.double(), wide, causal)
    rounding = torch.finfo(dtype).eps + abs(case.shift) * torch.finfo(torch.float32).eps  # of a factor, of a logit
    for name, got, expected, terms in zip(
        ("output", "grad_q", "grad_k", "grad_v"),
        found,
        right,
        largest_terms(exact, upper.double(), wide, causal),
        strict=True,
    ):
        if not got.isfinite().all():
            return f"NaN in {name}"
        if float((got - expected).abs().max()) > WRONG * rounding * terms:
            return f"off in {name}"
    return ""


def largest_terms(inputs: list[Tensor], upper: Tensor, mask: Tensor | None, causal: bool) -> tuple[float, ...]:
    """Return bounds on the sums of magnitudes behind the output and the gradients of query, key and value."""
    query, key, value = inputs
    identity = torch.eye(key.shape[-2], device="cuda", dtype=torch.float64).expand(*key.shape[:-1], -1)
    with sdpa_kernel(SDPBackend.MATH):
        weights = attention(query, key, identity, attn_mask=mask, is_causal=causal)
    received = float(weights.sum(-2).max())  # by a key, of all queries
    inner = 2 * float((upper @ value.transpose(-1, -2)).abs().max()) / math.sqrt(query.shape[-1])
    largest_key, largest_query = float(key.abs().max()), float(query.abs().max())
    return (
        float(value.abs().max()),
        inner * largest_key,
        inner * largest_query * received,
        float(upper.abs().max()) * received,
    )


def run(backend: SDPBackend, inputs: list[Tensor], upper: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    query, key, value = leaves = [each.clone().requires_grad_() for each in inputs]
    with sdpa_kernel(backend):
        out = attention(query, key, value, attn_mask=mask, is_causal=causal)
    return [each.double() for each in (out.detach(), *torch.autograd.grad(out, leaves, upper))]


if __name__ == "__main__":
    main()
