"""Kinds of work, such as matmul or copy, by the name of an operator or kernel."""

from __future__ import annotations

import re
from functools import lru_cache

from ampwise.tune.compare.profiler_ranges import UPDATE
from ampwise.watch.matmul_work import is_matmul
from ampwise.watch.profile import COMPILED, OPTIMIZER

__all__ = ["kind_of_kernel", "kind_of_op"]

ATTENTION = re.compile(r"attention|flash_attn|fmha|flash_fwd|flash_bwd|sdpa", re.IGNORECASE)
COPIES = re.compile(r"^aten::(copy_|clone|contiguous|cat|_to_copy|stack)$")
# For kernels that no operator launched; the others get their kind from the operator.
KERNELS = {
    "attention": ATTENTION,
    "matrix": re.compile(r"gemm|cutlass|cublas|xmma|wgrad|dgrad|fprop|implicit_con|conv2d", re.IGNORECASE),
    "copies": re.compile(r"^Mem(cpy|set)|copy_kernel|CatArrayBatchedCopy"),
    "elementwise": re.compile(r"elementwise|reduce|norm|softmax|embedding|multi_tensor", re.IGNORECASE),
}


@lru_cache(maxsize=4096)
def kind_of_op(name: str) -> str:
    """Return one of KINDS, or "other" for what is not work: a profiler range, a node of the graph.

    >>> kind_of_op("aten::addmm"), kind_of_op("aten::gelu"), kind_of_op("aten::scaled_dot_product_attention")
    ('matrix', 'elementwise', 'attention')
    """
    if name.startswith((OPTIMIZER, UPDATE)):
        return "optimizer"
    if COMPILED.match(name):
        return _compiled(name)
    if name.startswith(("aten::", "flash_attn")):
        if ATTENTION.search(name):
            return "attention"
        if is_matmul(name):
            return "matrix"
        return "copies" if COPIES.match(name) else "elementwise"
    return "other"


@lru_cache(maxsize=4096)
def kind_of_kernel(name: str) -> str:
    """Return one of KINDS, or "other".

    >>> kind_of_kernel("sm90_xmma_gemm_bf16bf16_bf16f32"), kind_of_kernel("triton_poi_fused_gelu_3")
    ('matrix', 'elementwise')
    """
    if COMPILED.match(name):
        return _compiled(name)
    return next((kind for kind, pattern in KERNELS.items() if pattern.search(name)), "other")


def _compiled(name: str) -> str:
    """Return the kind of a kernel that torch.compile wrote."""
    made = COMPILED.match(name)
    assert made is not None
    template, fused = made.group(1, 2)
    if template == "tem":
        return "matrix"
    return "casts" if fused.strip("_") == "to_copy" else "elementwise"
