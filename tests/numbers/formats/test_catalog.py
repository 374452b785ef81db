"""Names: what people type, and what they are told when nobody knows it."""

import numpy as np
import pytest
import torch

from ampwise import BadInput
from ampwise.errors import UnknownName
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, all_names, find_format, find_scalar_format

from ...for_each import for_each


@for_each(
    ("typed", "name"),
    [
        ("half", "fp16"),
        ("float16", "fp16"),
        ("FP16", "fp16"),
        ("torch.float16", "fp16"),
        (torch.float16, "fp16"),
        (torch.half, "fp16"),
        (np.dtype("float16"), "fp16"),
        ("bfloat16", "bf16"),
        ("BFloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("float", "fp32"),
        ("single", "fp32"),
        (torch.float32, "fp32"),
        ("double", "fp64"),
        ("TensorFloat-32", "tf32"),
        ("fp8", "e4m3fn"),
        ("E4M3", "e4m3fn"),
        ("fp8 e5m2", "e5m2"),
        ("fp8-e5m2", "e5m2"),
        (torch.float8_e4m3fn, "e4m3fn"),
        (torch.float8_e5m2fnuz, "e5m2fnuz"),
        ("torch.float4_e2m1fn_x2", "e2m1"),
        ("fp6", "e3m2"),
        ("fp4", "e2m1"),
        ("MXFP8", "mxfp8_e4m3"),
        ("mxfp6", "mxfp6_e3m2"),
        ("NVFP4", "nvfp4"),
        (" fp16 ", "fp16"),
    ],
)
def test_what_people_type(typed, name):
    assert find_format(typed).name == name


@for_each("name", [*FORMATS, *BLOCK_FORMATS])
def test_every_name_and_alias_finds_its_format(name):
    fmt = find_format(name)
    assert fmt.name == name
    assert find_format(fmt) is fmt
    for alias in fmt.aliases:
        assert find_format(alias) is find_format(alias.upper()) is fmt


@for_each("name", [n for n, fmt in FORMATS.items() if hasattr(torch, fmt.torch_dtype or "?")])
def test_every_torch_dtype_finds_its_format(name):
    assert find_format(getattr(torch, FORMATS[name].torch_dtype)).name == name


def test_no_name_means_two_formats():
    names = [word for fmt in (*FORMATS.values(), *BLOCK_FORMATS.values()) for word in (fmt.name, *fmt.aliases)]
    assert len(names) == len(set(names))


def test_all_names_lists_scalar_formats_first():
    assert all_names() == [*FORMATS, *BLOCK_FORMATS]


@for_each(
    ("typed", "text"),
    [
        ("fp17", "unknown format 'fp17'. Did you mean fp16? `ampwise formats` lists them all."),
        ("int8", "unknown format 'int8'. `ampwise formats` lists them all."),
        (torch.int8, "unknown format 'torch.int8'. `ampwise formats` lists them all."),
    ],
)
def test_an_unknown_name(typed, text):
    with pytest.raises(UnknownName) as caught:
        find_format(typed)
    assert str(caught.value) == text


def test_a_block_format_where_one_value_stands_alone():
    assert find_scalar_format("half").name == "fp16"
    with pytest.raises(BadInput) as caught:
        find_scalar_format("mxfp4")
    assert str(caught.value) == (
        "mxfp4 is a block format: its values depend on their neighbours. Use its element format, e2m1."
    )
