"""What each rule says to a proposal, and where it keeps silent."""

from __future__ import annotations

from pathlib import Path

from ampwise.finding.registry import find_rule, rule_modules
from ampwise.hardware import Cpu, gpu_named
from ampwise.hardware.target import target_for_capability, target_for_cpu, target_for_gpu, unknown_target
from ampwise.tune.advise.choice import PrecisionChoice, parse_scaling
from ampwise.tune.advise.claims import CLAIMS, IDEAS, objections
from ampwise.tune.advise.model import ModelFacts

from ...for_each import for_each

CLAIMS_PAGE = (Path(__file__).parents[3] / "docs" / "claims.md").read_text(encoding="utf-8")
V100, T4, P100, A100, H200, GAUDI3 = (
    target_for_gpu(gpu_named(name)) for name in ("v100-sxm2-16", "t4", "p100-sxm2", "a100-40", "h200", "gaudi3")
)
RTX3090, M5, B200 = (target_for_gpu(gpu_named(name)) for name in ("rtx3090", "apple-m5", "b200"))
XEON = target_for_cpu(Cpu(model="a Xeon", features=("amx_bf16",)))
NOBODY_KNOWS = unknown_target("nobody said")


def size(parameters, kind=None):
    return ModelFacts(parameters=parameters, kind=kind)


def found(name, **parts):
    rule = name.replace("_", "-")
    return [finding for finding in objections(PrecisionChoice(**parts)) if finding.rule.name == rule]


# The rule, the question, whether it is a no, and how the message begins.
ANSWERED = [
    (
        "bf16_without_tensor_cores",
        {"target": V100, "want": "bf16"},
        True,
        "V100 SXM2 16GB (compute capability 7.0) has no BF16",
    ),
    (
        "bf16_without_tensor_cores",
        {"target": P100, "want": "bf16"},
        True,
        "Tesla P100 SXM2 16GB (compute capability 6.0) has",
    ),
    (
        "format_without_tensor_cores",
        {"target": A100, "want": "fp8"},
        True,
        "A100 40GB (compute capability 8.0) has no FP8",
    ),
    (
        "format_without_tensor_cores",
        {"target": XEON, "want": "fp16"},
        True,
        "this CPU (a Xeon) has no instructions that",
    ),
    (
        "format_without_tensor_cores",
        {"target": GAUDI3, "want": "tf32"},
        True,
        "torch has a switch for TF32 on CUDA devices",
    ),
    (
        "format_without_tensor_cores",
        {"target": M5, "want": "fp16"},
        False,
        "it is unknown whether Apple M5 10-core GPU has FP16 tensor cores",
    ),
    (
        "format_without_tensor_cores",
        {"target": NOBODY_KNOWS, "want": "bf16"},
        False,
        "it is unknown whether an unknown device has",
    ),
    (
        "format_no_faster",
        {"target": RTX3090, "want": "tf32"},
        True,
        "GeForce RTX 3090 (compute capability 8.6) runs TF32",
    ),
    (
        "format_no_faster",
        {"target": GAUDI3, "want": "fp16"},
        False,
        "Gaudi 3 OAM runs FP16 at 459.0 TFLOP/s dense and",
    ),
    ("format_not_ready", {"target": B200, "want": "nvfp4"}, True, "training in NVFP4 on B200"),
    ("format_not_ready", {"target": GAUDI3, "want": "fp8"}, True, "training in FP8 on Gaudi 3 OAM"),
    (
        "fp8_gains_little",
        {"target": H200, "want": "fp8", "model": size(10**8)},
        True,
        "100 M parameters are too few for FP8",
    ),
    ("fp8_gains_little", {"target": H200, "want": "fp8", "model": size(10**10)}, False, "FP8 gains less than its peak"),
    (
        "model_too_small_to_gain",
        {"target": A100, "want": "bf16", "model": size(10**6, "mlp")},
        False,
        "an MLP of 1 M parameters",
    ),
    (
        "state_does_not_fit",
        {"target": V100, "model": size(2 * 10**9)},
        False,
        "30 GiB of weights, gradients and Adam's moments",
    ),
    (
        "tensor_cores_left_idle",
        {"target": A100, "want": "fp32", "model": size(10**8)},
        False,
        "FP32 leaves the BF16 tensor",
    ),
    ("no_gain_measured", {"target": A100, "want": "fp16", "measured": 1.04}, True, "the measured 1.04x over FP32"),
    (
        "no_gain_measured",
        {"target": A100, "want": "fp16", "measured": 1.0, "symptom": "memory"},
        False,
        "the measured 1.00x over",
    ),
    (
        "fp16_out_of_range",
        {"target": A100, "want": "fp16", "symptom": "nan"},
        False,
        "inf and NaN in FP16 are usually",
    ),
    (
        "fp16_out_of_range",
        {"target": A100, "want": "fp16", "model": size(None, "moe")},
        False,
        "the activations of a mixture",
    ),
    ("fp16_out_of_range", {"target": V100, "ideas": ("bf16-checkpoint",)}, False, "weights trained in BF16"),
    (
        "bf16_cancels",
        {"target": A100, "model": size(None, "scorer")},
        False,
        "opposed scores are subtracted: with 8 significant",
    ),
    ("memory_wont_halve", {"target": A100, "symptom": "memory"}, False, "weights, gradients and Adam's moments stay"),
    (
        "manual_loss_scale",
        {"target": V100, "scaling": parse_scaling("manual:8")},
        True,
        "a fixed factor of 8 does not adapt",
    ),
    (
        "manual_loss_scale",
        {"target": A100, "want": "bf16", "ideas": ("manual-scale",)},
        True,
        "BF16 has the range of FP32",
    ),
    (
        "fp16_no_scaler",
        {"target": V100, "scaling": parse_scaling("none")},
        True,
        "FP16 rounds values of 2⁻²⁵",
    ),
    (
        "scaler_with_bf16",
        {"target": A100, "want": "bf16", "scaling": parse_scaling("dynamic")},
        True,
        "BF16 has the exponent range",
    ),
    (
        "scale_tuned_blind",
        {"target": A100, "want": "bf16", "ideas": ("tune-the-scale",)},
        True,
        "BF16 has no loss scale to tune",
    ),
    (
        "precision_by_reputation",
        {"target": NOBODY_KNOWS, "ideas": ("bf16-is-newer",)},
        True,
        "being newer is no reason: the device",
    ),
    (
        "precision_by_reputation",
        {"target": P100, "ideas": ("bf16-is-newer",)},
        True,
        "newer is not better: Tesla",
    ),
    (
        "precision_by_reputation",
        {"target": GAUDI3, "ideas": ("senior-says",)},
        True,
        "being newer is no reason, but Gaudi 3 OAM has BF16",
    ),
    ("unstable_op_autocast", {"target": XEON, "ideas": ("exp-in-loss",)}, False, "CPU autocast leaves exp, log"),
]

# Near misses: what looks alike, and is right.
SILENT = [
    ("bf16_without_tensor_cores", {"target": A100, "want": "bf16"}),
    ("bf16_without_tensor_cores", {"target": V100, "want": "fp16"}),
    ("format_without_tensor_cores", {"target": V100, "want": "bf16"}),  # AMP701 says it
    ("format_without_tensor_cores", {"target": V100, "want": "fp32"}),
    ("format_without_tensor_cores", {"target": H200, "want": "fp8"}),
    ("format_without_tensor_cores", {"target": XEON, "want": "bf16"}),
    ("format_no_faster", {"target": A100, "want": "tf32"}),
    ("format_no_faster", {"target": A100, "want": "fp16"}),  # as fast as BF16, with more bits
    ("format_no_faster", {"target": H200, "want": "fp8"}),
    ("format_not_ready", {"target": H200, "want": "fp8"}),
    ("format_not_ready", {"target": A100, "want": "mxfp8"}),  # AMP702 says it
    ("fp8_gains_little", {"target": A100, "want": "fp8"}),  # AMP702 says it
    ("model_too_small_to_gain", {"target": A100, "want": "bf16", "model": size(10**8)}),
    ("model_too_small_to_gain", {"target": A100, "want": "bf16"}),
    ("model_too_small_to_gain", {"target": A100, "want": "bf16", "model": size(5 * 10**6, "cnn")}),  # which works hard
    ("model_too_small_to_gain", {"target": A100, "want": "bf16", "model": size(10**6), "measured": 1.9}),
    ("state_does_not_fit", {"target": V100, "model": size(10**9)}),
    ("state_does_not_fit", {"target": NOBODY_KNOWS, "model": size(10**12)}),
    ("tensor_cores_left_idle", {"target": P100, "want": "fp32", "model": size(10**8), "ideas": ("too-complex",)}),
    ("tensor_cores_left_idle", {"target": A100, "want": "fp32", "model": size(10**6)}),
    ("no_gain_measured", {"target": A100, "want": "fp16", "measured": 1.1}),
    ("no_gain_measured", {"target": A100, "measured": 1.0}),
    ("fp16_out_of_range", {"target": V100, "want": "fp16", "symptom": "nan"}),  # there is no BF16 to go to
    ("fp16_out_of_range", {"target": A100, "want": "bf16", "symptom": "nan"}),
    ("fp16_out_of_range", {"target": A100, "want": "fp16", "model": size(None, "cnn")}),
    ("bf16_cancels", {"target": A100, "want": "tf32", "model": size(None, "scorer")}),
    ("manual_loss_scale", {"target": V100, "scaling": parse_scaling("dynamic")}),
    ("fp16_no_scaler", {"target": A100, "scaling": parse_scaling("none")}),
    ("scaler_with_bf16", {"target": V100, "want": "fp16", "scaling": parse_scaling("dynamic")}),
    ("clip_scaled_grads", {"target": A100, "want": "bf16", "ideas": ("clip-after-backward",)}),
    ("update_per_microbatch", {"target": A100, "want": "bf16", "ideas": ("update-every-microbatch",)}),
    ("half_params_with_scaler", {"target": A100, "ideas": ("half-weights",)}),  # AMP306 says it
    ("pure_bf16_plain_optimizer", {"target": V100, "ideas": ("half-weights",)}),  # AMP304 says it
]


@for_each(("name", "parts", "is_no", "begins"), ANSWERED)
def test_it_is_answered(name, parts, is_no, begins):
    (finding,) = found(name, **parts)
    assert finding.message.startswith(begins)
    assert finding.evidence["answer"] == ("no" if is_no else "careful")
    assert finding.evidence.get("refuses") in (None, parts.get("want"))
    assert finding.place.device == parts["target"].name


@for_each(("name", "parts"), SILENT)
def test_it_is_silent(name, parts):
    assert found(name, **parts) == []


@for_each("target", [V100, A100, H200, GAUDI3, XEON, NOBODY_KNOWS])
def test_nothing_asked_nothing_said(target):
    assert objections(PrecisionChoice(target=target, model=size(10**8, "transformer"))) == []


def test_rules_for_advice_are_numbered_and_all_are_used():
    ours = [module for module in rule_modules() if module.RULE.code > "AMP704" and module.RULE.code < "AMP800"]
    assert [module.RULE.code for module in ours] == [f"AMP{number}" for number in range(705, 705 + len(ours))]
    claimed = {claim.rule for claim in CLAIMS if claim.fact}
    assert all(hasattr(module, "check_choice") or module.RULE.name in claimed for module in ours)


# The section of docs/claims.md with the tests of what an idea is told.
SECTIONS = [
    ("tune-the-scale", "how-the-scale-moves"),
    ("zeros-mean-underflow", "zeros-of-a-healthy-run"),
    ("bf16-is-newer", "bf16-has-range-and-fp16-has-bits"),
    ("fp8-doubles", "fp8"),
    ("fp8-trains-4x", "fp8-four-times"),
    ("fp8-memory", "memory-of-fp8"),
    ("delayed-scaling", "delayed-and-current-scales"),
    ("tf32-ten-times", "tf32-on-an-a100"),
    ("loss-in-fp16", "a-loss-in-fp16"),
    ("tf32-is-on", "tf32-switches"),
    ("always-helps", "steps-that-get-slower"),
    ("halves-memory", "memory"),
    ("half-weights", "half-weights-with-a-scaler"),
    ("half-weights", "updates-that-bf16-rounds-away"),
    ("odd-sizes", "sizes"),
    ("multiples-of-16", "sizes"),
    ("manual-scale", "scaling-by-hand"),
    ("no-scaler", "what-is-left-of-small-numbers"),
    ("scaler-with-bf16", "a-scale-changes-nothing-in-bf16"),
    ("clip-after-backward", "clipping-scaled-gradients"),
    ("one-scaler-for-all-ranks", "two-ranks-with-two-scales"),
    ("scheduler-every-iteration", "what-a-skipped-step-changes"),
    ("eval-in-fp32", "validation-without-autocast"),
    ("exp-in-loss", "where-exp-overflows"),
    ("autocast-off-for-loss", "autocast-off-around-a-loss"),
    ("custom-function", "custom-functions"),
]


@for_each(("idea", "section"), SECTIONS)
def test_what_an_idea_is_reported_is_tested(idea, section):
    assert idea in IDEAS
    assert f'<a id="{section}"></a>' in CLAIMS_PAGE


@for_each("claim", CLAIMS)
def test_a_claim_is_answered_by_a_rule(claim):
    rule = find_rule(claim.rule)
    assert rule.name == claim.rule
    module = next(module for module in rule_modules() if module.RULE is rule)
    assert claim.fact or hasattr(module, "check_choice")  # a row without a fact leaves it to the rule


def test_the_price_of_a_manual_scale_is_worked_out():
    (finding,) = found("manual_loss_scale", target=V100, scaling=parse_scaling("manual:1000"))
    assert "above 65.5 become inf" in finding.message
    assert "below 3.0e-11 become zero" in finding.message
    (other,) = found("manual_loss_scale", target=V100, scaling=parse_scaling("manual:65536"))
    assert "above 0.9995 become inf" in other.message


def test_a_device_that_may_have_fp16_units_is_not_said_to_lack_them():
    turing = target_for_capability("7.5")  # an RTX 20, or a GTX 16
    (finding,) = found("bf16_without_tensor_cores", target=turing, want="bf16")
    assert "otherwise in FP32 (GTX 16)" in finding.fix
    (other,) = found("precision_by_reputation", target=turing, ideas=("senior-says",))
    assert other.message.endswith("an NVIDIA GPU (compute capability 7.5) has no BF16 tensor cores")


def test_sharding_is_worked_out():
    (finding,) = found("state_does_not_fit", target=A100, model=size(7 * 10**9))
    assert "104 GiB" in finding.message
    assert "40 GiB of A100 40GB" in finding.message
    assert "FSDP over 4 or more devices" in finding.evidence["costs"]
