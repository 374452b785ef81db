"""The search from end to end: planted modules found, the best found where all can be tried, and what is refused."""

import gc
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.tune.search.arrangement import arrange_formats, parse_formats
from ampwise.tune.search.build_result import unit_costs
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference, ParameterGroups
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.search import search
from ampwise.tune.search.units import find_units

from ...for_each import for_each
from .models import deep, net

CPU = torch.device("cpu")


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize(
    ("formats", "tolerance", "planted"),
    [(("e4m3", "bf16", "fp32"), 0.05, [31]), (("bf16", "fp32"), 1e-3, [4, 40]), (("bf16", "fp32"), 1e-3, [9, 20, 37])],
    ids=["one", "two", "three"],
)
def test_ill_conditioned_layers_among_48_are_found_in_few_trials(formats, tolerance, planted):
    model, function, batches = deep(48, planted, batches=1)
    found = search(function, batches, tolerance=tolerance, formats=formats, model=model)
    raised = {name for name, fmt in found.modules.items() if fmt != formats[0]}
    assert raised == {f"layers.{place}" for place in planted}
    assert found.trials <= 4 * math.log2(48) * len(planted)
    assert found.error <= tolerance
    assert found.gap == 0.0  # each was shown to need it
    for each in found.ranking[: len(planted)]:
        assert each.alone > tolerance
        assert "its sums cancel" in each.reasons[0]


def all_errors(function, model, batches, formats):
    """Every assignment there is, and its error and cost."""
    choices, passes = parse_formats(formats), PassRunner(function, model, CPU)
    given = [SearchBatch(batch, {}) for batch in batches]
    units = find_units(model, lambda: passes.forward(given[0]))
    costs = unit_costs(units, choices)
    reference = Fp32Reference(ParameterGroups(model, passes.parameters), map(passes.outcome, given), len(given))
    found = {}
    for places in itertools.product(range(len(choices)), repeat=len(units)):
        tally = ErrorTally(reference)
        for batch in given:
            tally.add(passes.outcome(batch, arrange_formats(units, [choices[place] for place in places], CPU)))
        cost = sum(each[place] for each, place in zip(costs, places, strict=True))
        found[tuple(choices[place].name for place in places)] = (tally.difference.error, cost)
    return units, found


@pytest.mark.nightly
def test_where_all_can_be_tried_it_finds_the_best_or_says_how_far_off_it_can_be():
    model, function, batches = deep(4, cancelling=[2], batches=1)
    formats = ("e4m3", "bf16", "fp32")
    units, every = all_errors(function, model, batches, formats)
    assert len(every) == 81
    hits = 0
    errors = sorted(error for error, _ in every.values() if error)
    for tolerance in (1e-4, 2e-3, 0.02, errors[40], 0.5):
        found = search(function, batches, tolerance=tolerance, model=model, formats=formats)
        own = tuple(found.modules[unit.name] for unit in units)
        error, cost = every[own]
        assert error == pytest.approx(found.error, rel=1e-5)
        best = min(cost for error, cost in every.values() if error <= tolerance)
        assert best <= cost <= best / (1 - found.gap) + 1e-9
        hits += cost == pytest.approx(best)
    assert hits >= 4


def test_all_narrow_takes_one_trial():
    model, batches = net()
    found = search(model, batches, tolerance=0.9)
    assert set(found.modules.values()) == {"e4m3"}
    assert (found.trials, found.gap) == (2, 0.0)  # and one on the batch held back
    assert found.verified.passed
    assert all(each.narrower is None and not each.reasons for each in found.ranking)


def test_where_nothing_passes_all_stays_in_fp32():
    model, batches = net()
    found = search(model, batches, tolerance=1e-7)
    assert not found.narrower
    assert set(found.modules.values()) == {"fp32"}
    assert found.policy.base == "fp32"
    assert "at a tolerance of 1e-07 only FP32 everywhere passes" in str(found)


def test_tied_weights_and_an_attention_are_searched_too():
    model, batches = net()
    found = search(model, batches, tolerance=0.004)
    assert set(found.modules) == {"attention.qkv", "attention", "attention.out", "body.0", "body.2", ""}
    assert found.narrower
    assert found.error <= 0.004
    assert found.verified.error_after is None or found.verified.error_after <= 0.004


def test_only_some_modules_are_searched_and_the_others_stay():
    model, batches = net()
    found = search(model, batches, tolerance=0.5, modules=["body*"])
    assert {name for name, fmt in found.modules.items() if fmt == "e4m3"} == {"body.0", "body.2"}
    assert found.widened == ("body.0", "body.2")
    assert "4 modules were not searched, and stay in FP32" in found.notes


def test_the_model_may_be_what_the_function_calls_is_a_method_of_or_is_reported():
    model = nn.Linear(4, 1)
    batches = [(torch.randn(8, 4),), (torch.randn(8, 4),)]
    by_call = search(lambda x: model(x).square().mean(), batches, tolerance=0.9)
    told = search(lambda x: (x @ model.weight.T).square().mean(), batches, model=model, tolerance=0.9)
    assert by_call.modules == {"": "e4m3"}
    assert told.modules == {"": "bf16"}  # its product is in no module, and cannot be emulated
    assert "matmuls outside of any module are not emulated, and have at least 16 bits" in told.notes


def test_batches_are_tuples_dicts_or_tensors():
    model = nn.Sequential(nn.Linear(4, 1))
    function = lambda x: model(x).square().mean()  # noqa: E731
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for batches in ([(x,), (y,)], [{"x": x}, {"x": y}], [x, y], iter([[x], [y]])):
        assert search(function, batches).batches == 2


@pytest.mark.parametrize("share", [1.0, 0.01], ids=["as large", "too small to be seen among the others"])
def test_what_fails_on_the_batches_held_back_is_raised(share):
    """The first batches are easy for the first layer; the last one has an outlier that makes the rest too small."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight[:, 0] = 0
    easy = [(torch.randn(64, 32), torch.randn(64, 4), torch.ones(())) for _ in range(3)]
    hard = torch.randn(64, 32), torch.randn(64, 4), torch.tensor(share)
    hard[0][:, 0] = 1e6
    found = search(lambda x, y, share: share * F.mse_loss(model(x), y), [*easy, hard], tolerance=0.02)
    assert not found.verified.passed
    assert found.verified.error > 0.02 >= found.verified.error_after
    assert (found.verified.raised, found.verified.worst) == (("0",), "0")
    assert found.error <= 0.02
    assert found.modules["0"] == "bf16"
    assert f"On 1 held-back batch the error was {found.verified.error:.2g} (largest in the gradient of 0)" in str(found)
    first = found.ranking[0]
    assert (first.name, first.alone > 0.02) == ("0", True)  # measured where it failed, and so are the reasons
    assert "of its inputs are so small relative to the largest (1e+06)" in first.reasons[0]


def test_the_number_of_trials_can_be_limited():
    model, function, batches = deep(12, cancelling=[2, 5, 8], batches=1)
    found = search(function, batches, tolerance=0.03, model=model, trials=3)
    assert found.error <= 0.03
    assert any("reached its limit of trials" in note for note in found.notes)
    assert (found.trials, found.spent) == (3, True)


def test_where_the_trials_are_not_enough_it_does_not_say_that_nothing_passes():
    model, function, batches = deep(4, cancelling=[2], batches=1)
    found = search(function, batches, tolerance=1e-3, model=model, trials=1)
    assert not found.narrower
    assert "nothing narrower than FP32 was found within the limit of 1 trial" in str(found)


def test_batches_that_are_the_same_are_one():
    model, batches = net(1)
    found = search(model, [*batches, *batches], tolerance=0.9)
    assert (found.batches, found.verified) == (1, None)
    assert "there was only one batch, so nothing was held back for verification" in found.notes


def test_fp16_has_a_loss_scale():
    """Without one, gradients of 1e-9 vanish."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), torch.randn(16, 8)
    found = search(lambda x: 1e-6 * model(x).float().square().mean(), [x], formats=("fp16", "fp32"), tolerance=1e-3)
    assert set(found.modules.values()) == {"fp16"}


def test_what_does_not_run_in_a_format_does_not_pass():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 1))

        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                raise TypeError("expected Float, not BFloat16")
            return x @ self.weight

    model = nn.Sequential(nn.Linear(4, 4), Picky())
    found = search(lambda x: model(x).square().mean(), [torch.randn(8, 4)], tolerance=0.9)
    assert found.modules == {"0": "e4m3", "1": "fp32"}
    assert found.ranking[0].reasons == ("it does not run in bf16: one of its operations lacks that dtype",)
    assert "Some trials did not run, and count as failed: TypeError: expected Float, not BFloat16" in str(found)


def gathering(model):
    """The nodes that add up gradients: one for each parameter, as long as a graph is there that has it."""
    return [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]


def test_nothing_of_its_graphs_outlives_it():
    """A graph that does keeps its memory, and its nodes, which belong to the stream they were made on: no CUDA graph of
    the model can be captured then."""
    model, function, batches = deep(3, cancelling=[1], batches=2)

    def marked(x):
        loss = function(x)
        for node in gathering(model):
            node.metadata["of a search"] = True
        return loss

    gc.disable()
    try:
        assert search(marked, batches, tolerance=0.05, model=model).trials > 2
        assert [node.metadata for node in gathering(model)] == [{}, {}, {}]
    finally:
        gc.enable()


@pytest.mark.usefixtures("onednn")
def test_a_recurrent_layer_has_16_bits_at_least_or_stays_wide_and_is_not_blamed_on_others():
    lstm, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleDict({"lstm": lstm, "head": head})
    batches = [torch.randn(4, 5, 8) for _ in range(2)]
    found = search(lambda x: head(lstm(x)[0]).square().mean(), batches, model=model, tolerance=0.05)
    assert found.modules["head"] == "e4m3"
    assert found.modules["lstm"] in ("bf16", "fp32")  # many CPUs have no LSTM in BF16
    assert "recurrent layers are not emulated, and have at least 16 bits: lstm" in found.notes


def test_a_module_that_cannot_be_run_by_itself_is_searched_all_the_same():
    class Needy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.from_outside.pop()

    model = nn.Sequential(Needy(4, 4), nn.Linear(4, 1))

    def function(x):
        model[0].from_outside = [x]
        return model(x).square().mean()

    found = search(function, [torch.randn(8, 4)], model=model, tolerance=0.9)
    assert set(found.modules.values()) == {"e4m3"}
    assert [each.estimates == {} for each in found.ranking] == [False, True]


def test_batches_of_what_is_no_tensor_are_not_the_same():
    class Graph:
        def __init__(self, seed):
            self.values = torch.full((4, 4), float(seed))

    model, x = nn.Linear(4, 1), torch.ones(4, 4)
    batches = [(Graph(seed), x) for seed in range(4)]
    assert search(lambda g, x: model(g.values + x).square().mean(), batches).batches == 4
    assert search(lambda g, x: model(g.values + x).square().mean(), [*batches, batches[0]], model=model).batches == 4


def test_more_batches_than_are_read():
    model = nn.Linear(4, 1)
    found = search(lambda x: model(x).square().mean(), (torch.randn(2, 4) for _ in range(40)), tolerance=0.9)
    assert (found.batches, found.verified.batches) == (16, 4)
    assert "only the first 16 batches were read" in found.notes


# What is refused


def test_a_function_that_is_not_repeatable():
    model, calls = nn.Linear(4, 1), itertools.count()
    with pytest.raises(BadInput, match=r"not repeatable: run twice in FP32 .* its loss is .* and then"):
        search(lambda x: model(x).square().mean() * (1 + next(calls) % 2), [torch.randn(4, 4)], model=model)


def test_a_tolerance_below_the_noise_of_fp32():
    """As on a GPU, where sums are made in any order: here the last digits change from call to call."""
    model, calls = nn.Linear(4, 1), itertools.count()
    function = lambda x: model(x).square().mean() * (1 + 1e-5 * (next(calls) % 2))  # noqa: E731
    with pytest.raises(BadInput, match=r"search\(tolerance=1e-07\): two FP32 runs already differ by 1e-05"):
        search(function, [torch.randn(4, 4)], model=model, tolerance=1e-7)
    found = search(function, [torch.randn(4, 4)], model=model, tolerance=0.1)
    assert 5e-6 < found.noise < 2e-5


@for_each(
    ("arguments", "error", "said"),
    [
        ({"batches": []}, BadInput, "expected at least one batch"),
        ({"batches": [(1, 2)]}, BadInput, "a batch has no tensors"),
        (
            {"batches": torch.ones(2, 4)},
            BadInput,
            "expected a list of batches, each a tuple of arguments; got a Tensor",
        ),
        ({"batches": 4}, BadInput, "expected a list of batches, each a tuple of arguments; got an int"),
        ({"fn": 5}, BadInput, "expected the function that computes the loss"),
        ({"tolerance": 0}, BadInput, r"search\(tolerance=0\): expected a number above 0"),
        ({"tolerance": math.nan}, BadInput, "expected a number above 0"),
        ({"tolerance": "2%"}, BadInput, "expected a number above 0"),
        ({"trials": 0}, BadInput, r"search\(trials=0\): expected the number of assignments to try, at least 1"),
        ({"modules": ["decoder.*"]}, UnknownName, r"unknown module 'decoder.\*'"),
        ({"model": "net"}, BadInput, r"search\(model=...\): expected a torch.nn.Module, got a str"),
        ({"gpu": "h2000"}, UnknownName, "unknown device 'h2000'"),
        ({"formats": ("bf16",)}, BadInput, "expected 'fp32'"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, said):
    model = nn.Sequential(nn.Linear(4, 1))
    given = {"fn": lambda x: model(x).sum(), "batches": [torch.randn(2, 4)]} | arguments
    with pytest.raises(error, match=said):
        search(given.pop("fn"), given.pop("batches"), **given)


def test_a_function_that_fails_is_reported_with_where():
    model = nn.Linear(4, 1)
    for options in ({}, {"model": model}):
        with pytest.raises(
            BadInput,
            match=r"search\(\): the function failed in FP32 on the first batch: RuntimeError: .*test_search.py:\d+",
        ):
            search(lambda x: model(x).sum(), [torch.randn(2, 5)], **options)


def test_a_loss_that_is_not_finite_in_fp32():
    model = nn.Linear(4, 1)
    with pytest.raises(BadInput, match="in FP32 the loss or a gradient is not finite"):
        search(lambda x: model(x).sum() / 0.0, [torch.randn(2, 4)])


def test_what_fails_in_fp32_is_reported_before_anything_is_tried_and_on_which_batch():
    model, told = nn.Linear(4, 1), []
    good = [torch.randn(2, 4) for _ in range(3)]
    for bad, said in [
        (torch.randn(2, 5), r"the function failed in FP32 on batches\[3\]: RuntimeError: "),
        (torch.full((2, 4), math.nan), r"not finite on batches\[3\]"),
    ]:
        with pytest.raises(BadInput, match=said):
            search(lambda x: model(x).sum(), [*good, bad], progress=told.append)
    assert {one.doing for one in told} == {"FP32 reference"}


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda loss: loss - loss.detach(), "the loss is 0 in FP32"), (lambda loss: 0 * loss + 1, "all gradients are 0")],
)
def test_nothing_is_relative_to_zero(function, said):
    model = nn.Linear(4, 1)
    with pytest.raises(BadInput, match=f"{said}.* Give batches that are not learned yet"):
        search(lambda x: function(model(x).sum()), [torch.randn(2, 4)])


def test_a_function_that_computes_in_16_bits_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    with pytest.raises(BadInput, match="a matmul in 0 is bfloat16; expected FP32"):
        search(function, [torch.randn(2, 4)])


def test_a_model_that_has_a_policy_on_it():
    from ampwise import Policy

    model = nn.Sequential(nn.Linear(4, 1))
    with (
        Policy("bf16").keep("fp32", "0").apply(model),
        pytest.raises(BadInput, match="a policy is applied to this model"),
    ):
        search(lambda x: model(x).sum(), [torch.randn(2, 4)])
