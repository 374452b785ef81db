"""What operations do, as far as it matters for how they can go wrong: by the names torch has for them.

A name is what stands between the namespace and the overload, without underscores around it:
``aten._softmax.default`` is ``softmax`` and ``aten.div_.Tensor`` is ``div``. An operation that is in no family is
judged by its numbers alone.
"""

from __future__ import annotations

__all__ = ["FAMILIES", "base_name", "family_of", "is_collective", "is_custom"]

# What a family is called → its operations.
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
    # They divide by a standard deviation or a norm inside.
    "normalisation": frozenset(
        {"native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit", "fused_rms_norm"}
        | {"cudnn_batch_norm", "miopen_batch_norm", "batch_norm_with_update", "weight_norm_interface"}
    ),
    # Losses of torch that take exp or log inside, as written.
    "loss": frozenset({"soft_margin_loss", "ctc_loss", "cudnn_ctc_loss"}),
    "determinant": frozenset({"linalg_slogdet", "logdet"}),
    "matrix": frozenset(
        {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution", "matmul", "addbmm"}
        | {"mkldnn_linear", "thnn_conv2d", "slow_conv2d_forward", "mkldnn_convolution", "cudnn_convolution"}
    ),
    "sum": frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "linalg_vector_norm", "norm"}),
    "cast": frozenset({"to_copy", "to", "copy", "type_as"}),
    # What only puts numbers where one asked for them: an infinity that comes from here was written by hand.
    "filling": frozenset(
        {"full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "where", "index_fill", "lift_fresh"}
        | {"masked_scatter", "constant_pad_nd", "index_put", "scatter", "tril", "triu", "cat", "stack", "clone"}
    ),
}
OURS = ("aten", "prims", "prim", "c10d", "_c10d_functional", "c10d_functional", "profiler", "mkldnn", "quantized")
COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")


def base_name(op: str) -> str:
    """
    >>> base_name("aten._softmax.default"), base_name("aten.div_.Tensor"), base_name("aten._foreach_div_.ScalarList")
    ('softmax', 'div', 'div')
    """
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_").removeprefix("foreach_")


def family_of(op: str) -> str:
    """The name of its family, or "" if it is in none."""
    name = base_name(op)
    return next((family for family, names in FAMILIES.items() if name in names), "")


def is_collective(op: str) -> bool:
    """An exchange among ranks."""
    return op.startswith(tuple(f"{name}." for name in COLLECTIVE))


def is_custom(op: str) -> bool:
    """An operation that torch did not bring."""
    return op.split(".")[0] not in OURS
