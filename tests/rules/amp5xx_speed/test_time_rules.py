"""What is said about where the time goes, and what is not."""

import pytest

from ampwise.finding import Place
from ampwise.finding.call_site import CallSite
from ampwise.rules.amp5xx_speed import (
    casts_take_time,
    data_stall,
    little_work_in_half,
    misaligned_dims,
    sync_every_step,
)
from ampwise.watch.time_use import ProfiledMatmul, TimeUse

LINE = CallSite(file="train.py", line=31, function="main")
OTHER = CallSite(file="train.py", line=35, function="main")
BIG = 1e12


def product(precision="bf16", flops=BIG, aligned=True, shape="4096×768 @ 768×3072", count=12):
    return ProfiledMatmul(op="mm", shape=shape, precision=precision, flops=flops, aligned=aligned, count=count)


def made(*products, **parts):
    flops = {}
    for one in products:
        flops[one.precision] = flops.get(one.precision, 0.0) + one.flops
    parts = {"device": "cuda", "profiled_steps": 1} | parts
    return TimeUse(matmuls=products, flops_by_precision=flops, **parts)


def messages(rule, use):
    return [finding.message for finding in rule.check_time(use)]


def test_a_line_that_waits_for_each_parameter_is_named():
    use = made(syncs={LINE: 296, OTHER: 2}, sync_steps=2)
    (finding,) = sync_every_step.check_time(use)
    assert (finding.rule.code, finding.rule.name) == ("AMP502", "sync-every-step")
    assert finding.place == Place(file="train.py", line=31)
    assert finding.message == "syncs with the GPU 148 times per step"
    assert finding.evidence == {"waits": 296, "steps": 2}


@pytest.mark.parametrize(
    "use",
    [
        made(syncs={LINE: 6}, sync_steps=2),  # a logged loss, a batch moved
        made(syncs={LINE: 3, OTHER: 3}, sync_steps=1),
        made(sync_steps=4),
        made(),
    ],
)
def test_a_few_waits_are_ordinary(use):
    assert not messages(sync_every_step, use)


def test_misaligned_products_are_named_with_their_counts():
    odd = product(flops=BIG / 4, aligned=False, shape="4096×768 @ 768×50257", count=1)
    (finding,) = misaligned_dims.check_time(made(product(flops=BIG), odd))
    assert finding.rule.code == "AMP503"
    assert finding.message == (
        "20% of the matmul work has a row length that is not a multiple of 8: mm 4096×768 @ 768×50257 (1 times)"
    )
    many = [product(flops=BIG, aligned=False, shape=str(number)) for number in range(5)]
    assert messages(misaligned_dims, made(*many))[0].endswith("mm 2 (12 times) and 2 more")


@pytest.mark.parametrize(
    "use",
    [
        made(product()),
        made(product(), product(flops=BIG / 100, aligned=False)),  # too little of it
        made(product(aligned=None)),  # not known
        made(product("fp32", aligned=False)),  # not in half
        made(product(aligned=False), device="cpu"),
        made(product(flops=1e6, aligned=False)),  # a toy
        made(),
    ],
)
def test_alignment_stays_silent(use):
    assert not messages(misaligned_dims, use)


def test_work_left_in_fp32_is_named():
    wide = product("fp32", 3 * BIG, shape="8×3×224×224 * 64×3×7×7")
    (finding,) = little_work_in_half.check_time(made(wide, product("bf16", BIG), autocast="bf16"))
    assert finding.message == "autocast to BF16 is on, but only 25% of the matmul work runs in half precision"
    assert finding.evidence["exceptions"] == "mm 8×3×224×224 * 64×3×7×7 in FP32"
    assert finding.evidence["half_share"] == 0.25


@pytest.mark.parametrize(
    "use",
    [
        made(product("fp32"), autocast=None),
        made(product("fp32"), autocast="fp16", device="cpu"),
        made(product("fp32"), product("fp16"), autocast="fp16"),  # exactly half
        made(product("fp8"), autocast="bf16"),
        made(product("fp32", 1e6), autocast="fp16"),
        made(product("fp32", 1.5e9), autocast="fp16", profiled_steps=2),  # of two steps
        made(autocast="fp16"),
    ],
)
def test_work_in_half_stays_silent(use):
    assert not messages(little_work_in_half, use)


def test_casts_that_take_time_are_reported_in_milliseconds_a_step():
    use = made(cast_share=0.31, time_by_kind={"casts": 0.0124, "matrix": 0.0276}, profiled_steps=2)
    assert messages(casts_take_time, use) == ["31% of the device time goes into casts: 6.2 ms per step"]


@pytest.mark.parametrize("use", [made(cast_share=0.15), made(cast_share=None), made(cast_share=0.5, device="cpu")])
def test_casts_stay_silent(use):
    assert not messages(casts_take_time, use)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_data_stall_is_at_the_line_that_waited_longest(device):
    waits = {OTHER: 1.0, LINE: 3.0}
    use = made(device=device, steps=10, seconds=10.0, data_wait_seconds=4.0, data_waits=waits)
    (finding,) = data_stall.check_time(use)
    assert finding.place == LINE.place
    assert finding.message == "40% of the time is spent waiting for data: 400 ms per step"


@pytest.mark.parametrize(
    "use",
    [
        made(steps=10, seconds=10.0, data_wait_seconds=2.5),
        made(steps=4, seconds=10.0, data_wait_seconds=9.0),  # too few to say
        made(),
    ],
)
def test_data_stays_silent(use):
    assert not messages(data_stall, use)


def test_a_run_of_which_nothing_is_known_has_no_shares():
    use = TimeUse()
    assert (use.half_share, use.data_wait_share, use.syncs_per_step, use.cast_share) == (None, None, None, None)
    assert use.as_dict()["matrix_products"] == []
