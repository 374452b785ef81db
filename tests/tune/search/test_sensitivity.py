"""Modules run by themselves: what it says, against rounding by hand and against the whole run narrow."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.numbers.emulation.recipe import recipe_for_format, round_operand
from ampwise.tune.search import sensitivity
from ampwise.tune.search.arrangement import parse_formats
from ampwise.tune.search.passes import PassRunner, SearchBatch, has_hidden_parts
from ampwise.tune.search.sensitivity import SensitivityProbe, before_softmax
from ampwise.tune.search.units import find_units

from .models import Attention, deep, net

CPU = torch.device("cpu")


def looked_at(function, model, batch, formats=("e4m3", "bf16", "fp32")):
    """The looks, and what each unit was run with."""
    passes, given = PassRunner(function, model, CPU), SearchBatch(batch, {})
    units = find_units(model, lambda: passes.forward(given))
    ran = {}

    def facts(unit, wide, narrow, into_softmax):
        ran[unit.name] = (wide, narrow)
        return True

    looking = SensitivityProbe(units, parse_formats(formats), CPU, {unit.name for unit in units})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "measure_facts", facts)
        passes.watched(given, looking)
    return looking.looks, ran


def relative(one, other):
    return float((one - other).square().sum() / one.square().sum())


def test_a_linear_layer_is_rounded_as_by_hand():
    model = nn.Sequential(nn.Linear(32, 24, bias=False), nn.Tanh(), nn.Linear(24, 4, bias=False))
    x = torch.randn(16, 32)
    looks, ran = looked_at(lambda x: model(x).square().mean(), model, (x,), ("mxfp8", "fp32"))
    recipe, half = recipe_for_format("mxfp8"), torch.bfloat16

    def q(tensor, dim):
        return round_operand(tensor.to(half), recipe.forward, dim, scaled=True)

    with torch.no_grad():
        given = torch.tanh(model[0](x))
    weight = model[2].weight.detach()
    told = 2 * (given @ weight.T) / (16 * 4)
    wide, _ = ran["2"]
    torch.testing.assert_close(wide.out_grads[0], told)
    torch.testing.assert_close(wide.outputs[0], given @ weight.T)
    local = looks["2"].locals["mxfp8"]
    expected = relative(given @ weight.T, (q(given, -1) @ q(weight, 1).T).to(half).float())
    assert abs(local.output - expected) < 1e-3 * expected
    by_weight = (q(told, 0).T @ q(given, 0)).to(half).float()
    by_input = (q(told, -1) @ q(weight, 0)).to(half).float()
    expected = max(relative(told.T @ given, by_weight), relative(told @ weight, by_input))
    assert abs(local.gradient - expected) < 1e-3 * expected


def test_it_is_about_what_the_whole_suffers():
    """Within a factor of four of the module alone in a format, for all modules but the model itself."""
    from ampwise.tune.search.arrangement import arrange_formats
    from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference, ParameterGroups

    model, batches = net(1)
    passes, batch = PassRunner(model, model, CPU), SearchBatch(batches[0], {})
    units = find_units(model, lambda: passes.forward(batch))
    choices = parse_formats(("e4m3", "bf16", "fp32"))
    looks, _ = looked_at(model, model, batches[0])
    reference = Fp32Reference(ParameterGroups(model, passes.parameters), [passes.outcome(batch)], 1)
    for place, unit in enumerate(units):
        for choice in choices[:-1] if unit.name else ():
            chosen = [choice if other == place else choices[-1] for other in range(len(units))]
            tally = ErrorTally(reference)
            tally.add(passes.outcome(batch, arrange_formats(units, chosen, CPU)))
            alone = tally.difference.error
            assert alone / 4 < looks[unit.name].locals[choice.name].score < 4 * alone


def test_one_that_cancels_stands_out():
    model, function, batches = deep(12, cancelling=[7], batches=1)
    looks, _ = looked_at(function, model, batches[0])
    scores = {name: look.locals["e4m3"].score for name, look in looks.items()}
    worst, second = sorted(scores.values(), reverse=True)[:2]
    assert scores["layers.7"] == worst > 3 * second


def test_a_module_with_dropout_is_run_on_the_same_numbers():
    model = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    holder = nn.ModuleDict({"attention": model})
    seen = []
    hook = model.register_forward_hook(lambda _, args, out: seen.append(out[0].detach()))
    _, ran = looked_at(
        lambda x: model(x, x, x, need_weights=False)[0].square().mean(), holder, (torch.randn(2, 5, 16),)
    )
    hook.remove()
    outputs = [each for each in seen if each.dtype == torch.float32]
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert torch.equal(ran["attention"][0].outputs[0], outputs[0])


def test_parameters_inside_a_module_with_products_of_its_own_count():
    """What an attention gets wrong shows in the gradients of what is in it."""
    model = nn.Sequential(Attention())
    looks, ran = looked_at(lambda x: model(x).square().mean(), model, (torch.randn(2, 6, 16),))
    wide, narrow = ran["0"]
    assert len(wide.gradients) == 4  # none of inputs, none of its own; of the two layers in it
    local = looks["0"].locals["e4m3"]
    worst = max(
        relative(torch.cat([a.flatten() for a in one]), torch.cat([b.flatten() for b in two]))
        for one, two in zip(wide.gradients, narrow["e4m3"].gradients, strict=True)
        if one
    )
    assert abs(local.gradient - worst) < 1e-3 * worst


def test_a_module_that_is_called_twice_has_the_worse_of_both():
    layer = nn.Linear(8, 8)
    holder = nn.ModuleDict({"layer": layer})
    quiet, loud = torch.ones(4, 8), torch.randn(4, 8)
    both, _ = looked_at(lambda a, b: (layer(a) + layer(b)).square().mean(), holder, (quiet, loud))
    again, _ = looked_at(lambda a, b: (layer(b) + layer(a)).square().mean(), holder, (quiet, loud))
    one, two = both["layer"].locals["e4m3"].score, again["layer"].locals["e4m3"].score
    assert abs(one - two) <= 1e-6 * one


def test_what_has_no_gradient_is_passed_over():
    frozen, model = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
    holder = nn.ModuleDict({"frozen": frozen, "model": model})
    looks, _ = looked_at(lambda x: model(F.relu(frozen(x))).mean(), holder, (torch.randn(3, 4),))
    assert looks["frozen"].locals == {}
    assert set(looks["model"].locals) == {"e4m3", "bf16"}


# The graph


def test_logits_are_found_through_temperature_mask_shape_and_difference():
    x = torch.randn(4, 3, requires_grad=True)
    one, two, other = x @ torch.randn(3, 5), x @ torch.randn(3, 5), x @ torch.randn(3, 5)
    logits = ((one - two) / 0.1).masked_fill(torch.eye(4, 5, dtype=torch.bool), -9.0).unsqueeze(0).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)) + F.layer_norm(other, (5,)).square().sum()
    found = set(before_softmax(loss))
    assert {one.grad_fn, two.grad_fn} <= found
    assert other.grad_fn not in found


def test_what_is_not_linear_on_the_way_is_no_logit():
    x = torch.randn(4, 3, requires_grad=True)
    hidden = x @ torch.randn(3, 5)
    loss = torch.relu(hidden).softmax(-1).square().sum()
    assert hidden.grad_fn not in set(before_softmax(loss))


def test_a_checkpoint_of_the_old_kind_hides_its_parameters():
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    assert has_hidden_parts(checkpoint(model, x, use_reentrant=True).sum())
    assert not has_hidden_parts(checkpoint(model, x, use_reentrant=False).sum())
