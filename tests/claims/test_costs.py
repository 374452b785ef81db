"""Speed, memory, and looking for what went wrong."""

import re
import warnings

import pytest
import torch

import ampwise
from ampwise.hardware import gpus

from .claim import claim


@pytest.fixture
def compared(published):
    """Rows of a published comparison, by precision."""
    return lambda model: {row["row"]: row for row in published(f"precisions_{model}_gpu")}


@claim(
    "FP16 is faster than BF16.",
    verdict="depends",
    truth="Peaks are the same on every NVIDIA GPU of the catalog from Ampere on; before, of the two only FP16 has "
    "tensor cores. Whole steps differ, in both directions. On one H200, FP16 and BF16: GPT-2 124M 341,800 and 349,600 "
    "tokens a second, GPT 1.3 B 48,210 and 51,480, ResNet-50 5,319 and 4,292 images a second.",
    also=["tests/hardware/test_catalog.py::test_rates_have_the_ratios_of_their_units"],
)
def test_fp16_and_bf16(compared, truth):
    newer = [gpu for gpu in gpus() if gpu.compute_capability and gpu.compute_capability >= (8, 0)]
    assert len(newer) > 5
    assert all(gpu.figure("fp16") == gpu.figure("bf16") for gpu in newer)
    for model, title in (("gpt2", "GPT-2 124M"), ("gpt1300m", "GPT 1.3 B"), ("resnet50", "ResNet-50")):
        rates = [compared(model)[precision]["per second"] for precision in ("fp16", "bf16")]
        assert "{} {:,.0f} and {:,.0f}".format(title, *rates) in truth


@claim(
    "Mixed precision makes training 2 to 3 times as fast.",
    verdict="depends",
    truth="On the model, and on what it is compared with. On one H200, whole steps in BF16 over eager FP32: GPT 1.3 "
    "B 8.8×, GPT-2 124M 6.4× and compiled 9.0×, ResNet-50 4.6×, a small relevance scorer 2.9×. Over TF32, which is "
    "one line and no mixed precision, GPT-2 124M gains 2.2× and ResNet-50 1.4×. `ampwise bench` measures yours.",
)
def test_speed_ups(compared, truth):
    titles = {"gpt1300m": "GPT 1.3 B", "gpt2": "GPT-2 124M", "resnet50": "ResNet-50", "relevance": "relevance scorer"}
    for model, title in titles.items():
        assert f"{title} {compared(model)['bf16']['×FP32']:.1f}×" in truth
    assert f"compiled {compared('gpt2_compiled')['bf16 compiled']['×FP32']:.1f}×" in truth
    for model, says in (("gpt2", "GPT-2 124M gains"), ("resnet50", "ResNet-50")):
        rows = compared(model)
        assert f"{says} {rows['tf32']['step ms'] / rows['bf16']['step ms']:.1f}×" in truth.partition("Over TF32")[2]


@claim(
    "Mixed precision makes everything faster.",
    verdict="false",
    truth="Where launching kernels is what takes the time, casts are more kernels to launch: on one H200, a step of "
    "a GPT of 1 M parameters takes 6.02 ms in FP32, 7.65 in BF16 and 7.44 in FP16. And what autocast keeps in "
    "FP32 does not gain: in a GPT-2 124M, LayerNorm runs at 0.98 of its speed in FP32.",
)
def test_steps_that_get_slower(published, notes, truth):
    by_hand = {
        row["precision"]: row["ms"]
        for row in published("step_tiny_gpu")
        if (row["step"], row["clip"]) == ("by hand", "1.0")
    }
    assert by_hand["fp32"] < min(by_hand["bf16"], by_hand["fp16"])
    said = "takes {fp32:.2f} ms in FP32, {bf16:.2f} in BF16 and {fp16:.2f} in FP16".format_map(by_hand)
    assert said in truth
    assert re.search(r"LayerNorm runs at ([\d.]+) of", truth)[1] in re.findall(
        r"blocks\.#\.ln_1 ([\d.]+[\d])", notes("precisions_gpt2_gpu")
    )


@claim(
    "Mixed precision halves memory.",
    verdict="depends",
    truth="Weights, gradients and Adam's moments are 16 bytes a parameter, with autocast as without, and copies of the "
    "weights take up to 2 more; only saved activations shrink. Peaks measured on one H200, BF16 over FP32: ResNet-50 "
    "with 128 images −49%, GPT-2 124M with 16 sequences −27% and with 4 −19%, GPT 1.3 B with 8 −20% and with 2 −2%. "
    "`ampwise memory` counts yours, without a GPU.",
    also=[
        "tests/tune/memory/test_measured.py::test_what_was_measured_is_predicted",
        "tests/tune/memory/test_step.py::test_sixteen_bits_keep_fewer_activations_and_casts_of_the_weights",
    ],
)
def test_memory(published, truth):
    peaks = {(row["model"], row["batch"], row["precision"]): row["measured, GB"] for row in published("memory_gpu")}
    for model, batch, says in (
        ("ResNet-50", 128, "ResNet-50 with 128 images"),
        ("GPT-2 124M", 16, "GPT-2 124M with 16 sequences"),
        ("GPT-2 124M", 4, "and with 4"),
        ("GPT 1.3B", 8, "GPT 1.3 B with 8"),
        ("GPT 1.3B", 2, "and with 2"),
    ):
        change = peaks[model, batch, "bf16"] / peaks[model, batch, "fp32"] - 1
        assert f"{says} −{-change:.0%}" in truth
    sizes = {"layers": 2, "hidden": 128, "vocab": 512, "seq": 64}
    counted = ampwise.memory(precisions=["fp32", "bf16"], largest=False, **sizes).as_dict()["estimates"]
    most = [each["most_bytes"] for each in counted]
    assert [each["bytes_per_parameter"] for each in counted] == pytest.approx([16, 16], rel=0.01)
    assert 0 < most[1]["cast cache"] <= most[1]["parameters"] / 2
    assert most[1]["activations"] < most[0]["activations"]
    for kind in ("parameters", "gradients", "optimizer state"):
        assert most[1][kind] == most[0][kind]


@claim(
    "`detect_anomaly` names the line that went wrong.",
    verdict="depends",
    truth="It looks for NaN in the backward pass: an inf is not looked for, and a NaN from the forward pass is met "
    "where the backward pass first returns it. Of 179 programs that fail as real ones did, it speaks in 158 and names "
    "the guilty line in 46; of 47 healthy ones it stops 17. A step takes 3.4 times as long with it in one benchmark, "
    "4.7 times in another (GPT-2 124M in FP16, one H200).",
    also=[
        "tests/test_failures.py::test_anomaly_detection_names_a_line_of_the_backward_pass_and_is_silent_of_infinities",
        "tests/test_failures.py::test_anomaly_detection_calls_an_overflow_of_scaled_gradients_an_error",
    ],
)
def test_detect_anomaly(published, truth):
    rows = published("failures")
    healthy = [row["detect_anomaly"] for row in rows if row["guilty"] == "healthy"]
    failing = [row["detect_anomaly"] for row in rows if row["guilty"] != "healthy"]
    spoke = [seen for seen in failing if seen != "nothing"]
    right = sum("✓" in seen for seen in spoke)
    assert f"Of {len(failing)} programs" in truth
    assert f"speaks in {len(spoke)} and names the guilty line in {right};" in truth
    assert f"of {len(healthy)} healthy ones it stops {sum(seen != 'nothing' for seen in healthy)}" in truth
    (slower,) = [row["plain steps"] for row in published("trace_gpu") if "detect_anomaly" in row["what"]]
    (again,) = [row["ratio"] for row in published("watch_gpu") if "detect_anomaly" in row["step"]]
    assert f"takes {slower:.1f} times as long with it in one benchmark, {again:.1f} times in another" in truth
    assert torch.equal(anomalies_of(lambda x: 1 / x), torch.full((2,), -torch.inf)), (
        "inf in both passes, and not a word"
    )
    with pytest.raises(RuntimeError, match="returned nan values"):
        anomalies_of(lambda x: x * 0 / x)


def anomalies_of(compute):
    """The gradient at zero, while anomalies are looked for."""
    x = torch.zeros(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow, and where the forward pass was
        with torch.autograd.detect_anomaly():
            compute(x).sum().backward()
    return x.grad
