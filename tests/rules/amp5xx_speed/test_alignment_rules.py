"""What is said about the sizes of a model's products, and what is not."""

from dataclasses import replace

import pytest

from ampwise.finding import Place
from ampwise.finding.registry import run_checks
from ampwise.rules.amp5xx_speed import (
    fp8_misaligned,
    misaligned_activations,
    misaligned_channels,
    misaligned_dims,
    misaligned_heads,
)
from ampwise.tune.align.matmuls import MatmulSize, PaddingTiming, StepMatmul, StepMatmuls

BIG = 1e12
ROLES = {
    "linear": ("rows", "outputs", "inputs"),
    "convolution": ("rows", "output channels", "input channels"),
    "attention": ("queries", "keys", "head size"),
    "product": ("size", "size", "size"),
}
RULES = {
    "linear": misaligned_dims,
    "convolution": misaligned_channels,
    "attention": misaligned_heads,
    "product": misaligned_activations,
}


def product(kind="linear", sizes=(4096, 1001, 512), layer="head", flops=BIG, precision="bf16", **parts):
    m, n, k = (MatmulSize(role=role, size=size, row=size) for role, size in zip(ROLES[kind], sizes, strict=True))
    m = replace(m, row=None)
    return StepMatmul(
        layer=layer, kind=kind, op="mm", backward=False, precision=precision, m=m, n=n, k=k, flops=flops, **parts
    )


def made(*products, **parts):
    return StepMatmuls(**{"name": "test", "precision": "bf16", "device": "cpu", "products": products} | parts)


REST = product(layer="rest", sizes=(4096, 1024, 512), flops=BIG)


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("linear", (4096, 50257, 768), "outputs 50257 → 50304: 50.0% of the matmul work, derived"),
        ("convolution", (4096, 100, 60), "output channels 100 → 104, input channels 60 → 64: 50.0% of the matmul work"),
        ("attention", (1024, 1024, 60), "head size 60 → 64: 50.0% of the matmul work, derived"),
        ("product", (1023, 1023, 64), "mm of 1023×1023×64: size 1023 → 1024: 50.0% of the matmul work, derived"),
    ],
)
def test_each_kind_has_its_rule(kind, sizes, said):
    found = made(product(kind, sizes), REST)
    (finding,) = RULES[kind].check_matmuls(found)
    assert finding.place == Place(module="head")
    assert finding.message.startswith(said)
    assert finding.evidence["share"] == 0.5
    assert run_checks(found) == [finding]


def test_the_rule_of_layers_is_the_linters():
    assert misaligned_dims.RULE.code == "AMP503"
    (finding,) = misaligned_dims.check_matmuls(made(product(), REST))
    assert "ampwise.pad_(model)" in finding.fix


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(
    "change",
    [
        {"sizes": (4096, 1024, 512)},  # aligned
        {"flops": BIG / 100},  # too little of it
        {"precision": "fp64"},  # no device has tensor cores for it
        {"precision": "tf32", "sizes": (4096, 1004, 500)},  # words of four
    ],
)
def test_silence(kind, change):
    assert run_checks(made(product(kind, **{"sizes": (4095, 1004, 510)} | change), REST)) == []


def test_a_toy_is_silent():
    assert run_checks(made(product(flops=1e6))) == []


def test_layers_alike_count_together():
    blocks = [product(layer=f"blocks.{number}.expand", flops=BIG / 20) for number in range(4)]
    (finding,) = run_checks(made(*blocks, REST))
    assert finding.place == Place(module="blocks.*.expand")
    assert finding.evidence["layers"] == 4
    assert finding.evidence["share"] == pytest.approx(1 / 6)
    other = product(layer="blocks.4.expand", sizes=(4096, 1003, 512), flops=BIG / 50)
    assert len(made(*blocks, other).layers) == 2


@pytest.mark.parametrize(
    ("ms", "padded", "spread", "count", "worth"),
    [
        (3.0, 1.0, 0.1, 1, True),
        (3.0, 1.0, 2.5, 1, False),  # noise
        (1.0, 3.0, 0.1, 1, False),  # slower
        (1.05, 1.0, 0.01, 1, False),  # too little
        (1.05, 1.0, 0.01, 24, True),
    ],
)
def test_time_decides_where_it_was_measured(ms, padded, spread, count, worth):
    timing = PaddingTiming(ms=ms, padded_ms=padded, spread_ms=spread)
    found = made(product(timing=timing, count=count), REST, step_ms=100.0)
    assert bool(run_checks(found)) is worth
    if worth:
        assert run_checks(found)[0].message.endswith("ms of 100 ms per step, measured here")


def test_what_was_not_measured_is_judged_by_its_work():
    (finding,) = run_checks(made(product("attention", (1024, 1024, 60)), REST, step_ms=100.0))
    assert finding.message.endswith("50.0% of the matmul work, derived")


def test_fp8_is_a_requirement_however_little_it_is():
    found = made(product(sizes=(4096, 1000, 512), precision="fp8", flops=1.0), REST, precision="fp8")
    (finding,) = fp8_misaligned.check_matmuls(found)
    assert finding.rule.code == "AMP510"
    assert finding.message == "outputs 1000 → 1008: 0.0% of the matmul work cannot run in FP8"
    assert run_checks(found) == [finding]
    assert not list(fp8_misaligned.check_matmuls(made(product(), REST)))
