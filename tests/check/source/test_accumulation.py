"""Accumulation windows in their spellings, and where a loss is divided on the way to its backward."""

import ast
import textwrap

import pytest

from ampwise.check.source.accumulation import accumulation_windows
from ampwise.check.source.loss_normalisation import LossNormalisation
from ampwise.check.source.project import Project
from ampwise.check.source.steps import BACKWARDS

LOOP = """
    def train(model, optimizer, scaler, loader, loss_fn, n, flag):
        seen = 0
        for i, (x, y) in enumerate(loader):
            loss = loss_fn(model(x), y)
            {divide}
            scaler.scale({loss}).backward()
            {count}
            if {test}:
                scaler.step(optimizer)
                scaler.update()
                {reset}
"""


def windows(divide="pass", loss="loss", count="pass", test="(i + 1) % n == 0", reset="pass"):
    text = textwrap.dedent(LOOP.format(divide=divide, loss=loss, count=count, test=test, reset=reset))
    code = Project(["script.py"], {"script.py": text}).code("script.py")
    return [window for region in code.regions for window in accumulation_windows(region)]


@pytest.mark.parametrize(
    "test",
    ["(i + 1) % n == 0", "not (i + 1) % n", "(i + 1) % n == 0 or i + 1 == len(loader)", "flag and (i + 1) % n == 0"],
)
def test_a_step_under_a_modulo_ends_a_window(test):
    (window,) = windows(test=test)
    assert ast.unparse(window.size) == "n"


@pytest.mark.parametrize("test", ["seen == n", "seen >= n", "seen + 1 >= n"])
def test_a_counter_that_goes_back_to_nothing_ends_a_window(test):
    (window,) = windows(test=test, count="seen += 1", reset="seen = 0")
    assert ast.unparse(window.size) == "n"


@pytest.mark.parametrize(
    ("test", "count", "reset"),
    [
        ("flag", "pass", "pass"),
        ("seen >= n", "seen += 1", "pass"),
        ("seen >= n", "pass", "seen = 0"),
        ("loss < n", "pass", "pass"),
    ],
)
def test_other_conditions_on_the_step_are_no_window(test, count, reset):
    assert windows(test=test, count=count, reset=reset) == []


@pytest.mark.parametrize(
    ("divide", "loss"),
    [
        ("loss = loss / n", "loss"),
        ("loss /= n", "loss"),
        ("loss = loss.div(n)", "loss"),
        ("share = 1 / n", "loss * share"),
        ("loss = loss / n if n > 1 else loss", "loss"),
        ("pass", "loss / n"),
        ("pass", "loss * (1 / n)"),
        ("pass", "reduce(loss, n)"),
        ("pass", "self.reduce(loss)"),
        ("optimizer.param_groups[0]['lr'] = flag.lr / n", "loss"),
    ],
)
def test_a_loss_that_may_be_divided_is_left_alone(divide, loss):
    (window,) = windows(divide, loss)
    assert all(
        LossNormalisation(window).may_be(event) for path in window.paths for event in window.events_on(path, *BACKWARDS)
    )


@pytest.mark.parametrize(
    ("divide", "loss"), [("pass", "loss"), ("loss = 0.5 * loss + 0.1", "loss"), ("m = loss.item() / n", "loss")]
)
def test_a_loss_that_is_not_divided_is_seen(divide, loss):
    (window,) = windows(divide, loss)
    assert not any(
        LossNormalisation(window).may_be(event) for path in window.paths for event in window.events_on(path, *BACKWARDS)
    )
