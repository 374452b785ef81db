"""What goes with a precision: switches, torch.compile, what stays in FP32, what would change it, and the order."""

from __future__ import annotations

import pytest

from ampwise.hardware import Cpu
from ampwise.hardware.target import target_for_cpu
from ampwise.tune.advise import advise
from ampwise.tune.advise.choice import PrecisionChoice
from ampwise.tune.advise.decide import decide

from ...for_each import for_each


@for_each(
    ("told", "lines", "why"),
    [
        (
            {"gpu": "a100-40"},
            1,
            "off by default for matmuls, on for cuDNN's convolutions; up to 8.0× the FP32 peak",
        ),
        ({"gpu": "8.6"}, 1, "for what stays in FP32: off by default"),
        ({"gpu": "a100-40", "want": "tf32"}, 1, "for everything: off by default"),
        ({"gpu": "rtx3090"}, 0, "TF32 is no faster than FP32 here, 35.6 TFLOP/s"),
        ({"gpu": "v100-sxm2-16"}, 0, "this device has no TF32 tensor cores"),
        ({"gpu": "tpu-v4"}, 0, "this device has no TF32 tensor cores"),
        ({"gpu": "a100-40", "want": "fp32"}, 2, "full FP32 was requested"),
        ({"gpu": "a100-40", "ideas": "exact-numbers"}, 2, "full FP32 was requested"),
        ({"gpu": "v100-sxm2-16", "want": "fp32"}, 0, "this device has no TF32 tensor cores"),
    ],
)
def test_switches(told, lines, why):
    switch = advise(**told).tf32
    assert len(switch.lines) == lines
    assert why in switch.why


@for_each(
    ("told", "yes", "why"),
    [
        ({"gpu": "h200"}, True, "another 1.5x faster on one H200"),
        ({"gpu": "h200", "params": "1M"}, True, "a small model is bound by kernel launches"),
        ({"gpu": "v100-sxm2-16"}, True, "the compiled backward pass inherits autocast"),
        ({"gpu": "p100-sxm2"}, False, "needs compute capability 7.0, and this device has 6.0"),
        ({"gpu": "h200", "symptom": "nan"}, False, "not while something is wrong"),
        ({"gpu": "h200", "symptom": "slow"}, True, "after a clean start"),
        ({"gpu": "apple-m2-max"}, None, "is unknown"),
        ({"gpu": "cpu"}, None, "depends on the model"),
    ],
)
def test_compile(told, yes, why):
    compiling = advise(**told).compile
    assert compiling.yes is yes
    assert why in compiling.why


@for_each(
    ("told", "change"),
    [
        (
            {"gpu": "v100-sxm2-16"},
            "A device with BF16 tensor cores (NVIDIA since Ampere, 8.0): BF16, without a loss scale.",
        ),
        ({"gpu": "a100-40"}, "Results worse than in FP32: FP16 has three more bits, and a GradScaler."),
        ({"gpu": "a100-40"}, "Measure with `ampwise bench train.py:make`; below 1.1x stay in TF32."),
        (
            {"gpu": "a100-40", "params": "1M"},
            "Measure with `ampwise bench train.py:make`; above 1.1x, or if activations do not fit, use BF16.",
        ),
        ({"gpu": "h200", "params": "7B"}, "FP8 measured faster than compiled BF16 on this model: FP8."),
        ({"gpu": "p100-sxm2"}, "A device with 16-bit tensor cores: name it with --gpu."),
        ({"gpu": "h200"}, "Size and kind of the model: give --params 7B --arch transformer, or train.py:make."),
    ],
)
def test_what_would_change_it(told, change):
    assert change in advise(**told).changes


def test_what_would_not():
    changes = " ".join(advise(gpu="h200", params="124M", arch="transformer", measured=3.0).changes)
    assert "FP8" not in changes
    assert "bench" not in changes
    assert "--params" not in changes
    assert "FP16 has three more bits" not in " ".join(advise(gpu="tpu-v4").changes)
    assert "FP8" not in " ".join(advise(gpu="gaudi2", params="7B").changes)  # where FP8 is a prototype, and gets a no


def test_no_comes_before_careful_and_the_device_before_all():
    advice = advise(
        gpu="a100-40",
        want="fp8",
        params="7B",
        symptom="memory",
        ideas=("clip-after-backward", "just-works", "odd-sizes"),
    )
    answers = [finding.evidence["answer"] == "no" for finding in advice.findings]
    assert answers == sorted(answers, reverse=True)
    assert [finding.rule.code for finding in advice.findings[:3]] == ["AMP702", "AMP101", "AMP714"]
    assert answers.count(False) == 3  # sizes, memory, and what does not fit


def test_tf32_is_chosen_only_where_it_gains():
    assert advise(gpu="a100-40", params="1M").precision == "tf32"
    assert advise(gpu="rtx3090", params="1M").precision == "fp32"
    assert advise(gpu="mi250x", params="1M").precision == "fp32"


def test_memory_that_is_only_about_right_is_no_verdict():
    assert "AMP710" not in {finding.rule.code for finding in advise(gpu="b200", params="70B").findings}
    assert "of its ~180 GiB" in str(advise(gpu="b200", params="70B"))
    assert "AMP710" in {finding.rule.code for finding in advise(gpu="h200", params="70B").findings}


def test_bf16_is_not_pasted_where_it_would_be_emulated():
    code = advise(gpu="a100-40").by_hand
    assert "not torch.cuda.is_bf16_supported(including_emulation=False)" in code


def test_small_models_use_16_bits_for_their_memory():
    assert advise(gpu="a100-40", params="1M", symptom="memory").precision == "bf16"
    assert advise(gpu="a100-40", params="1M", measured=1.7).precision == "bf16"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_nothing_is_kept_where_all_is_fp32(precision):
    assert advise(gpu="a100-40", arch="moe", want=precision).kept == ()


def test_what_autocast_keeps_is_said_of_the_device_it_is_true_of():
    assert "CUDA autocast" in str(advise(gpu="a100-40"))
    assert "CUDA autocast" not in str(advise(gpu="tpu-v4"))


# What was wanted got a no: the rest of the answer is about what was decided.

REFUSED = {"gpu": "v100-sxm2-16", "want": "bf16"}


def test_a_scale_by_hand_is_answered_for_the_precision_that_was_decided():
    advice = advise(**REFUSED, scaling="manual:1000")
    assert [finding.rule.code for finding in advice.findings] == ["AMP701", "AMP308"]
    by_hand = advice.findings[1]
    assert "gradients above 65.5 become inf" in by_hand.message
    assert by_hand.fix == "In FP16 use torch.amp.GradScaler or ampwise.GradScaler; FP32 needs no scale."
    nothing = advise(gpu="p100-sxm2", want="bf16", scaling="manual:1000")
    assert nothing.findings[1].fix == "Drop the scale: FP32 needs none."


def test_a_scaler_is_right_where_fp16_is_what_was_decided():
    advice = advise(**REFUSED, scaling="dynamic")
    assert [finding.rule.code for finding in advice.findings] == ["AMP701"]
    assert "a GradScaler is what FP16 needs" in {reason.text for reason in advice.reasons}
    taken_up = advise(**REFUSED, ideas="clip-after-backward")
    assert [finding.rule.code for finding in taken_up.findings] == ["AMP701", "AMP101"]


def test_steps_are_about_the_precision_that_was_decided():
    assert 'Policy("fp16")' in advise(**REFUSED, symptom="nan").triage[-1].tells
    assert advise(**REFUSED, symptom="slow").triage[0].command == "ampwise bench train.py:make --precisions fp32,fp16"
    assert advise(**REFUSED, symptom="spikes").triage[1].command == "ampwise bench train.py:make --precisions fp32,fp16"
    assert "Policy" not in advise(gpu="p100-sxm2", want="bf16", symptom="nan").triage[-1].tells


@pytest.mark.parametrize("gpu", ["h200", "p100-sxm2"])
def test_exact_numbers_are_not_sent_to_16_bits(gpu):
    changes = " ".join(advise(gpu=gpu, want="bf16", ideas="exact-numbers").changes)
    assert "BF16" not in changes
    assert "16 bits" not in changes


def test_what_was_measured_to_gain_nothing_is_left_for_memory_alone():
    advice = advise(gpu="h200", want="bf16", measured=1.05)
    assert "Activations that do not fit: 16 bits, only to save memory." in advice.changes
    assert advise(gpu="h200", want="bf16", measured=1.05, symptom="memory").precision == "bf16"


def test_what_the_user_measured_is_not_said_to_be_measured_here():
    bases = {reason.text: reason.basis for reason in advise(gpu="h200", measured=1.8).reasons}
    assert bases["1.80x as fast as FP32: use it: between 1.5 and 2.5"] == "measured by you"


def test_what_flags_say_and_what_a_rule_says_are_kept_apart():
    reasons = decide(PrecisionChoice(target=target_for_cpu(Cpu(model=None, features=())))).reasons
    assert [(reason.text, reason.basis) for reason in reasons[:2]] == [
        ("this CPU: no BF16 instructions", "read here"),
        ("a CPU without 16-bit instructions is slower in 16 bits", "rule"),
    ]
