"""Devices: what they run, and at which rate."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpt import GPT, GPT2_124M
from benchmarks.subjects import GPT_1_3B
from torch import nn

from ampwise import Engine
from ampwise.hardware import gpu_named, gpus
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.recipe import Fp8
from ampwise.tune.align.matmuls import multiple_for

from .claim import claim

TERA = 1e12


@claim(
    "BF16 needs sizes that are multiples of 16.",
    verdict="false",
    truth="It needs the same as FP16: rows of whole 16 bytes, which are 8 elements of 16 bits. That is for speed; any "
    "size works. On one H200, a step of a GPT-2 with its vocabulary of 50257 padded to 50304 was 1.43x faster; "
    "compiled, where torch pads automatically, it was 0.99x. Multiples of 16 are for 8 bits, where "
    "`torch._scaled_mm` requires them.",
    also=[
        "tests/tune/align/test_planner.py::test_a_vocabulary_is_padded_to_whole_lines_and_others_to_words",
        "tests/train/float8/test_choosing.py::test_layers_that_cannot_or_should_not",
    ],
)
def test_sizes(cuda, published, truth):
    for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.items():
        assert multiple_for(name) * dtype.itemsize == 16
    assert torch.ones(17, 17, dtype=torch.bfloat16) @ torch.ones(17, dtype=torch.bfloat16) @ torch.ones(17).bfloat16()
    assert cuda["product of 17"] == "float16"
    assert cuda["fp8 product, inner 32"] == "bfloat16"
    assert "divisible by 16" in cuda["fp8 product, inner 24"]
    assert "by 16" in cuda["fp8 product, columns 24"]
    padded = {row["model"]: row["ratio"] for row in published("align_vocabulary_gpu") if "sliced" in row["sizes"]}
    assert f"was {1 / padded['eager']:.2f}x faster" in truth
    assert f"it was {1 / padded['compiled']:.2f}x." in truth


@claim(
    "BF16 is slow on a V100.",
    verdict="true",
    truth="Of the floating-point formats its tensor cores take only FP16, as on every NVIDIA GPU before compute "
    "capability 8.0 that has any; BF16 is emulated. `torch.cuda.is_bf16_supported()` returns True anyway, unless "
    "called with `including_emulation=False`.",
    also=[
        "tests/hardware/test_catalog.py::test_v100_has_no_bf16",
        "tests/hardware/test_torch_facts.py::test_each_device_is_asked_for_itself",
    ],
)
def test_bf16_before_ampere(monkeypatch):
    old = [gpu for gpu in gpus() if gpu.compute_capability and gpu.compute_capability < (8, 0)]
    assert {"v100-sxm2-16", "t4"} <= {gpu.id for gpu in old}
    assert not any(gpu.has_tensor_cores("bf16") for gpu in old)
    assert all(gpu.has_tensor_cores("fp16") for gpu in old if gpu.id.startswith("v100"))
    # torch's own function on a V100, on which tensors of BF16 can be made.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=7, minor=0))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert torch.cuda.is_bf16_supported()
    assert not torch.cuda.is_bf16_supported(including_emulation=False)


@claim(
    "An RTX 3090 has no BF16.",
    verdict="false",
    truth="Its compute capability is 8.6, and its tensor cores run BF16 at the rate of FP16, 71.2 TFLOP/s by the "
    "datasheet. It has no FP8.",
    also=["tests/hardware/test_catalog.py::test_rtx_3090_has_bf16_and_no_fp8"],
)
def test_rtx_3090(truth):
    gpu = gpu_named("rtx3090")
    assert gpu.compute_capability == (8, 6)
    assert gpu.has_tensor_cores("bf16")
    assert not gpu.has_tensor_cores("fp8")
    assert gpu.peak_flops["bf16"] == gpu.peak_flops["fp16"]
    assert f"{gpu.peak_flops['bf16'] / TERA} TFLOP/s" in truth


@claim(
    "An H100 does 3,958 TFLOP/s in FP8.",
    verdict="false",
    truth="Only with weights half of which are zeros, two of each four. Dense, it is 1,979 in FP8 and 989 in BF16 "
    "(SXM, datasheet).",
    also=["tests/hardware/test_catalog.py::test_h100_peaks_are_dense"],
)
def test_h100(truth):
    peaks = gpu_named("h100-sxm").peak_flops
    assert 3958e12 / peaks["fp8"] == pytest.approx(2, rel=1e-3)
    assert f"{peaks['fp8'] / TERA:,.0f} in FP8" in truth
    assert f"{peaks['bf16'] / TERA:,.0f} in BF16" in truth


@claim(
    "TF32 is on by default.",
    verdict="depends",
    truth="For convolutions, yes; for matmuls, no: `torch.set_float32_matmul_precision('high')` switches it "
    "on. That made a GPT-2 124M 2.9× as fast on one H200. It has FP32's range and 11 significant bits, as FP16 has.",
    also=[
        "tests/rules/amp7xx_choice/test_facts.py::test_tf32_is_off_for_products_and_on_for_convolutions",
        "tests/numbers/formats/test_format.py::test_tf32_is_fp32_with_the_mantissa_of_fp16",
    ],
)
def test_tf32_switches(cuda, published, truth):
    assert cuda["tf32"] == {"products": False, "convolutions": True}
    (gain,) = [row["×FP32"] for row in published("precisions_gpt2_gpu") if row["row"] == "tf32"]
    assert f"{gain:.1f}× as fast" in truth


@claim(
    "TF32 is 10 times as fast as FP32 on an A100.",
    verdict="false",
    truth="The datasheet's dense peaks are 156 TFLOP/s in TF32 and 19.5 in FP32: 8×. Only matmuls and convolutions get "
    "that much faster.",
)
def test_tf32_on_an_a100(truth):
    peaks = gpu_named("a100-sxm-80").peak_flops
    assert f"{peaks['tf32'] / TERA:g} TFLOP/s in TF32 and {peaks['fp32'] / TERA:g} in FP32" in truth
    assert f"{peaks['tf32'] / peaks['fp32']:g}×" in truth


@claim(
    "FP8 trains 4 times as fast.",
    verdict="false",
    truth="Four times is the H100's peak with sparsity, 3,958 TFLOP/s, over BF16's dense peak, 989. Training "
    "has no sparse weights; the dense peaks differ by 2×. The fastest whole step measured on one H200 was 1.39× as "
    "fast as compiled BF16.",
)
def test_fp8_four_times(published, truth):
    peaks = gpu_named("h100-sxm").peak_flops
    assert 3958e12 / peaks["bf16"] == pytest.approx(4, rel=1e-2)
    assert f"{peaks['bf16'] / TERA:.0f}." in truth
    assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=1e-2)
    fastest = max(ratio_of_steps(published, name) for name in ("d4096", "gpt1300m"))
    assert fastest >= max(row["× over BF16"] for row in published("fp8_d4096_gpu"))
    assert f"{fastest:.2f}× as fast as compiled BF16" in truth


def ratio_of_steps(published, name):
    """FP8 over BF16, by the last row of the table of kernels."""
    step = {row["work"]: row for row in published(f"fp8_roofline_{name}_gpu")}["step"]
    return step["BF16 ms"] / step["FP8 ms"]


@claim(
    "FP8 saves 75% of memory.",
    verdict="false",
    truth="A number takes a quarter of FP32's bytes, but weights, gradients and optimizer state of a training stay "
    "in 16 or 32 bits. What shrinks are the inputs that linear layers save. On one H200, a GPT of width 4096 took "
    "33.6 GiB in BF16 and 30.8 in FP8.",
)
def test_memory_of_fp8(published, truth):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    Engine(model, optimizer, "emulate:e4m3").step(lambda: model(torch.ones(2, 8)).sum())
    state = optimizer.state[model.weight]
    assert {each.dtype for each in (model.weight, state["exp_avg"], state["exp_avg_sq"])} == {torch.float32}
    peaks = {row["contender"]: row["peak GiB"] for row in published("fp8_d4096_gpu")}
    assert f"{peaks['BF16']:.1f} GiB in BF16 and {peaks['ampwise current']:.1f} in FP8" in truth


@claim(
    "Delayed scaling is recommended for LLMs.",
    verdict="depends",
    truth="It was the first recipe, and saves a read of each tensor. Its scales come from past steps: a tensor 16 "
    "times as large as before saturates, where a current scale fits. On one H200 a GPT of width 4096 ran 1.33× as fast "
    "as BF16 with delayed scales, and 1.39× with current ones, whose casts are faster.",
)
def test_delayed_and_current_scales(published, truth):
    before, now = torch.tensor([1.0, -0.5]), torch.tensor([16.0, -8.0])
    most = torch.finfo(torch.float8_e4m3fn).max

    def stored(values, magnitude):  # in E4M3, with the scale that this magnitude asks for
        scale = most / magnitude
        return (values * scale).clamp(-most, most).to(torch.float8_e4m3fn).float() / scale

    assert stored(now, now.abs().max()).tolist() == [16.0, -8.0]
    assert stored(now, before.abs().max()).tolist() == [1.0, -1.0]
    rows = {row["contender"]: row["× over BF16"] for row in published("fp8_d4096_gpu")}
    assert f"{rows['ampwise delayed']:.2f}× as fast as BF16 with delayed scales" in truth
    assert f"{ratio_of_steps(published, 'd4096'):.2f}× with current ones" in truth


@claim(
    "FP8 is twice as fast as BF16.",
    verdict="false",
    truth="Twice is the ratio of the peaks. In a step only linear layers gain: attention, the head and the optimizer "
    "stay as they are, and tensors are measured and cast first. By their sizes alone, if a step were nothing but "
    "matmuls and casts were free, FP8 would make a GPT-2 124M 1.42× as fast as BF16 and a GPT of 1.3 B 1.75×. "
    "Measured on one H200, whole compiled steps: 1.39× for a GPT of width 4096; at 1.3 B parameters 1.11× by torchao's "
    "layers and 1.27× by ampwise's.",
    also=[
        "tests/hardware/test_catalog.py::test_rates_have_the_ratios_of_their_units",
        "tests/train/float8/test_choosing.py::test_blocks_become_fp8_and_the_head_does_not",
    ],
)
def test_fp8(published, truth):
    peaks = gpu_named("h200").peak_flops
    ratio = peaks["fp8"] / peaks["bf16"]
    assert ratio == pytest.approx(2, rel=1e-3)
    most = {shape.name: most_of_fp8(shape, ratio) for shape in (GPT2_124M, GPT_1_3B)}
    assert f"a GPT-2 124M {most['GPT-2 124M']:.2f}×" in truth
    assert f"a GPT of 1.3 B {most['GPT 1.3B']:.2f}×" in truth
    torchao = {row["contender"]: row["× over BF16"] for row in published("fp8_gpt1300m_gpu")}
    theirs = torchao["torchao tensorwise, converted by itself"]
    wide, large = (ratio_of_steps(published, name) for name in ("d4096", "gpt1300m"))
    assert f"{wide:.2f}× for a GPT of width 4096" in truth
    assert f"at 1.3 B parameters {theirs:.2f}× by torchao's layers and {large:.2f}× by ampwise's" in truth


def most_of_fp8(shape, ratio):
    """Of a step that is nothing but products: of a token with weights, and with the tokens that attention looks at."""
    with torch.device("meta"):
        model = GPT(shape)
    layers = dict(model.named_modules())
    narrow = sum(
        layers[choice.name].weight.numel() for choice in choose_layers(model, {}, Fp8()).values() if choice.fp8
    )
    head, attention = model.wte.weight.numel(), 2 * shape.length * shape.width * shape.layers
    blocks = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    assert 0 < narrow <= blocks
    share = narrow / (blocks + head + attention)
    return 1 / (1 - share + share / ratio)
