"""Causes that were planted are named, and none where there is none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.search.arrangement import parse_formats
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.reasons import find_reasons, usual_amplification
from ampwise.tune.search.sensitivity import SensitivityProbe, singular_range
from ampwise.tune.search.trials import SearchTrial
from ampwise.tune.search.units import find_units

CPU = torch.device("cpu")


def reasons(model, function, batch, fmt, name, *, with_condition=False):
    """For a unit, by kind; texts of one kind together."""
    passes, given = PassRunner(function, model, CPU), SearchBatch(batch, {})
    units = find_units(model, lambda: passes.forward(given))
    choices = parse_formats((fmt, "fp32"))
    looking = SensitivityProbe(units, choices, CPU, {unit.name for unit in units})
    passes.watched(given, looking)
    usual = usual_amplification(look.locals[fmt] for look in looking.looks.values())
    condition = singular_range(next(unit for unit in units if unit.name == name)) if with_condition else None
    look = looking.looks[name]
    found = {}
    for one in find_reasons(choices[0], look.facts, look.locals[fmt], condition, usual):
        found[one.kind] = f"{found.get(one.kind, '')}{one.text};"
    return found


def chain(*layers):
    model = nn.Sequential(*layers)
    return model, lambda x, y: F.mse_loss(model(x), y)


def data(rows=64, inputs=32, outputs=4):
    return torch.randn(rows, inputs), torch.randn(rows, outputs)


def test_an_ordinary_layer_has_no_cause_but_rounding():
    model, function = chain(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    for fmt in ("e4m3", "mxfp8", "bf16"):
        found = reasons(model, function, data(), fmt, "0")
        assert set(found) == {"rounding"}
        assert found["rounding"].startswith(f"nothing unusual: {fmt} makes its own output or gradient")


def test_an_outlier_makes_the_rest_too_small_for_the_format():
    model, function = chain(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    x, y = data()
    x[:, 0] = 1e5
    model[0].weight.data[:, 0] = 0
    found = reasons(model, function, (x, y), "e4m3", "0")
    assert (
        "of its inputs are so small relative to the largest (1e+05) that FP8 E4M3 rounds them to zero" in found["range"]
    )


def test_beyond_fp16():
    model, function = chain(nn.Linear(32, 64), nn.Linear(64, 4))
    x, y = data()
    found = reasons(model, function, (x * 1e5, y), "fp16", "0")
    assert f"its inputs reach {float((x * 1e5).abs().max()):.2g}; FP16 ends at 65504;" in found["range"]
    with torch.no_grad():
        model[0].weight.mul_(1e5)
    found = reasons(model, function, (x, y), "fp16", "0")
    assert "its output reaches" in found["range"]
    assert "range" not in reasons(model, function, (x, y), "bf16", "0")


def test_sums_that_cancel():
    model, function = chain(nn.Linear(32, 64, bias=False), nn.Linear(64, 4))
    half = torch.randn(64, 16)
    with torch.no_grad():
        model[0].weight.copy_(torch.cat([half, -half], 1) + 1e-3 * torch.randn(64, 32))
    x = torch.randn(64, 16)
    found = reasons(model, function, (torch.cat([x, x], 1), torch.randn(64, 4)), "e4m3", "0")
    assert "times smaller than with random signs" in found["cancellation"]


def test_an_ill_conditioned_weight():
    model, function = chain(nn.Linear(32, 32), nn.Linear(32, 4))
    left, _, right = torch.linalg.svd(torch.randn(32, 32))
    model[0].weight.data = left @ torch.diag(torch.logspace(2, -3, 32)) @ right
    found = reasons(model, function, data(), "e4m3", "0", with_condition=True)
    assert found["condition"] == "its weight is ill-conditioned: singular values from 1e+02 down to 0.001;"


def test_logits_of_a_softmax_but_not_of_a_norm():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    with torch.no_grad():
        model[2].weight.mul_(40)
    batch = torch.randn(64, 16), torch.randint(8, (64,))
    function = lambda x, y: F.cross_entropy(model(x).float(), y)  # noqa: E731
    assert "logits" not in reasons(model, function, batch, "e4m3", "0")
    found = reasons(model, function, batch, "e4m3", "2")
    assert found["logits"].startswith("its output goes into a softmax, and e4m3 moves a logit by")


def test_what_follows_amplifies_it():
    """Two heads whose difference counts: the second has a large part in common."""

    class Opposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
            self.one, self.two = nn.Linear(16, 8), nn.Linear(16, 8)
            with torch.no_grad():
                for head in (self.one, self.two):
                    head.bias.fill_(100.0)

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return self.one(x) - self.two(x)

    model = Opposed()
    found = reasons(model, lambda x, y: F.mse_loss(model(x), y), data(64, 16, 8), "e4m3", "one")
    assert "a difference of nearly equal values" in found["amplified"]


def test_a_power_of_two_as_scale_cuts_off_the_largest():
    """What a cross-entropy passes back is just below a power of two where the right class is: 255/256."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 256, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(0.01)
    batch = torch.randn(64, 32), torch.randint(256, (64,))
    function = lambda x, y: F.cross_entropy(model(x).float(), y)  # noqa: E731
    found = reasons(model, function, batch, "mxfp8", "1")
    assert "power-of-two scales clip values just below the next power" in found["shrinks"]
    assert "shrinks" not in reasons(model, function, batch, "e4m3", "1")


def test_of_the_model_itself_nothing_is_known_but_the_whole():
    choice = parse_formats(("e4m3", "fp32"))[0]
    (reason,) = find_reasons(choice, None, None, None, None)
    assert reason.text == "measured only as part of the whole"
    for loss, gradient, said in [
        (0.01, 0.02, "the gradient of blocks.0 20.0% wrong"),
        (0.03, 0.02, "the loss 3.0% wrong"),
    ]:
        alone = SearchTrial(assignment=(0,), loss=loss, gradient=gradient, worst="blocks.0")
        (reason,) = find_reasons(choice, None, None, None, None, alone)
        assert reason.text == f"e4m3 in this module alone makes {said}"


@pytest.mark.parametrize("weight", [torch.full((4, 4), float("nan")), torch.ones(2000, 2000)])
def test_singular_values_are_looked_at_where_that_makes_sense(weight):
    from ampwise.tune.search.units import SearchUnit

    layer = nn.Linear(*weight.T.shape)
    layer.weight.data = weight
    assert singular_range(SearchUnit(name="layer", module=layer, kind="Linear", flops=1.0)) is None
    assert singular_range(SearchUnit(name="norm", module=nn.LayerNorm(3), kind="LayerNorm", flops=1.0)) is None
