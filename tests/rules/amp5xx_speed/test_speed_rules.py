"""Why a precision is not faster: planted evidence is found, clean evidence is met with silence."""

import math

import pytest

from ampwise.finding.registry import run_checks
from ampwise.rules.amp5xx_speed import (
    casts_take_time,
    clocks_held_back,
    launch_bound,
    little_work_in_half,
    memory_bound,
    misaligned_dims,
    no_bf16_instructions,
    not_the_same_loss,
    skipped_while_measured,
    step_too_small,
    tf32_already_on,
    too_noisy,
)
from ampwise.rules.amp7xx_choice import tf32_disabled_on_device
from ampwise.tune.bench.speeds import GpuClocks, LossCheck, PrecisionRow, SpeedComparison, TimeSplit, TimeSpread
from ampwise.watch.time_use import ProfiledMatmul

OK = LossCheck(loss=2.0, reference=2.0, tolerance=0.1)


def spread(value):
    return TimeSpread(median=value, low=value, high=value)


def row(precision="bf16", ratio=1.2, **parts):
    """As fast as that, where FP32 takes 12 ms."""
    usual = {"step_s": spread(0.012 / ratio), "ratio": spread(ratio), "ratio_to_eager": spread(ratio), "loss": OK}
    return PrecisionRow(precision=precision, **{**usual, **parts})


def split(busy=0.0095, launches=200, on_device=True, **seconds):
    return TimeSplit(seconds=seconds or {"matrix": busy}, busy=busy, launches=launches, on_device=on_device)


def speeds(*rows, **parts):
    usual = {
        "name": "train:make",
        "command": "ampwise bench train:make",
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "noise": 0.01,
        "rounds": 5,
        "batch": 16,
    }
    return SpeedComparison(rows=(row("fp32", 1.0), *rows), **{**usual, **parts})


def product(flops=1e12, precision="bf16", aligned=True, shape="4096×768 @ 768×3072"):
    return ProfiledMatmul(op="mm", shape=shape, precision=precision, flops=flops, aligned=aligned)


def only(rule, made):
    (finding,) = rule.check_speed(made)
    assert finding.rule is rule.RULE
    assert finding.place.device == made.device_name
    return finding


HEALTHY = row(
    ratio=1.2, split=split(matrix=0.009, elementwise=0.0005), products=(product(),), intensity=400.0, ridge=206.0
)
WARM = GpuClocks(before=345, after=1900, lowest=1800, top=1980, held_back_by=("its power limit",))
FAST = row(
    ratio=6.0, split=split(busy=0.0005, launches=500, casts=0.4, elementwise=0.6), products=(product(aligned=False),)
)


@pytest.mark.parametrize(
    "made",
    [
        speeds(HEALTHY),
        speeds(FAST),  # whatever it does with its time, it is fast
        speeds(row("tf32", 1.2)),
        speeds(),
        speeds(PrecisionRow(precision="bf16", problem="out of memory")),
        speeds(row(split=None)),
        speeds(HEALTHY, clocks=WARM),
        speeds(HEALTHY, noise=0.05),
        speeds(row(ratio=0.3), device="cpu", bf16_instructions=True),
        speeds(row(ratio=0.3), device="cpu", bf16_instructions=None),
    ],
)
def test_clean_evidence_is_met_with_silence(made):
    silent = [finding for finding in run_checks(made) if finding.rule.name != "tf32-disabled-on-device"]
    assert silent == []


def test_small_kernels_are_found():
    finding = only(step_too_small, speeds(row(split=split(busy=0.004, launches=1000))))
    assert finding.message == "bf16: a step is 1,000 kernels of 4.0 µs each, no longer than a launch"
    assert finding.evidence["experiment"] == "ampwise bench train:make --batch 64"
    on_cpu = speeds(row(split=split(busy=0.004, launches=1000, on_device=False)), device="cpu")
    assert "1,000 operators of 4.0 µs" in only(step_too_small, on_cpu).message
    assert not list(step_too_small.check_speed(speeds(row(split=split(busy=0.02, launches=1000)))))


def test_a_gpu_that_waits_is_found():
    waiting = row(ratio=1.2, split=split(busy=0.005))
    finding = only(launch_bound, speeds(waiting))
    assert finding.message == "bf16: the GPU is idle for 50% of a step"
    assert finding.evidence["experiment"] == "ampwise bench train:make --compile"
    both = speeds(waiting, row(ratio=4.0, compiled=True))
    assert only(launch_bound, both).message.endswith("; compiled, it is 4.00× as fast as eager fp32")


def test_a_cpu_waits_for_nobody():
    assert not list(launch_bound.check_speed(speeds(row(split=split(busy=0.001, on_device=False)), device="cpu")))


def test_time_that_goes_into_moving_bytes_is_found():
    moving = row(split=split(matrix=0.002, elementwise=0.005, optimizer=0.002, casts=0.0005))
    finding = only(memory_bound, speeds(moving))
    assert finding.message == (
        "bf16: 79% of the time is limited by memory bandwidth, most of it norms and elementwise (53%) and clip and "
        "optimizer (21%)"
    )
    assert finding.evidence["experiment"] == "ampwise bench train:make --compile"
    by_optimizer = row(split=split(matrix=0.002, elementwise=0.001, optimizer=0.006))
    assert only(memory_bound, speeds(by_optimizer)).evidence["experiment"].endswith("--batch 64")


def test_products_below_the_ridge_are_found():
    thin = row(split=split(), intensity=12.0, ridge=206.0)
    assert only(memory_bound, speeds(thin)).message == (
        "bf16: matmuls compute 12 FLOPs per byte that they move, but NVIDIA H200 needs 206 to be compute-bound (by "
        "its datasheet)"
    )
    for known in ({"intensity": None}, {"ridge": None}):
        assert not list(
            memory_bound.check_speed(speeds(row(split=split(), **{"intensity": 12.0, "ridge": 206.0, **known})))
        )


def test_a_gpu_that_waits_is_not_called_memory_bound():
    waiting = row(ratio=1.2, split=split(busy=0.005, elementwise=0.005))
    assert not list(memory_bound.check_speed(speeds(waiting)))


def test_casts_are_found():
    finding = only(casts_take_time, speeds(row(split=split(matrix=0.007, casts=0.003))))
    assert (finding.rule.code, finding.message) == ("AMP505", "bf16: 30% of the time goes into casts")


def test_misaligned_products_are_found():
    odd = product(3e11, aligned=False, shape="4096×768 @ 768×50257")
    finding = only(misaligned_dims, speeds(row(products=(product(), odd))))
    assert finding.rule.code == "AMP503"
    assert finding.message == (
        "bf16: 23% of the matmul work has a row length that is not a multiple of 8: mm 4096×768 @ 768×50257"
    )
    assert finding.evidence["experiment"] == "ampwise align train:make"
    asked = speeds(row(products=(product(), odd)), command="ampwise bench train:make --batch 8 --compile --rounds 2")
    assert only(misaligned_dims, asked).evidence["experiment"] == "ampwise align train:make --batch 8"
    assert not list(misaligned_dims.check_speed(speeds(row(products=(product(), odd)), device="cpu")))


def test_work_that_stays_in_fp32_is_found():
    finding = only(little_work_in_half, speeds(row(products=(product(3e12, "fp32"), product(1e12)))))
    assert finding.message == (
        "bf16: 25% of the matmul work runs in 16-bit; the largest exceptions: mm 4096×768 @ 768×3072 in FP32"
    )


def test_tf32_that_was_on_is_reported_with_what_is_left_to_gain():
    made = speeds(row("tf32", 3.0), row("bf16", 6.0), tf32_was_on=("matmuls", "convolutions"))
    assert only(tf32_already_on, made).message == (
        "TF32 is on for matmuls and convolutions in this script, so it runs like the tf32 row; compared to that, bf16 "
        "is 2.00× as fast"
    )
    alone = speeds(row("tf32", 3.0), tf32_was_on=("convolutions",))
    assert only(tf32_already_on, alone).message.endswith("so it runs like the tf32 row")
    unmeasured = speeds(row("bf16", 6.0), tf32_was_on=("convolutions",))
    assert only(tf32_already_on, unmeasured).evidence["gain"] is None


def test_tf32_that_is_off_and_the_best_there_is():
    made = speeds(row("tf32", 2.9), row("bf16", 2.0))
    assert only(tf32_disabled_on_device, made).message.endswith("a step is 2.90× as fast")
    for quiet in (
        speeds(row("tf32", 2.9), row("bf16", 6.0)),
        speeds(row("tf32", 1.05)),
        speeds(row("tf32", 2.9), tf32_was_on=("matmuls",)),
    ):
        assert not list(tf32_disabled_on_device.check_speed(quiet))


def test_a_cpu_without_instructions_for_bf16_is_named():
    slow = speeds(row(ratio=0.04), device="cpu", device_name="a CPU", bf16_instructions=False)
    assert only(no_bf16_instructions, slow).message == (
        "a CPU has no instructions for BF16 (AMX, AVX512-BF16 or ARM's BF16); bf16 is 0.04× as fast as fp32"
    )
    given_up = PrecisionRow(precision="bf16", problem="given up after two passes", slower=351.0)
    hopeless = speeds(given_up, device="cpu", device_name="a CPU", bf16_instructions=False)
    assert only(no_bf16_instructions, hopeless).message.endswith("bf16 takes 351 times as long as fp32")
    off = LossCheck(loss=3.0, reference=2.0, tolerance=0.1)
    for quiet, noise in ((row(ratio=1.4), 0.01), (row(ratio=0.97), 0.04), (row(ratio=0.1, loss=off), 0.01)):
        made = speeds(quiet, noise=noise, device="cpu", bf16_instructions=False)
        assert not list(no_bf16_instructions.check_speed(made))


def test_what_noise_leaves_open_is_not_explained():
    small = row(split=split(busy=0.004, launches=1000))
    assert speeds(small, noise=0.05).judged is small
    assert speeds(small, noise=0.12).judged is None, "a reason for a difference that may be none"
    nearly = row(ratio=1.45, split=split(busy=0.004, launches=1000))
    assert speeds(nearly, noise=0.01).judged is nearly
    assert speeds(nearly, noise=0.06).judged is None, "it may well be worth its while"
    same = row(ratio=1.0, split=split(busy=0.004, launches=1000))
    assert speeds(same, noise=0.01).judged is same, "that it gains little is certain"


def test_another_loss_is_an_error_with_its_numbers():
    off = row(ratio=6.0, loss=LossCheck(loss=3.0, reference=2.0, tolerance=0.125))
    finding = only(not_the_same_loss, speeds(off))
    assert finding.severity == "error"
    assert finding.message == (
        "not the same computation: the loss is 3 in bf16 and 2 in fp32, but rounding explains at most 0.12"
    )
    vanished = LossCheck(loss=2.0, reference=2.0, tolerance=0.125, finite_gradients=False)
    assert only(not_the_same_loss, speeds(row(loss=vanished))).message == (
        "not the same computation: gradients are not finite in bf16, but are in fp32"
    )
    infinite = row("fp16", loss=LossCheck(loss=math.inf, reference=2.0, tolerance=0.125))
    assert only(not_the_same_loss, speeds(infinite)).message == (
        "not the same computation: the loss is inf in fp16 and 2 in fp32"
    )


def test_skipped_steps_are_reported():
    finding = only(skipped_while_measured, speeds(row("fp16", skipped=7)))
    assert finding.message == "fp16: 7 of the timed steps skipped the update because gradients overflowed"


def test_a_hot_gpu_is_reported():
    hot = GpuClocks(before=345, after=1200, lowest=1100, top=1980, held_back_by=("its power limit", "its temperature"))
    assert only(clocks_held_back, speeds(clocks=hot)).message == (
        "throttled by its temperature during the measurement: as low as 1100 MHz of 1980 MHz"
    )


def test_a_noisy_machine_is_reported():
    finding = only(too_noisy, speeds(noise=0.36))
    assert finding.message == (
        "two runs of the same precision differ by 36% in 5 rounds: smaller differences are indistinguishable from noise"
    )
    assert finding.evidence["experiment"] == "ampwise bench train:make --rounds 20"
    assert not list(too_noisy.check_speed(speeds(noise=None)))


def test_every_reason_has_an_experiment_that_can_be_typed():
    low = row(
        split=split(busy=0.001, launches=1000, casts=0.5, matrix=0.5),
        products=(product(2e12, "fp32"), product(1e12, aligned=False)),
        skipped=1,
    )
    made = speeds(low, tf32_was_on=("matmuls",))
    found = run_checks(made)
    assert len(found) >= 6
    assert all(finding.evidence["experiment"].startswith("ampwise ") for finding in found)
