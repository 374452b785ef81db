"""Catalog of number formats, one constant each, with their names and aliases.

Sources: IEEE 754-2019 (fp16, fp32, fp64); OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2); OCP
Microscaling Formats Specification 1.0 (e3m2, e2m3, e2m1, e8m0, MX blocks); "8-bit Numerical Formats for Deep
Neural Networks", Noune et al. 2022 (the FNUZ variants); the bfloat16 and TF32 layouts as published by their vendors.
"""

from __future__ import annotations

from typing import Any

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.formats.format import BlockFormat, Format

FP64 = Format(
    name="fp64", title="FP64", exponent_bits=11, mantissa_bits=52, bias=1023, reserved_codes=2**52,
    infinities=True, aliases=("double", "float64", "f64"), torch_dtype="float64",
    since="A100 (Ampere)",
    training="A reference to check the others against; autocast leaves FP64 tensors alone.",
)  # fmt: skip
FP32 = Format(
    name="fp32", title="FP32", exponent_bits=8, mantissa_bits=23, bias=127, reserved_codes=2**23,
    infinities=True, aliases=("float", "float32", "single", "f32"), torch_dtype="float32",
    since="MI100 (none on NVIDIA)",
    training="Under autocast the weights, their gradients and the optimizer's state stay in it.",
)  # fmt: skip
TF32 = Format(
    name="tf32", title="TF32", exponent_bits=8, mantissa_bits=10, bias=127, reserved_codes=2**10,
    infinities=True, storage_bits=32, aliases=("tensorfloat32", "tensorfloat-32", "tensorfloat"),
    since="A100 (Ampere)",
    training="How tensor cores may read FP32 tensors: FP32's range, FP16's precision, no memory saved.",
)  # fmt: skip
BF16 = Format(
    name="bf16", title="BF16", exponent_bits=8, mantissa_bits=7, bias=127, reserved_codes=2**7,
    infinities=True, aliases=("bfloat16", "bfloat"), torch_dtype="bfloat16",
    since="A100 (Ampere), TPU v2, MI100",
    training="FP32's range in half the memory, so no loss scale; 8 significant bits, so keep FP32 weights.",
)  # fmt: skip
FP16 = Format(
    name="fp16", title="FP16", exponent_bits=5, mantissa_bits=10, bias=15, reserved_codes=2**10,
    infinities=True, aliases=("half", "float16", "f16"), torch_dtype="float16",
    since="V100 (Volta)",
    training="Gradients at or below 2^-25 vanish and values from 65520 on become infinite: use a loss scale.",
)  # fmt: skip
E5M2 = Format(
    name="e5m2", title="FP8 E5M2", exponent_bits=5, mantissa_bits=2, bias=15, reserved_codes=2**2,
    infinities=True, aliases=("fp8_e5m2", "fp8e5m2", "float8_e5m2"), torch_dtype="float8_e5m2",
    since="H100 (Hopper), L4 and RTX 40 (Ada)",
    training="For gradients, with a scale per tensor: FP16's range, 3 significant bits.",
)  # fmt: skip
E4M3FN = Format(
    name="e4m3fn", title="FP8 E4M3", exponent_bits=4, mantissa_bits=3, bias=7, reserved_codes=1,
    infinities=False, aliases=("fp8", "e4m3", "fp8_e4m3", "fp8e4m3", "fp8_e4m3fn", "float8_e4m3fn", "float8",
    "float8_e4m3"),
    torch_dtype="float8_e4m3fn", since="H100 (Hopper), L4 and RTX 40 (Ada)",
    training="For weights and activations, with a scale per tensor or row; overflow is NaN unless saturated.",
)  # fmt: skip
E5M2FNUZ = Format(
    name="e5m2fnuz", title="FP8 E5M2 FNUZ", exponent_bits=5, mantissa_bits=2, bias=16, reserved_codes=0,
    infinities=False, nan_at_negative_zero=True, aliases=("fp8_e5m2fnuz", "float8_e5m2fnuz"),
    torch_dtype="float8_e5m2fnuz", since="MI300X (CDNA3)",
    training="The MI300X's E5M2: the same bits mean half as much, and overflow is NaN unless saturated.",
)  # fmt: skip
E4M3FNUZ = Format(
    name="e4m3fnuz", title="FP8 E4M3 FNUZ", exponent_bits=4, mantissa_bits=3, bias=8, reserved_codes=0,
    infinities=False, nan_at_negative_zero=True, aliases=("fp8_e4m3fnuz", "float8_e4m3fnuz"),
    torch_dtype="float8_e4m3fnuz", since="MI300X (CDNA3)",
    training="The MI300X's E4M3: it ends at 240, so scales made for E4M3's 448 overflow.",
)  # fmt: skip
E3M2 = Format(
    name="e3m2", title="FP6 E3M2", exponent_bits=3, mantissa_bits=2, bias=3, reserved_codes=0,
    infinities=False, aliases=("fp6", "fp6_e3m2", "e3m2fn", "float6_e3m2fn"), since="B200, MI355X (in blocks)",
    training="Only in blocks that share a scale (MXFP6): alone it reaches from 0.0625 to 28.",
)  # fmt: skip
E2M3 = Format(
    name="e2m3", title="FP6 E2M3", exponent_bits=2, mantissa_bits=3, bias=1, reserved_codes=0,
    infinities=False, aliases=("fp6_e2m3", "e2m3fn", "float6_e2m3fn"), since="B200, MI355X (in blocks)",
    training="Only in blocks that share a scale (MXFP6): alone it reaches from 0.125 to 7.5.",
)  # fmt: skip
E2M1 = Format(
    name="e2m1", title="FP4 E2M1", exponent_bits=2, mantissa_bits=1, bias=1, reserved_codes=0,
    infinities=False, aliases=("fp4", "fp4_e2m1", "e2m1fn", "float4_e2m1fn", "float4_e2m1fn_x2"),
    since="B200, MI355X (in blocks)",
    training="Only in blocks that share a scale (MXFP4, NVFP4): alone it reaches from 0.5 to 6.",
)  # fmt: skip
E8M0 = Format(
    name="e8m0", title="E8M0 scale", exponent_bits=8, mantissa_bits=0, bias=127, reserved_codes=1,
    infinities=False, signed=False, subnormals=False, aliases=("e8m0fnu", "float8_e8m0fnu"),
    torch_dtype="float8_e8m0fnu", since="B200, MI355X (scales only)",
    training="Not for values: the scale of an MX block, a power of two without sign or zero.",
)  # fmt: skip

MXFP8_E4M3 = BlockFormat(
    name="mxfp8_e4m3", title="MXFP8 E4M3", element=E4M3FN, scale=E8M0, block_size=32, aliases=("mxfp8",),
    since="B200, MI355X",
    training="A power-of-two scale every 32 values: no loss scale, no history of maxima to keep.",
)  # fmt: skip
MXFP8_E5M2 = BlockFormat(
    name="mxfp8_e5m2", title="MXFP8 E5M2", element=E5M2, scale=E8M0, block_size=32, since="B200, MI355X",
    training="MXFP8 with more range and less precision within a block.",
)  # fmt: skip
MXFP6_E3M2 = BlockFormat(
    name="mxfp6_e3m2", title="MXFP6 E3M2", element=E3M2, scale=E8M0, block_size=32, aliases=("mxfp6",),
    since="B200, MI355X",
    training="A quarter less memory than MXFP8; made for inference first.",
)  # fmt: skip
MXFP6_E2M3 = BlockFormat(
    name="mxfp6_e2m3", title="MXFP6 E2M3", element=E2M3, scale=E8M0, block_size=32, since="B200, MI355X",
    training="MXFP6 with more precision and less range within a block.",
)  # fmt: skip
MXFP4 = BlockFormat(
    name="mxfp4", title="MXFP4", element=E2M1, scale=E8M0, block_size=32, aliases=("mxfp4_e2m1",),
    since="B200, MI355X",
    training="Half the memory of MXFP8; training in it takes stochastic rounding to keep gradients unbiased.",
)  # fmt: skip
NVFP4 = BlockFormat(
    name="nvfp4", title="NVFP4", element=E2M1, scale=E4M3FN, block_size=16, tensor_scale=True,
    aliases=("nvfp4_e2m1",), since="B200 (Blackwell)",
    training="Finer scales than MXFP4, twice as many of them; a scale of the whole tensor holds the range.",
)  # fmt: skip

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in list(globals().values()) if isinstance(fmt, Format)}
BLOCK_FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt for fmt in list(globals().values()) if isinstance(fmt, BlockFormat)
}


def find_format(name: str | Format | BlockFormat | Any) -> Format | BlockFormat:
    """Return the format of that name; accepts aliases, torch dtypes and formats themselves.

    Args:
        name: a name or alias, a torch dtype, or a format, which is returned.

    Returns:
        the format.

    Raises:
        UnknownName: no such format; the message names similar ones.

    >>> find_format("half").name, find_format("BFloat16").name, find_format("torch.float8_e4m3fn").name
    ('fp16', 'bf16', 'e4m3fn')
    """
    if isinstance(name, Format | BlockFormat):
        return name
    # str(torch.float16) is "torch.float16", so a dtype is recognised without importing torch.
    key = str(name).strip().lower().removeprefix("torch.").replace("-", "_").replace(" ", "_")
    found = _BY_NAME.get(key)
    if found is None:
        raise UnknownName("format", str(name), _BY_NAME, listing="`ampwise formats` lists them all.")
    return found


def find_scalar_format(name: str | Format | Any) -> Format:
    """Return the format like ``find_format``, but raise for a block format."""
    found = find_format(name)
    if isinstance(found, BlockFormat):
        raise BadInput(
            f"{found.name} is a block format: its values depend on their neighbours. "
            f"Use its element format, {found.element.name}."
        )
    return found


def all_names() -> list[str]:
    """Return the names of all formats, scalar formats first."""
    return [*FORMATS, *BLOCK_FORMATS]


_ALL: list[Format | BlockFormat] = [*FORMATS.values(), *BLOCK_FORMATS.values()]
_BY_NAME = {name.replace("-", "_"): fmt for fmt in _ALL for name in (fmt.name, *fmt.aliases)}
