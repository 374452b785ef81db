"""Compare what modules receive and return with hooks and FP64."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.tune.diff.diff import diff


def by_hand(model, batch, dtype):
    """Outputs of modules and the gradients by them, and of parameters: by hooks that clone."""
    outputs, grads = {}, {}
    handles = []
    for name, module in model.named_modules():

        def hook(module, given, returned, name=name):
            outputs[name] = returned.detach().double().clone()
            returned.register_hook(lambda gradient: grads.__setitem__(name, gradient.double().clone()))

        handles.append(module.register_forward_hook(hook))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(batch).square().mean()
    loss.backward()
    for handle in handles:
        handle.remove()
    parameters = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return outputs, grads, parameters


def relative(a, b):
    return ((b - a).norm() / a.norm()).item()


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))


@pytest.mark.parametrize(("b", "dtype"), [("bf16", torch.bfloat16), ("fp16,scale=1", torch.float16)])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_errors_are_those_of_hooks_and_fp64(b, dtype):
    model, batch = chain(), torch.randn(10, 6)
    outputs, grads, parameters = by_hand(model, batch, None)
    narrow = by_hand(model, batch, dtype)
    result = diff(lambda x: model(x).square().mean(), batch, b=b)
    assert [row.name for row in result.rows] == ["", "0", "1", "2", "3", "4"]
    for row in result.rows:
        assert row.error == pytest.approx(relative(outputs[row.name], narrow[0][row.name]), rel=1e-9)
        assert row.gradient_error == pytest.approx(relative(grads[row.name], narrow[1][row.name]), rel=1e-9)
    assert {row.name for row in result.parameters} == set(parameters)
    for row in result.parameters:
        a, b = parameters[row.name], narrow[2][row.name]
        assert row.compared.error == pytest.approx(relative(a, b), rel=1e-9)
        assert row.compared.measured.largest_error == pytest.approx((b - a).abs().max().item(), rel=1e-12)


def test_against_fp64_it_is_fp32s_own_error():
    model, batch = chain(), torch.randn(10, 6)
    result = diff(lambda x: model(x).square().mean(), batch, a="fp64", b="fp32")
    wide = chain().double()
    reference, single = wide(batch.double()), model(batch)
    assert result.rows[0].error == pytest.approx(relative(reference, single.double()), rel=1e-6)
    assert 0 < result.rows[0].error < 1e-6
    assert result.evidence.a.loss == pytest.approx(reference.square().mean().item(), rel=1e-15)
    assert result.first is None


def test_an_error_that_was_put_there_is_measured_to_the_digit():
    class Off(nn.Module):
        """Adds a quarter of its input to one value, on the second side alone."""

        def forward(self, x):
            extra = torch.zeros_like(x)
            extra[0, 1] = x[0, 1] / 4 if torch.is_autocast_enabled("cpu") else 0.0
            return x + extra

    model = nn.Sequential(nn.Identity(), Off())
    batch = torch.tensor([[3.0, 4.0], [12.0, 0.0]], requires_grad=True)
    row = diff(lambda x: model(x).sum(), batch).rows[2]
    measured = row.outputs[0].measured
    assert (row.kind, row.error) == ("Off", 1 / 13)
    assert (measured.largest_error, measured.largest_at, measured.norm_a) == (1.0, (0, 1), 13.0)
    assert row.gradient_error == 0.0


def test_a_module_that_is_called_twice_has_two_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = self.same = nn.Linear(4, 4)

        def forward(self, x):
            return self.same(self.layer(x))

    result = diff(lambda x: model(x).square().mean(), torch.randn(3, 4)) if (model := Twice()) else None
    assert [row.label for row in result.rows] == ["Twice", "layer (call 1)", "layer (call 2)"]
    assert result.rows[1].error < result.rows[2].error
    assert result.rows[0].error == result.rows[2].error  # the same tensor, handed on
    assert all(row.gradient_error is not None for row in result.rows)
    assert [row.name for row in result.parameters] == ["layer.weight", "layer.bias"]


@dataclass
class Out:
    hidden: torch.Tensor
    count: int


class Parts(nn.Module):
    """Takes and returns tensors in all sorts of containers."""

    def __init__(self):
        super().__init__()
        self.pair, self.named, self.object = Pair(), Named(), Object()

    def forward(self, x):
        first, second = self.pair(x)
        named = self.named(first, factor=second)
        return self.object(named).hidden.sum() + named["rest"][1].sum()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        return x * 2, x.sin()


class Named(nn.Module):
    def forward(self, x, *, factor):
        return {"product": x * factor, "rest": [x.argmax(-1), x.cos()]}


class Object(nn.Module):
    def forward(self, given):
        return Out(given["product"] + 1, 3)


def test_tensors_are_found_in_tuples_dicts_and_objects():
    result = diff(Parts(), torch.randn(3, 4))
    parts = {row.name: [each.part for each in row.outputs] for row in result.rows}
    assert parts == {
        "": [""],
        "pair": ["[0]", "[1]"],
        "pair.inner": [""],
        "named": ["['product']", "['rest'][0]", "['rest'][1]"],
        "object": [".hidden"],
    }
    named = next(row for row in result.rows if row.name == "named")
    assert [each.measured.changed for each in named.outputs] == [None, 0, None]
    assert [each.own is None for each in named.inputs] == []  # both were returned by the module before
    assert len(named.gradients) == 2  # an index has none
    assert result.first is None


def test_what_is_written_to_afterwards_was_kept_as_it_was():
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.head = nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.act(self.norm(x))).square().mean()

    torch.manual_seed(0)
    model, batch = Rectified(), torch.randn(32, 4)
    result = diff(model, batch, b="fp32")
    rows = {row.name: row for row in result.rows}
    assert {name: row.error for name, row in rows.items()} == dict.fromkeys(rows, 0.0)
    assert rows["norm"].outputs[0].measured.zeros_a == 0  # and not what the ReLU has made of it
    assert rows["act"].outputs[0].measured.zeros_a > 0
    assert result.evidence.floor == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.shared = nn.Linear(4, 4)

        def forward(self, x, checkpointed=True):
            for layer in (*self.layers, self.shared, self.shared):
                x = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, batch = Checkpointed(), torch.randn(5, 4, requires_grad=True)
    plain, again = diff(model, batch, checkpointed=False), diff(model, batch)
    labels = ["Checkpointed", "layers.0", "layers.0.0", "layers.0.1", "layers.1", "layers.1.0", "layers.1.1"]
    assert [row.label for row in again.rows] == [*labels, "shared (call 1)", "shared (call 2)"]
    for one, other in zip(plain.rows, again.rows, strict=True):
        assert one.error == other.error
        assert one.gradient_error == pytest.approx(other.gradient_error)


def test_modules_that_only_one_side_calls():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return (self.narrow if torch.is_autocast_enabled("cpu") else self.wide)(x).square().mean()

    result = diff(Routed(), torch.randn(3, 4))
    assert {row.name: row.only for row in result.rows} == {"": "", "wide": "a", "narrow": "b"}
    assert [row.kind for row in result.rows] == ["Routed", "Linear", "Linear"]
    assert {row.name: row.compared.why_not for row in result.parameters if row.compared.why_not} == {
        "wide.weight": "no gradient in b",
        "wide.bias": "no gradient in b",
        "narrow.weight": "no gradient in a",
        "narrow.bias": "no gradient in a",
    }
    assert [finding.rule.name for finding in result.findings] == ["discrete-choice-flips"]


def test_models_that_no_variable_leads_to_are_met():
    registry = {}
    registry["hidden"] = [[[[nn.Linear(4, 1)]]]]

    def find():
        return registry["hidden"][0][0][0][0]

    result = diff(lambda x: find()(x).square().mean(), torch.randn(3, 4))
    assert [(row.name, row.kind) for row in result.rows] == [("", "Linear")]
    assert [row.name for row in result.parameters] == ["weight", "bias"]


def test_a_loss_function_that_is_made_anew_each_time_is_code():
    model = chain()
    result = diff(lambda x: nn.MSELoss()(model(x), x[:, :3]), torch.randn(4, 6))
    assert [row.name for row in result.rows] == ["", "0", "1", "2", "3", "4"]
    assert result.first is None


def test_what_the_user_has_compiled_runs_as_it_was_written():
    model = chain()
    compiled = torch.compile(model, backend="eager")
    result = diff(lambda x: compiled(x).square().mean(), torch.randn(4, 6), b="fp64")
    assert [row.name for row in result.rows] == ["", "0", "1", "2", "3", "4"]
    assert [row.name for row in result.parameters] == [name for name, _ in model.named_parameters()]


def test_without_a_model_leaves_are_compared():
    weight = torch.randn(4, 2, requires_grad=True)
    result = diff(lambda x: (x @ weight).square().mean(), torch.randn(3, 4))
    assert result.rows == ()
    assert [row.name for row in result.parameters] == ["tensor 1"]
    assert 0 < result.parameters[0].compared.error < 0.02
    assert weight.grad is None
    assert "the function's outputs differ by" in result.verdict


def test_a_second_forward_is_not_asked_of_what_takes_derivatives_by_itself():
    model = chain()

    def penalty(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum()

    result = diff(penalty, torch.randn(4, 6))
    assert [row.name for row in result.rows] == ["", "0", "1", "2", "3", "4"]
    assert all(row.compared.measured is not None for row in result.parameters)


def test_only_modules_that_match_are_looked_at():
    model = chain()
    result = diff(lambda x: model(x).square().mean(), torch.randn(4, 6), modules=["2", "[34]"])
    assert [row.name for row in result.rows] == ["2", "3", "4"]
    assert result.rows[0].depth == 0
    assert diff(lambda x: model(x).square().mean(), torch.randn(4, 6), modules="4").rows[0].name == "4"
