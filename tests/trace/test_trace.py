"""``ampwise.trace``: functions that fail in known ways, and what is left behind: nothing."""

import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput


def line_of(marker):
    """The number of the line in this file with the comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# here: {marker}"))


def found(function, *args, **kwargs):
    findings = ampwise.trace(function, *args, **kwargs)
    return [(finding.rule.name, finding.place.line) for finding in findings]


def test_all_finite_gives_nothing():
    model = nn.Linear(4, 1)
    assert ampwise.trace(lambda x: model(x).square().mean(), torch.ones(2, 4)) == []


def test_function_and_room_are_one():
    from ampwise.trace import diagnosis as explaining  # noqa: F401 (which binds the room)

    assert ampwise.trace(lambda x: x.sum(), torch.ones(2)) == []


def test_an_argument_that_is_not_a_function_is_refused():
    with pytest.raises(BadInput, match=r"trace\(\) expects a function .*trace\(loss_fn, x, y\); got Tensor\.$"):
        ampwise.trace(torch.ones(2))


def test_a_step_that_is_bad_with_other_random_numbers_alone():
    weight = torch.full((64,), 0.5, requires_grad=True)

    def sampled(chance):
        return (weight * (1 if torch.rand(()).item() > chance else -1)).log().mean()

    torch.manual_seed(0)  # the next number is 0.4963
    before = torch.get_rng_state()
    (finding,) = ampwise.trace(sampled, 0.45)
    assert finding.message.endswith("all 64 arguments are below 0")
    assert torch.equal(torch.get_rng_state(), before)
    assert ampwise.trace(sampled, -1.0) == []


def test_a_function_without_tensors_or_loss():
    for function, given in (
        (lambda: None, ()),
        (lambda: 3.0, ()),
        (lambda text: text.upper(), ("x",)),
        (lambda x: x.sum().item(), (torch.ones(2),)),
    ):
        with pytest.raises(BadInput, match=r"no operation was seen to fail\. Return the loss tensor"):
            ampwise.trace(function, *given)
    with pytest.raises(BadInput, match="got float; NaN or inf occurred in it"):
        ampwise.trace(lambda x: x.log().sum().item(), torch.zeros(2))

    def without():
        return torch.zeros(3).log().sum()  # here: no arguments

    assert found(without) == [("outside-domain", line_of("no arguments"))]


def test_errors_of_the_function_are_its_own():
    with pytest.raises(ZeroDivisionError):
        ampwise.trace(lambda: 1 / 0)


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden * hidden  # here: square
        return self.second(hidden)


def test_an_overflow_in_half_is_named_with_its_range_and_a_remedy_that_was_tried():
    torch.manual_seed(0)
    model = nn.Sequential(Squares())
    with torch.autocast("cpu", torch.float16):
        (finding,) = ampwise.trace(lambda x: model(x).float().mean(), torch.ones(2, 4) * 1000)
    assert (finding.rule.name, finding.place.line, finding.place.module) == ("half-overflow", line_of("square"), "0")
    traced = finding.evidence["trace"]
    assert traced["op"] == "aten.mul.Tensor"
    assert traced["exact_largest"] > 65504
    assert [trial["finite"] for trial in traced["trials"]][-1]
    assert "gradients finite" in finding.fix


def test_the_line_of_a_derivative_is_the_forward_line():
    weight = torch.tensor([0.0, 4.0], requires_grad=True)

    def loss(x):
        root = (x * weight).sqrt()  # here: root
        return root.sum()

    (finding,) = ampwise.trace(loss, torch.ones(2))
    assert (finding.rule.name, finding.place.line) == ("infinite-derivative", line_of("root"))
    assert "gradients finite" in finding.fix


def test_a_bad_batch_is_named_with_its_samples():
    x = torch.ones(8, 3)
    x[5, 1] = torch.nan
    model = nn.Linear(3, 1)
    (finding,) = ampwise.trace(lambda batch: model(batch["x"]).mean(), {"x": x})
    assert finding.rule.name == "bad-batch"
    assert "batch['x']" in finding.message
    assert finding.evidence["trace"]["source"]["samples"] == [5]


def test_a_function_that_runs_backward_itself():
    weight = torch.tensor([0.0], requires_grad=True)

    def step(x):
        loss = (x * weight).sqrt().sum()  # here: own backward
        loss.backward()
        return loss

    assert found(step, torch.ones(1)) == [("infinite-derivative", line_of("own backward"))]
    assert weight.grad is None


def test_a_function_that_runs_backward_and_returns_nothing():
    weight = torch.tensor([4.0], requires_grad=True)
    assert ampwise.trace(lambda: (weight * 2).sqrt().sum().backward()) == []

    def number():
        loss = (weight * 2).sqrt().sum()
        loss.backward()
        return loss.item()

    assert ampwise.trace(number) == [], "its gradients were looked at"
    assert ampwise.trace(lambda x: None if x.add(1).dim() else 0, torch.ones(1)) == [], "operations were seen"


# What is shown is what was tried

NOTHING = float("-inf")
COUNTS, NUMBERS = torch.tensor([0, 3]), torch.tensor([2.0, 6.0])


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda a, b: a / b, {"a": NUMBERS, "b": 0}),
        (lambda a, b: a / b, {"a": NUMBERS, "b": 0.0}),
        (lambda a, b: a / b, {"a": NUMBERS, "b": COUNTS}),
        (lambda a, b: a / b, {"a": NUMBERS, "b": torch.tensor([0.0, 3.0])}),
        (lambda a, b: a / b, {"a": NUMBERS, "b": torch.tensor([0.0, -3.0])}),
        (lambda a, b: a / b, {"a": NUMBERS.half() / 1e4, "b": torch.tensor([0.0, -3.0]).half()}),
        (lambda a, b: a / b, {"a": 1, "b": torch.tensor([0.0, -3.0])}),
        (lambda a, b: a % b, {"a": NUMBERS, "b": torch.tensor([0.0, 3.5])}),
        (lambda x, exponent: x**exponent, {"x": torch.tensor([0.0, 2.0]), "exponent": -2}),
        (lambda x, exponent: x.pow(exponent), {"x": torch.tensor([-1.0, 2.0]), "exponent": 0.5}),
        (lambda x: x.rsqrt(), {"x": torch.tensor([0.0, 2.0])}),
        (lambda x: x.log(), {"x": torch.tensor([-1.0, 0.0, 2.0])}),
        (lambda x: x.log(), {"x": torch.tensor([-1.0, 0.0, 2.0]).half()}),
        (lambda x: x.acos(), {"x": torch.tensor([1.5, 0.5])}),
        (lambda x: x.log1p(), {"x": torch.tensor([-1.0, 0.5])}),
        (lambda x: torch.logit(x), {"x": torch.tensor([0.0, 1.0])}),
        (lambda x, p: torch.xlogy(x, p), {"x": NUMBERS, "p": torch.tensor([0.0, 1.0])}),
        (lambda x: x.exp(), {"x": torch.tensor([200.0, 1.0])}),
        (lambda x: x.cosh(), {"x": torch.tensor([-200.0, 1.0])}),
        (lambda x: x.exp(), {"x": torch.tensor([20.0, 1.0]).half()}),
        (lambda scores: scores.softmax(-1), {"scores": torch.tensor([[0.0, 1.0], [NOTHING, NOTHING]])}),
        (lambda scores: F.softmax(scores, dim=0), {"scores": torch.tensor([[0.0, NOTHING], [1.0, NOTHING]])}),
        (lambda scores: scores.log_softmax(-1), {"scores": torch.tensor([[0.0, 1.0], [NOTHING, NOTHING]])}),
        (lambda x: x.mean(), {"x": torch.ones(0)}),
        (lambda x: x.mean(0), {"x": torch.ones(0, 3)}),
        (lambda x: x.mean(0, keepdim=True), {"x": torch.ones(0, 3)}),
        (lambda x: x.std(), {"x": torch.ones(1)}),
        (lambda output, target: F.mse_loss(output, target), {"output": torch.ones(0), "target": torch.ones(0)}),
        (
            lambda logits, labels: F.cross_entropy(logits, labels),
            {"logits": torch.ones(2, 3), "labels": torch.tensor([-100, -100])},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:std")
def test_code_that_is_shown_does_what_was_tried(function, given):
    findings = ampwise.trace(lambda **given: function(**given).double().sum(), **given)
    (trial,) = findings[0].evidence["trace"]["trials"]
    scope = {"torch": torch, "F": F, "y": function(**given), **given}
    exec(trial["code"], scope)
    assert trial["finite"]
    assert trial["code"] in "\n".join(line.removeprefix("    ") for line in findings[0].fix.split("\n"))
    assert scope["y"].double().sum().item() == trial["loss_after"]


@pytest.mark.filterwarnings("ignore:std")
def test_what_the_code_cannot_do_to_a_call_is_not_said_to_have_been_tried():
    for function, given in (
        (lambda x: x.std(0, True), torch.ones(1, 3)),
        (lambda x: x.mean((0, 1)), torch.ones(0, 3)),
        (lambda x: (-2.0) ** x, torch.tensor([0.5])),
    ):
        (finding,) = ampwise.trace(lambda x, function=function: function(x).sum(), given)
        assert "Tried" not in finding.fix
        assert "trials" not in finding.evidence["trace"]


@pytest.mark.parametrize(("rate", "said"), [(1e38, "1e+38"), (float("nan"), "NaN")])
def test_an_absurd_learning_rate_is_named(rate, said):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine = ampwise.Engine(model, optimizer, precision="fp32")
    for _ in range(3):
        engine.step(lambda x: model(x).square().mean(), torch.full((2, 2), 1e3))
    assert engine.findings
    finding = next(each for each in engine.findings if each.rule.name == "bad-weights")
    assert f"of SGD with a learning rate of {said}" in finding.message


def test_the_optimizer_of_a_function():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=0.1, foreach=False)

    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.sum()

    before = weight.detach().clone()
    names = [name for name, _ in found(step, torch.full((2,), 1e-4, dtype=torch.float16))]
    assert names == ["optimizer-division"]
    assert torch.equal(weight, before), "the update was taken back"


def test_infinities_that_go_away_are_reported_on_request():
    def normalised(x):
        variance = (x * x).mean()  # here: swallowed
        return (x / variance.sqrt()).sum()

    x = torch.full((4,), 1000.0, dtype=torch.float16)
    assert ampwise.trace(normalised, x) == []
    assert found(normalised, x, swallowed=True) == [("swallowed-infinity", line_of("swallowed"))]


def test_masks_are_not_reported_even_on_request():
    def attention(scores):
        mask = torch.ones(3, 3).triu(1).bool()
        return scores.masked_fill(mask, -torch.inf).softmax(-1).sum()

    assert ampwise.trace(attention, torch.ones(3, 3), swallowed=True) == []


# Nothing is left behind


class Moody(nn.Module):
    """Everything that a forward pass may change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.last = x.mean(0).detach()
        x = x.mul_(2)
        if random.random() < 0.5:
            x = x + torch.rand_like(x)
        return self.dropout(self.norm(self.linear(x)))


def test_buffers_random_numbers_gradients_and_arguments_stay_as_they_were():
    torch.manual_seed(0)
    model, x = Moody(), torch.rand(6, 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given, version = x.clone(), x._version
    torch.manual_seed(3)
    random.seed(3)
    assert ampwise.trace(lambda x: (model(x) - model(x).detach()).sqrt().mean(), x), "roots of negative numbers"
    after = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    assert (torch.rand(1), random.random()) == after
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(bool((parameter.grad == 7).all()) for parameter in model.parameters())
    assert torch.equal(x, given)
    assert x._version >= version


def test_a_graph_of_someone_else_stays_whole():
    x = torch.rand(3, requires_grad=True)
    kept = torch.zeros(3)
    theirs = (x * kept).sum()  # which has saved what the function is going to write to
    ampwise.trace(lambda: kept.add_(1).log().sub(torch.inf).sum())
    theirs.backward()
    assert torch.equal(x.grad, torch.zeros(3))


def test_a_function_that_cannot_be_run_twice_is_explained_without_a_closer_look():
    batches = iter([torch.zeros(3)])

    def consuming():
        x = next(batches)
        return x.log().sum()  # here: consumed

    (finding,) = ampwise.trace(consuming)
    assert finding.place.line == line_of("consumed")
    assert "could not be replayed once more" in finding.evidence["note"]
    assert "StopIteration" in finding.evidence["note"]


def test_grad_mode_and_autocast_are_those_of_the_caller_afterwards():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ampwise.trace(lambda x: x.log().sum(), torch.zeros(2))
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_what_is_compiled_is_replayed_as_written():
    model = Squares()

    def loss(x):
        return (F.relu(model(x)) - 1e9).clamp_max(0).sum().log()  # here: compiled

    compiled = torch.compile(loss, backend="aot_eager")
    compiled(torch.ones(2, 4))
    assert found(compiled, torch.ones(2, 4)) == [("unstable-loss", line_of("compiled"))]


def test_an_autocast_that_is_entered_again_casts_as_before():
    model, seen = nn.Linear(4, 4), []

    @torch.autocast("cpu", dtype=torch.float16)
    def loss_fn(x):
        y = model(x)
        seen.append(y.dtype)
        return (y * 60000).sum()

    (finding,) = ampwise.trace(loss_fn, torch.full((2, 4), 300.0))
    assert any(trial["finite"] for trial in finding.evidence["trace"]["trials"]), "another precision was tried"
    seen.clear()
    loss_fn(torch.ones(2, 4))
    assert seen == [torch.float16]


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)])
def test_an_optimizer_that_has_not_stepped_yet_has_not_afterwards(make):
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    assert ampwise.trace(step, torch.ones(2, 4)) == []
    assert not optimizer.state


def test_results_that_are_finite_are_so_though_their_sum_is_not():
    from ampwise.trace.replay import Replay, ReplaySettings, ReplayStep

    finite_one, bad_one = torch.full((64,), 2000.0, dtype=torch.float16), torch.tensor([1.0, torch.nan])
    for result, finite in ((finite_one, True), (bad_one, False)):
        with Replay(ReplayStep(run=lambda _, result=result: result, device=torch.device("cpu"))) as replay:
            assert replay.plain(ReplaySettings()).finite == finite


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.from_numpy])
def test_a_constant_is_not_taken_for_what_was_in_its_place(make):
    """It gets the memory of an infinity that nobody reads; nobody is told of its making."""
    weight = torch.ones(64, requires_grad=True)
    numbers = numpy.full(64, 3e38, dtype=numpy.float32)

    def loss_fn(x):
        larger = 10 * x
        x / 0
        scale = make(numbers)
        return (larger * scale * weight).sum()  # here: constant

    assert found(loss_fn, torch.ones(64)) == [("overflow", line_of("constant"))]


class Undamped(torch.optim.Optimizer):
    """Divides by the root of a mean of squared gradients, without an eps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.mul_(0.9).addcmul_(weight.grad, weight.grad, value=0.1)
                weight.sub_(group["lr"] * weight.grad / mean.sqrt())  # fails for rows that were not looked up


FAILING_LINE = next(
    number
    for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").split("\n"), 1)
    if line.endswith("# fails for rows that were not looked up")
)


def _embedding_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Embedding(20, 4)
    return model, Undamped(model.parameters())


def test_an_update_that_spoils_the_weights_is_found_by_trace_at_its_line():
    model, optimizer = _embedding_and_optimizer()

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = ampwise.trace(step, torch.arange(8))
    assert [(each.rule.code, each.place.file, each.place.line) for each in found] == [
        ("AMP907", __file__, FAILING_LINE)
    ]
    assert model.weight.isfinite().all()
    assert not optimizer.state
    assert ampwise.trace(step, torch.arange(20)) == []


def test_an_update_that_has_spoiled_the_weights_is_found_by_an_engine_at_its_line():
    model, optimizer = _embedding_and_optimizer()
    engine = ampwise.Engine(model, optimizer, "fp32")
    for _ in range(3):
        engine.step(lambda x: model(x).square().mean(), torch.arange(8))
    assert [each.rule.code for each in engine.findings] == []  # it never looks up the bad rows
    before = model.weight.detach().clone()
    engine.step(lambda x: model(x).square().mean(), torch.arange(20))
    assert [(each.rule.code, each.place.file, each.place.line) for each in engine.findings] == [
        ("AMP907", __file__, FAILING_LINE)
    ]
    assert torch.equal(model.weight.isnan(), before.isnan())


class Codebook(nn.Module):
    """Codes that are means of the inputs nearest to them, refreshed in each pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.arange(6.0).reshape(6, 1) * 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        loss = ((x * self.scale - self.codes[torch.cdist(x, self.codes).argmin(1)]) ** 2).mean()
        loss = loss + self.codes.square().mean()
        with torch.no_grad():
            nearest = nn.functional.one_hot(torch.cdist(x, self.codes).argmin(1), 6).float()
            self.codes.copy_(nearest.T @ x / nearest.sum(0)[:, None])  # here: codes that are not used
        return loss


def test_a_buffer_is_explained_by_the_operation_that_makes_it_bad_again():
    model, x = Codebook(), torch.rand(8, 1)
    model(x)  # its loss is still finite
    assert found(model, x) == [("division-by-zero", line_of("codes that are not used"))]
    model.codes.fill_(torch.nan)
    model.codes[0] = 1.0
    kept = nn.Linear(1, 1)
    assert found(lambda x: kept(x).mean() * model.codes.mean(), x)[0][0] != "division-by-zero"


def test_a_bound_that_rounds_away_is_named():
    logits = torch.full((4,), 20.0, dtype=torch.bfloat16)

    def loss(logits, highest):
        p = logits.sigmoid().clamp(1e-4, highest)  # here: the bound
        return -(1 - p).log().mean()

    (finding,) = ampwise.trace(loss, logits, 1 - 1e-4)
    assert finding.place.line == line_of("the bound")
    assert "0.9999 is 1 in BF16" in finding.message
    assert ampwise.trace(loss, logits, 0.99) == []
