"""What a difference looks like: text, notebook, page, JSON; and what cannot be compared is an error."""

import json
import math
import re

import pytest
import torch
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.finding.strict_json import dumps, loads
from ampwise.tune.diff.diff import diff
from ampwise.tune.diff.text import difference_text

from ...for_each import for_each

NASTY = "<img src=x onerror=alert(1)>\x1b[2J"


class Opposed(nn.Module):
    def __init__(self, name="out"):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.add_module(name, nn.Linear(8, 1))
        self.last = name
        with torch.no_grad():
            self.two.weight.copy_(self.one.weight + 1e-3 * torch.randn(8, 8))
            self.two.bias.copy_(self.one.bias)

    def forward(self, x):
        return self._modules[self.last](self.one(x) - self.two(x)).square().mean()


@pytest.fixture(scope="module")
def broken():
    torch.manual_seed(0)
    return diff(Opposed(), torch.randn(6, 8), ops=True)


@pytest.fixture(scope="module")
def healthy():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    return diff(lambda x: model(x).square().mean(), torch.randn(6, 8))


def test_a_result_is_frozen(broken):
    with pytest.raises(AttributeError):
        broken.evidence = None
    assert hash(broken.evidence.first.op.op)


def test_text_of_what_is_not_explained(broken):
    text = str(broken)
    assert text.startswith("bf16 against fp32: rounding does not explain the code of `Opposed` before `out`")
    assert re.search(r"It is \d+% off, \d+ times what rounding explains: its input was 0\.\d+% off\.", text)
    assert "The operation is `sub`" in text
    assert "warning[AMP530] cancellation-amplifies-rounding: " in text
    assert re.search(r"\(code before out\) +\d+% +\d+ !", text)
    assert "a  fp32 on cpu, unit roundoff 6e-08, loss " in text
    assert "Two runs of a are bitwise equal." in text
    assert "Gradients of parameters, worst first\n" in text
    assert "aten.sub.Tensor" in text


def test_text_of_what_is_explained(healthy):
    text = str(healthy)
    assert text.startswith("bf16 against fp32: rounding explains everything; modules are up to ")
    assert "Modules, the worst 15 of 21 (-v shows all)" in text
    assert "Gradients of parameters, the worst 15 of 40 (-v shows all)" in text
    assert re.search(r"Forward, along the calls: 0\.\d+% at the first of 20 modules that differ", text)
    assert re.search(r"Backward, from the loss: .* per module\.", " ".join(text.split()))
    assert healthy.explained
    assert healthy.findings == []


def test_all_rows_are_in_their_order(healthy):
    lines = difference_text(healthy, everything=True).split("\n")
    start = lines.index("Modules, in the order of calls") + 2
    assert [line.split()[0] for line in lines[start : start + 21]] == ["Sequential", *map(str, range(20))]


def test_a_narrow_terminal_is_not_left(healthy):
    text = difference_text(healthy, width=80, colour=True)
    assert "\x1b[" in text
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert max(map(len, plain.split("\n"))) <= 80


def test_numbers_for_machines(broken):
    data = loads(dumps(broken.as_dict()))
    assert data["explained"] is False
    assert data["first"]["cause"] == "cancellation"
    assert data["first"]["op"]["op"] == "aten.sub.Tensor"
    assert data["first"]["before"] == "out"
    assert [row["module"] for row in data["modules"]] == ["", "one", "two", "out"]
    output = data["modules"][1]["outputs"][0]
    assert 0 < output["relative_error"] < 0.02
    assert output["snr_db"] == pytest.approx(-20 * math.log10(output["relative_error"]))
    assert output["noise_floor"] == 0.0
    assert data["parameters"][0]["parameter"] == "one.weight"
    assert data["findings"][0]["code"] == "AMP530"
    assert data["growth"]["forward"]["modules"] == 3
    assert set(data["basis"]) == {"errors", "expected_error", "noise_floor", "gradients"}
    assert "NaN" not in json.dumps(data)


def test_json_has_no_infinities():
    model = nn.Linear(4, 4)
    result = diff(
        lambda x: (model(x) * 1e5).exp().float().mean().clamp(max=9.0), torch.randn(3, 4), b="fp16", floor=False
    )
    assert "Infinity" not in dumps(result.as_dict())


def test_nothing_of_a_name_is_markup():
    torch.manual_seed(0)
    result = diff(Opposed(NASTY), torch.randn(6, 8), floor=False)
    for markup in (result._repr_html_(), result.page()):
        assert "<img" not in markup
        assert "&lt;img src=x onerror=alert(1)&gt;" in markup
        assert "\x1b" not in markup
    assert "\x1b" not in str(result)
    assert "\\x1b[2J" in str(result)


def test_a_notebook_shows_the_worst(broken, healthy):
    assert "rounding does not explain" in broken._repr_html_()
    assert "AMP530" in broken._repr_html_()
    assert "<table" in healthy._repr_html_()
    assert "<script" not in healthy._repr_html_()


def test_a_page_needs_nothing_else(broken):
    page = broken.page()
    assert page.count("<script") == 2
    assert "Content-Security-Policy" in page
    assert not re.search(r"(src|href)=\"(http|//)", page)
    assert 'id="depth-charts"' in page
    assert "self.one(x) - self.two(x)" in re.sub(r"</?b[^>]*>", "", page)  # the line, in the card of the finding
    assert page == broken.page()


# What cannot be compared

MODEL = nn.Linear(4, 1)


@for_each(
    ("function", "told"),
    [
        (3, r"diff\(\): expected a function and its arguments, as in diff\(loss_fn, x, y\); got an int."),
        (
            lambda x: float(MODEL(x).mean()),
            "the function returned a float; expected the loss as a tensor",
        ),
        (lambda x: None, "the function returned None; expected the loss"),
        (
            lambda x: MODEL(x).log().mean() * math.nan,
            "the loss is not finite on either side .nan and nan., so there is no",
        ),
        (lambda x: MODEL(x) @ x.nothing, r"diff: fp32: the step failed: AttributeError: .* \(test_result.py:\d+\)\."),
    ],
)
def test_what_cannot_be_run(function, told):
    with pytest.raises(BadInput, match=told):
        diff(function, torch.randn(3, 4))


def test_a_function_that_goes_back_by_itself():
    def loss_fn(x):
        loss = MODEL(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(BadInput, match=r"diff: the function calls backward\(\) itself; return the loss instead"):
        diff(loss_fn, torch.randn(3, 4))
    assert MODEL.weight.grad is None


def test_without_a_loss_the_forward_pass_is_compared():
    for function in (MODEL, lambda x: MODEL(x).detach().mean()):
        result = diff(function, torch.randn(3, 4))
        assert result.evidence.notes == ("No loss with a gradient was returned: only the forward pass is compared.",)
        assert result.rows[0].error > 0
        assert result.rows[0].gradients == ()
        assert result.parameters == ()


def test_a_pattern_that_matches_nothing():
    with pytest.raises(UnknownName, match=r"unknown module 'blocks\.\*'"):
        diff(lambda x: MODEL(x).mean(), torch.randn(3, 4), modules="blocks.*")
    hidden = [[[[[MODEL]]]]]
    with pytest.raises(UnknownName, match=r"unknown module 'blocks\.\*'"):  # of a model that is only met when it runs
        diff(lambda x: hidden[0][0][0][0][0](x).mean(), torch.randn(3, 4), modules="blocks.*")
