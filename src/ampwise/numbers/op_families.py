"""Families of operations, by how they can fail, keyed by torch's names.

A name is the part between the namespace and the overload, without surrounding underscores: ``aten._softmax.default`` is
``softmax`` and ``aten.div_.Tensor`` is ``div``. An operation in no family is judged by its numbers alone.
"""

from __future__ import annotations

# Family name → its operations.
FAMILIES: dict[str, frozenset[str]] = {
    "exponential": frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "softplus"}),
    "logarithm": frozenset({"log", "log2", "log10", "log1p", "logit", "xlogy", "special_xlog1py"}),
    "gamma": frozenset({"lgamma", "digamma", "polygamma", "mvlgamma"}),
    "root": frozenset({"sqrt", "rsqrt"}),
    "power": frozenset({"pow", "float_power"}),
    "arc": frozenset({"acos", "asin", "acosh", "atanh", "erfinv", "special_ndtri"}),
    "division": frozenset(
        {"div", "divide", "true_divide", "floor_divide", "reciprocal", "remainder", "fmod", "addcdiv", "linalg_inv_ex"}
    ),
    "softmax": frozenset(
        {
            "softmax",
            "log_softmax",
            "safe_softmax",
            "logsumexp",
            "scaled_dot_product_attention",
            "scaled_dot_product_attention_math",
            "scaled_dot_product_flash_attention",
            "scaled_dot_product_flash_attention_for_cpu",
            "scaled_dot_product_efficient_attention",
            "scaled_dot_product_cudnn_attention",
            "scaled_dot_product_fused_attention_overrideable",
        }
    ),
    "mean": frozenset(
        {"mean", "nanmean", "var", "std", "var_mean", "std_mean", "nll_loss_forward", "nll_loss2d_forward", "nansum"}
    ),
    # They divide by a standard deviation or a norm internally.
    "normalisation": frozenset(
        {"native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit", "fused_rms_norm"}
        | {"cudnn_batch_norm", "miopen_batch_norm", "batch_norm_with_update", "weight_norm_interface"}
    ),
    # torch losses that compute exp or log internally without guards.
    "loss": frozenset({"soft_margin_loss", "ctc_loss", "cudnn_ctc_loss"}),
    "determinant": frozenset({"linalg_slogdet", "logdet"}),
    "matrix": frozenset(
        {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution", "matmul", "addbmm"}
        | {"mkldnn_linear", "thnn_conv2d", "slow_conv2d_forward", "mkldnn_convolution", "cudnn_convolution"}
    ),
    "sum": frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "linalg_vector_norm", "norm"}),
    "cast": frozenset({"to_copy", "to", "copy", "type_as"}),
    # Operations that only place given numbers: an infinity from one of these was written by the script.
    "filling": frozenset(
        {"full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "where", "index_fill", "lift_fresh"}
        | {"masked_scatter", "constant_pad_nd", "index_put", "scatter", "tril", "triu", "cat", "stack", "clone"}
    ),
}
BUILT_IN = ("aten", "prims", "prim", "c10d", "_c10d_functional", "c10d_functional", "profiler", "mkldnn", "quantized")
COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")


def base_name(op: str) -> str:
    """
    >>> base_name("aten._softmax.default"), base_name("aten.div_.Tensor"), base_name("aten._foreach_div_.ScalarList")
    ('softmax', 'div', 'div')
    """
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_").removeprefix("foreach_")


def family_of(op: str) -> str:
    """Return the name of its family, or "" if it has none."""
    name = base_name(op)
    return next((family for family, names in FAMILIES.items() if name in names), "")


def is_collective(op: str) -> bool:
    """Return whether it is a collective among ranks."""
    return op.startswith(tuple(f"{name}." for name in COLLECTIVE))


def is_custom(op: str) -> bool:
    """Return whether the operation is not torch's own."""
    return op.split(".")[0] not in BUILT_IN
