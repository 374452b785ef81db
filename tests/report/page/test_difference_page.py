"""The page of a difference in a browser: its charts are drawn, can be walked along, and nothing stands in the way."""

import math

import pytest

from ampwise.tune.diff.result import Difference
from ampwise.tune.diff.step_difference import ErrorLocation, ModuleRow, ParameterRow, SideFacts, StepDifference
from ampwise.tune.diff.tensor_difference import ComparedTensor, TensorDifference

from ...night import by_night

pytest.importorskip("torch")


def compared(error, *, given=0.01, own=0.004, bad=0):
    measured = TensorDifference(
        shape=(4, 8),
        norm_a=1.0,
        norm_b=1.0,
        norm_error=error,
        largest_error=error,
        largest_at=(1, 2),
        largest_a=1.0,
        largest_b=1.0,
        zeros_a=0,
        zeros_b=0,
        bad_a=0,
        bad_b=bad,
    )
    return ComparedTensor(measured=measured, given=given, own=own)


def side(name, roundoff):
    return SideFacts(label=name, precision=name, device="cpu", roundoff=roundoff, gradient_roundoff=roundoff, loss=1.5)


def difference(**parts):
    beyond = compared(0.6)
    rows = [
        ModuleRow(name="", kind="Net", is_leaf=False, outputs=(compared(0.02),)),
        ModuleRow(name="stem", kind="Linear", outputs=(compared(0.004),), gradients=(compared(0.03),)),
        ModuleRow(name="body", kind="Linear", outputs=(compared(0.008),), gradients=(compared(0.02),)),
        ModuleRow(name="head", kind="Linear", outputs=(beyond,), gradients=(compared(0.0, bad=3),)),
    ]
    spot = ErrorLocation(module="head", kind="Linear", phase="forward", compared=beyond, shrinks=90.0)
    given = {
        "name": "train:make",
        "a": side("fp32", 2**-24),
        "b": side("bf16", 2**-8),
        "rows": tuple(rows),
        "parameters": (ParameterRow(name="stem.weight", compared=compared(0.03), share=1.0),),
        "spots": (spot,),
        "floor": 0.0,
    }
    return Difference(StepDifference(**given | parts))


@pytest.mark.parametrize("scheme", ["light", *by_night("dark")])
def test_errors_are_drawn_along_the_depth(shown, looked_at, scheme):
    view = shown(difference().page(), scheme=scheme)
    looked_at(view, f"difference-{scheme}")
    assert view.locator("#depth-charts figure .uplot").count() == 2
    assert view.locator("#no-charts").count() == 0
    label = view.locator("#depth-charts figure").first.get_attribute("aria-label")
    assert label == (
        "Forward: outputs: From 0.4% at the first module that differs to 60% at the last, at most 60% at "
        "head (Linear). Beyond what rounding explains: head (Linear)."
    )
    assert view.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_the_keyboard_walks_along_the_modules(shown):
    view = shown(difference().page())
    for number, told in enumerate(
        (
            (
                "stem (Linear): 0.4% off, rounding explains 5.6%",
                "head (Linear): 60% off, rounding explains 5.6%, beyond",
            ),
            (
                "stem (Linear): 3% off, rounding explains 5.6%",
                "head (Linear): not finite on one side, or different shapes",
            ),
        )
    ):
        figure = view.locator("#depth-charts figure").nth(number)
        figure.focus()
        view.keyboard.press("ArrowRight")
        assert figure.locator(".readout").inner_text() == told[0]
        for _ in range(3):
            view.keyboard.press("ArrowRight")
        assert figure.locator(".readout").inner_text() == told[1]


def test_a_link_unfolds_the_rule(shown):
    view = shown(difference().page())
    view.locator("a.rule").first.click()
    assert view.locator("details#rule-AMP530[open]").count() == 1


def test_nothing_to_draw_is_still_a_page(shown):
    view = shown(difference(rows=(), parameters=(), spots=()).page())
    assert not view.locator("#depth").is_visible()
    assert "What the function returns" in view.locator("h1").inner_text()
    assert math.isfinite(view.locator("main").bounding_box()["height"])


@pytest.mark.nightly
def test_it_has_no_barrier_that_a_program_can_find(shown):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    view = shown(difference().page(), bypass_csp=True)
    found = axe.Axe().run(view).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
