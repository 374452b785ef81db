"""What is said of a difference as a whole: gradients that turn, noise, errors that pile up, modules of one side."""

import math

from .conftest import parameter, row, spot


def codes(found):
    return [finding.rule.code for finding in found]


def test_gradients_that_point_elsewhere(findings):
    turned = [parameter("a", 0.9, cosine=0.7), parameter("b", 0.8, cosine=0.85), parameter("c", 0.3, cosine=0.99)]
    (finding,) = findings(parameters=tuple(turned))
    assert finding.rule.code == "AMP533"
    assert finding.message == (
        "the gradient of `a` (and of 1 more of 3) has a cosine of 0.70 with the one in FP32, and is 90% off"
    )
    assert finding.evidence["worst"] == ["a", "b"]
    assert "No single location is responsible" in finding.fix


def test_gradients_that_are_too_small_to_matter_may_point_anywhere(findings):
    assert findings(parameters=(parameter("keys.bias", 1.5, cosine=-0.2, share=1e-6),)) == []
    assert findings(parameters=(parameter("noisy", 0.9, cosine=0.7, floor=0.5),)) == []
    assert findings(parameters=(parameter("zero", 0.0, norm=0.0),)) == []


def test_where_a_turned_gradient_begins(findings):
    found = findings(parameters=(parameter("a", 0.9, cosine=0.7),), spots=(spot(op="aten.sub.Tensor"),))
    assert codes(found) == ["AMP530", "AMP533"]
    assert found[1].fix == "It starts at `block`: fix that first, then run `ampwise diff` again."


def test_noise_as_large_as_the_difference(findings):
    noisy = {"floor": 0.02, "floor_at": "layer"}
    (finding,) = findings(rows=(row(error=0.03, floor=0.02),), **noisy, draws_from=("batches",))
    assert finding.rule.code == "AMP534"
    assert finding.message == (
        "two runs of a (fp32) differ: `layer` is 2% off the second time; it takes the next items of `batches`, which "
        "differ each time"
    )
    (finding,) = findings(rows=(row(error=0.03, floor=math.inf),), floor=math.inf, floor_at="layer")
    assert "is of a different shape the second time" in finding.message


def test_noise_far_below_the_difference_is_nobodys_concern(findings):
    assert findings(rows=(row(error=0.03, floor=1e-6),), floor=1e-6, floor_at="layer") == []
    assert findings(rows=(row(error=0.03, floor=0.0),), floor=0.0) == []


def test_errors_that_pile_up(findings):
    rows = tuple(row(f"{number}", 0.01 * 1.2**number) for number in range(20))
    (finding,) = findings("nvfp4", rows=rows)
    assert finding.rule.code == "AMP537"
    assert finding.message == (
        "what `19` returns is 32% off in NVFP4, after 1% at the first of 20 modules (growing 1.2x from one module to "
        "the next); rounding explains each one by itself"
    )
    assert findings(rows=rows[:15]) == []  # not yet large
    (back,) = findings(rows=(row("0", 0.01, gradient=0.5), row("1", 0.01, gradient=0.1)))
    assert back.message.startswith("the gradient of what `0` returns is 50% off")


def test_what_has_a_place_to_blame_does_not_pile_up(findings):
    assert codes(findings(rows=(row(error=0.6),), spots=(spot(op="aten.sub.Tensor"),))) == ["AMP530"]
    assert codes(findings(rows=(row(error=0.6, floor=0.5),), floor=0.5, floor_at="x")) == ["AMP534"]


def test_modules_that_one_side_runs(findings):
    (finding,) = findings(rows=(row("experts.1", only="a"), row("experts.2", only="b")))
    assert finding.rule.code == "AMP536"
    assert finding.message == "`experts.1` runs only in a (and 1 more such calls)"
    (finding,) = findings(rows=(row("experts.2", only="b"),))
    assert finding.message == "`experts.2` runs only in b"
