"""A device is found by the name torch gives it, and never by a neighbour's."""

from __future__ import annotations

import tomllib
from collections import Counter
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import UnknownName
from ampwise.hardware import find_gpu, gpu_named, gpus
from ampwise.hardware.catalog import _words, nvidia_tensor_cores, other_variants

from ..for_each import for_each

FOUND = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32",
    "Tesla V100-PCIE-16GB": "v100-pcie-16",
    "Tesla P100-SXM2-16GB": "p100-sxm2",
    "Tesla T4": "t4",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
    "GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "nvidia geforce rtx 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "GAUDI2": "gaudi2",
}

# Each is near to a device of the catalog, and is another one.
NEIGHBOURS = [
    "NVIDIA GeForce RTX 4060",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 2080",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX 4000 Ada Generation",
    "NVIDIA RTX A4000",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H200 NVL",
    "NVIDIA GB200",
    "NVIDIA B300",
    "NVIDIA A100X",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA A10-24Q",
    "NVIDIA A10M",
    "NVIDIA L40G",
    "NVIDIA T4G",
    "NVIDIA T400",
    "Tesla V100-DGXS-32GB",
    "Tesla V100-SXM3-32GB",
    "Tesla V100S-PCIE-32GB",
    "Tesla P100-PCIE-16GB",
    "Tesla P40",
    "Quadro M1000M",
    "AMD Instinct MI100",
    "AMD Instinct MI210",
    "AMD Instinct MI250X/MI250",
    "AMD Instinct MI300A",
    "AMD Radeon Graphics",
    "Apple M1",
    "Apple M2",
    "NVIDIA",
    "",
]


def test_torch_names_are_found_and_neighbours_are_not():
    assert {name: find_gpu(name).id for name in FOUND} == FOUND
    assert [name for name in NEIGHBOURS if find_gpu(name) is not None] == []


@given(st.text(alphabet="abcghlmnrtv0123456789 -", max_size=20))
def test_a_found_name_is_one_of_the_listed_ones(name):
    gpu = find_gpu(name)
    assert gpu is None or _words(name) in {_words(known) for known in gpu.torch_names}


def test_no_two_devices_share_a_name():
    called = [{_words(name) for name in (gpu.id, gpu.name, *gpu.torch_names)} for gpu in gpus()]
    uses = Counter(words for names in called for words in names)
    assert [words for words, count in uses.items() if count > 1] == []


def test_every_torch_name_says_more_than_a_brand():
    assert all(_words(name) for gpu in gpus() for name in gpu.torch_names)


def test_a_device_is_found_by_id_name_and_torch_name():
    for gpu in gpus():
        for name in (gpu.id, gpu.id.upper(), gpu.name, *gpu.torch_names):
            assert gpu_named(name) is gpu


def test_an_unknown_name_says_what_is_near():
    with pytest.raises(UnknownName) as raised:
        gpu_named("v100-sxm3-32")
    assert str(raised.value) == (
        "unknown device 'v100-sxm3-32'. Did you mean v100-sxm2-32? "
        "`ampwise gpu --list` shows them all; `ampwise advise --gpu` also takes a compute capability, such as 8.9 or "
        "sm_89."
    )


@for_each(
    ("name", "expected", "others"),
    [
        ("a100", "a100-sxm-80", ["a100-40", "a100-pcie-80"]),
        ("NVIDIA A100", "a100-sxm-80", ["a100-40", "a100-pcie-80"]),
        ("A100 80GB", "a100-sxm-80", ["a100-40", "a100-pcie-80"]),
        ("h100", "h100-sxm", ["h100-pcie", "h100-nvl"]),
        ("v100", "v100-sxm2-16", ["v100-sxm2-32", "v100-pcie-16", "v100-pcie-32"]),
        ("4090", "rtx4090", []),
        ("RTX4090", "rtx4090", []),
        ("geforce rtx 3090", "rtx3090", []),
        ("a6000", "rtx-a6000", []),
        ("RTX 6000 Ada", "rtx6000-ada", []),
        ("a100-40", "a100-40", []),
        ("h200", "h200", []),
        ("rtx pro 6000 blackwell", "rtx-pro-6000", []),  # "rtx" is a series, and no family
        ("apple m1ultra", "apple-m1-ultra", []),
        ("dgx spark", "gb10", []),
    ],
)
def test_a_family_is_its_most_common_variant(name, expected, others):
    assert gpu_named(name).id == expected
    assert other_variants(name) == others


def test_no_short_name_is_that_of_two_devices():
    named = [
        ("".join(_words(name)), table["id"])
        for table in tomllib.loads(files("ampwise.hardware").joinpath("gpus.toml").read_text(encoding="utf-8"))[
            "device"
        ]
        for name in (table["id"], table["name"], *table["torch_names"], *table.get("also_called", ()))
    ]
    assert len({name for name, _ in named}) == len(set(named))


@for_each("name", ["8.9", "sm_89", "quadro 9000"])
def test_an_unlisted_device_can_be_given_by_its_capability(name):
    with pytest.raises(UnknownName, match=r"`ampwise advise --gpu` also takes a compute capability, such as 8\.9"):
        gpu_named(name)


def test_a_misspelt_name_says_what_is_near():
    with pytest.raises(UnknownName, match="Did you mean rtx4090"):
        gpu_named("rxt4090")


@for_each(
    ("fmt", "capability", "expected"),
    [
        ("fp16", (6, 1), False),
        ("fp16", (7, 5), None),  # the GTX 16 series has no tensor cores
        ("fp16", (8, 0), True),
        ("bf16", (7, 5), False),
        ("bf16", (8, 0), True),
        ("tf32", (7, 5), False),
        ("fp8", (8, 6), False),
        ("fp8", (8, 9), True),
        ("nvfp4", (9, 0), False),
        ("nvfp4", (12, 1), None),
        ("mxfp8", (10, 0), None),
        ("int8", (9, 0), None),
    ],
)
def test_what_a_capability_alone_says(fmt, capability, expected):
    assert nvidia_tensor_cores(fmt, capability) is expected
