"""Nobody is blamed for what they have not done, and the one who has is named."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampwise.tune.diff.diff import diff

from ...for_each import for_each


def is_narrow():
    """On the second side of these tests."""
    return torch.is_autocast_enabled("cpu")


# A function that does not do the same twice


# By run: a, a again, b forward; a, b, a again forward and backward.
@for_each("factors", [(1, 1.5, 1.1, 1, 3, 1.3), (1, 1.5, 9, 1, 3, 9), (1, 9, 1, 1, 1.2, 5)])
def test_a_function_that_is_not_repeatable_is_reported_before_all_else(factors):
    torch.manual_seed(0)
    model, numbers = nn.Linear(8, 1), iter(factors)
    result = diff(lambda x: (model(x) * next(numbers)).square().mean(), torch.randn(4, 8))
    assert result.first is None
    assert result.verdict.startswith("bf16 against fp32: the function is not repeatable: two runs of a differ by ")
    assert result.findings[0].rule.code == "AMP534"
    assert {finding.rule.code for finding in result.findings} <= {"AMP534", "AMP533"}


class Tossed(nn.Module):
    """Experts that are chosen by chance."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in "ab")

    def forward(self, x, chosen):
        return self.experts[chosen](x).square().mean()


def test_a_choice_by_chance_is_no_choice_of_the_precision():
    torch.manual_seed(0)
    model, numbers = Tossed(), iter((0, 1, 1, 0, 1, 1))
    result = diff(lambda x: model(x, next(numbers)), torch.randn(4, 8))
    assert result.first is None
    assert result.verdict.startswith("bf16 against fp32: the function is not repeatable: ")
    assert result.findings[0].rule.code == "AMP534"


# What is not finite


class Passing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, hidden):
        made = hidden.float().detach().clone()
        self.change(made)
        return made


class Beside(nn.Module):
    """A module whose result is used by nothing."""

    def __init__(self, beside):
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(8, 8), beside, nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x)
        self.beside(hidden)
        return self.last(hidden).square().mean()


def elsewhere(made):
    made[0, int(is_narrow())] = math.inf


def other_sign(made):
    made[0, 0] = -math.inf if is_narrow() else math.inf


def another(made):
    made[0, 0] = math.nan if is_narrow() else -math.inf


def masked(made):
    made[0] = -math.inf


@for_each("change", [elsewhere, other_sign, another])
def test_infinities_that_are_not_the_same_are_found(change):
    torch.manual_seed(0)
    result = diff(Beside(Passing(change)), torch.randn(4, 8), floor=False)
    assert (result.first.where, result.first.cause) == ("`beside`", "overflow")
    assert "and different in FP32" in result.findings[0].message


def test_a_mask_on_both_sides_is_explained():
    torch.manual_seed(0)
    assert diff(Beside(Passing(masked)), torch.randn(4, 8), floor=False).explained


# Predictions that flip


class TooLong(torch.autograd.Function):
    """A derivative that is 30% too long on the second side."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2.6 if is_narrow() else 2.0
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


class WrongBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.two(TooLong.apply(self.one(x)).tanh())).square().mean()


def test_predictions_that_are_only_returned_do_no_harm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))

    def loss_fn(x, y):
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "preds": logits.argmax(-1)}

    result = diff(loss_fn, torch.randn(512, 32), torch.randint(100, (512,)), floor=False)
    assert result.explained, result.verdict
    assert "of 512 integers that `the function` returns differ" in result.evidence.notes[0]


@pytest.mark.parametrize("predicts", [False, True])
def test_a_wrong_derivative_is_found_beside_predictions(predicts):
    torch.manual_seed(0)
    model, other = WrongBackward(), nn.Linear(32, 50)

    def loss_fn(x):
        return {"loss": model(x)} | ({"preds": other(x).argmax(-1)} if predicts else {})

    result = diff(loss_fn, torch.randn(512, 32), floor=False)
    assert result.first.where == "the gradient of what `model.one` returns, from the derivative of the code after it"
    assert "its direction is the same, its length is 1.3 times a's" in result.findings[0].message
    assert result.findings[0].fix.count("the code that computes its inputs") == 1


# Modules that have others in them


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedded, self.weight = nn.Embedding(20, 16), nn.Parameter(torch.randn(16, 16))

    def forward(self, index):
        return F.linear(self.embedded(index), self.weight).square().mean()


def test_modules_with_others_in_them_count():
    torch.manual_seed(0)
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    for model, batch, name in (
        (Functional(), torch.randint(20, (6,)), "Functional"),
        (weighted, torch.randn(4, 8), ""),
    ):
        result = diff(lambda *given, model=model: model(*given).square().mean(), batch, floor=False)
        assert "rounding explains everything; modules are up to 0." in result.verdict
        assert name in result.verdict
        assert result.evidence.growth().largest > 0


# The cause


class Times(nn.Module):
    def __init__(self, factor, narrow=None):
        super().__init__()
        self.factors = (factor, factor if narrow is None else narrow)

    def forward(self, x):
        return x * self.factors[is_narrow()]


def test_what_is_too_small_for_a_format_has_not_cancelled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Times(2e-6), nn.Linear(32, 1))
    result = diff(lambda x: model(x).float().square().mean(), torch.randn(16, 32), b="fp16", floor=False)
    assert (result.first.where, result.findings[0].rule.code) == ("`1`", "AMP531")
    assert "because its values have fewer bits in FP16: their typical magnitude is" in result.findings[0].message


def test_what_no_rounding_does_is_not_called_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(Times(1.0, 1.25), nn.Linear(32, 1))
    result = diff(lambda x: model(x).square().mean(), torch.randn(16, 32), floor=False)
    finding = result.findings[0]
    assert finding.rule.name == "one-side-does-otherwise"
    assert finding.message.startswith("`0` is 25% off, ")
    assert finding.message.endswith("The operation is `mul`, test_blame.py:" + str(finding.place.line))


class Logged(nn.Module):
    """A sum that is about zero and leads nowhere, before a difference that cancels."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.two.load_state_dict(self.one.state_dict())
        self.two.bias.data.add_(0.004)

    def forward(self, x):
        hidden = self.first(x)
        self.seen = (hidden.float() - hidden.float().mean(-1, keepdim=True)).sum(-1)
        apart = self.two(hidden) - self.one(hidden)  # the culprit
        return self.out(apart * 100).square().mean()


@pytest.mark.parametrize("ops", [False, True])
def test_the_operation_that_is_named_leads_to_the_place(ops):
    torch.manual_seed(0)
    result = diff(Logged(), torch.randn(64, 32), floor=False, ops=ops)
    lines = Path(__file__).read_text().split("\n")
    assert "# the culprit" in lines[result.first.op.site.line - 1]
    assert result.first.op.op == "aten.sub.Tensor"


# What piles up


def test_what_piles_up_is_not_called_explained():
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    result = diff(lambda x: model(x).square().mean(), torch.randn(16, 16), b="nvfp4", floor=False)
    assert result.first is None
    assert [finding.rule.code for finding in result.findings if finding.rule.code == "AMP537"]
    assert "rounding explains every location, but accumulates; " in result.verdict


# Kernels


def test_products_inside_a_kernel_are_reported():
    model = nn.Sequential(nn.LSTM(8, 8, batch_first=True))
    result = diff(lambda x: model(x)[0].square().mean(), torch.randn(2, 3, 8), b="e4m3", floor=False)
    emulated = result.rows[0].error > 1e-3
    told = "The matmuls of `0` run inside one fused kernel, so they are not emulated."
    assert (told in result.evidence.notes) != emulated


def test_onednn_is_left_as_it_was():
    """Which torch switches off where it does not get along with it."""
    before = torch._C._get_mkldnn_enabled()
    model = nn.Linear(4, 1)

    def loss_fn(x):
        assert torch._C._get_mkldnn_enabled() == before
        torch._C._set_mkldnn_enabled(False)
        return model(x).square().mean()

    diff(loss_fn, torch.randn(3, 4))
    assert torch._C._get_mkldnn_enabled() == before


def test_a_result_is_shown_in_a_line():
    result = diff(nn.Sequential(nn.Linear(4, 1)), torch.randn(1, 4), floor=False)
    assert repr(result) == f"<Difference: {result.verdict}>"
