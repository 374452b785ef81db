"""``keep("fp32-out", …)`` and ``keep_op``: by FP64 as the oracle, compiled, copied, and taken off again."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput, Policy
from ampwise.errors import UnknownName


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.router = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.router(hidden), hidden.cumsum(-1), F.softmax(hidden, -1), hidden @ hidden.transpose(-1, -2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Block()


KEPT = [torch.float32, torch.float32, torch.bfloat16, torch.float32]  # by BOTH
X = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
BOTH = Policy("bf16").keep("fp32-out", "*outer").keep_op("fp32", "cumsum", "matmul")


def under(dtype):
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_out_takes_16_bits_and_rounds_nothing_more(model, dtype):
    """Its output is that of the rounded operands in FP64, where autocast's is rounded to 16 bits."""
    taken = []
    model.router.register_forward_pre_hook(lambda _, args: taken.append(args[0].detach()))
    with under(dtype), Policy("bf16").keep("fp32-out", "router").apply(model):
        scores = model(X)[0]
    with under(dtype):
        rounded = model(X)[0]
    assert (taken[0].dtype, scores.dtype, rounded.dtype) == (dtype, torch.float32, dtype)
    weight, bias = (each.detach().double() for each in (model.router.weight.to(dtype), model.router.bias))
    exact = taken[0].double() @ weight.t() + bias
    assert (scores - exact).abs().max() < 1e-6
    assert (rounded - exact).abs().max() > 1e-4


def test_gradients_of_fp32_out_are_those_of_autocast(model):
    def gradients(policy):
        model.zero_grad()
        with under(torch.bfloat16), policy.apply(model):
            scores = model(X)[0]
        scores.float().backward(torch.ones(scores.shape))
        return [each.grad.clone() for each in model.parameters()]

    plain, kept = gradients(Policy("bf16")), gradients(Policy("bf16").keep("fp32-out", "router"))
    for one, other in zip(plain, kept, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def test_fp32_out_without_16_bits_is_the_layer_itself(model):
    before = model(X)[0]
    with Policy("bf16").keep("fp32-out", "router").apply(model):
        assert torch.equal(model(X)[0], before)
        half = copy.deepcopy(model).bfloat16()
        assert half(X.bfloat16())[0].dtype == torch.float32


def test_operations_run_in_their_precision_however_they_are_called(model):
    """A function of torch.nn.functional, and an operator; autocast on a CPU runs both in 16 bits."""
    with under(torch.bfloat16):
        assert [each.dtype for each in model(X)] == [torch.bfloat16] * 4
        with Policy("bf16").keep_op("fp32", "matmul").keep_op("fp32", "softmax").apply(model):
            scores, sums, soft, product = model(X)
        hidden = torch.tanh(model.body(X))
    assert [each.dtype for each in (scores, sums)] == [torch.bfloat16] * 2
    assert (soft - hidden.double().softmax(-1)).abs().max() < 1e-6
    assert (product - hidden.double() @ hidden.double().transpose(-1, -2)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same_and_one_graph(model):
    with under(torch.bfloat16), BOTH.apply(model):
        eager = model(X)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    assert [each.dtype for each in eager] == KEPT
    assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True))


def test_copies_and_checkpoints_have_it_and_removing_leaves_nothing(model):
    assert Policy.from_dict(BOTH.as_dict()) == BOTH
    assert eval(repr(BOTH)) == BOTH
    assert "operations" not in Policy("bf16").as_dict(), "as before"
    applied = BOTH.apply(model)
    BOTH.apply(model)  # again: changes nothing
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with under(torch.bfloat16):
            assert [each.dtype for each in other(X)] == KEPT
    with pytest.raises(BadInput, match="another policy is applied"):
        Policy("bf16").keep("fp32", "body").apply(model)
    applied.remove()
    assert not any("forward" in each.__dict__ for each in model.modules())
    # A container that is never called: its modules are kept, and so are their operations.
    several = nn.ModuleList([model])
    with Policy("bf16").keep("fp32", "0").keep_op("bf16", "matmul").apply(several):
        assert [each.dtype for each in model(X)][::3] == [torch.float32, torch.bfloat16]
    assert not any("forward" in each.__dict__ for each in model.modules())


def test_an_engine_trains_with_both(model):
    engine = ampwise.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), BOTH, clip_norm=1.0)
    seen = []

    def loss_fn(x):
        scores, *_, product = model(x)
        seen.append((scores.dtype, product.dtype))
        return F.cross_entropy(scores.reshape(-1, 8), torch.zeros(12, dtype=torch.long)) + product.mean()

    losses = [engine.step(loss_fn, X).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert set(seen) == {(torch.float32, torch.float32)}
    assert BOTH.describe(model).endswith("\noperations: cumsum in fp32, matmul in fp32")
    assert "fp32-out  kept by '*outer'" in BOTH.describe(model)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: BOTH.keep_op("fp32", "sofmax"), UnknownName, "unknown operation 'sofmax'. Did you mean softmax"),
        (lambda: BOTH.keep_op("fp32"), BadInput, "expected names of operations: keep_op('fp32', \"softmax\")."),
        (lambda: BOTH.keep_op("fp32-out", "softmax"), UnknownName, "Policy.keep_op('fp32-out') takes 'fp32' or 'fp16'"),
        (lambda: ampwise.keep("fp32-out"), UnknownName, "keep('fp32-out') takes 'fp32' or 'fp16' or 'bf16'."),
        (lambda: Policy().keep("fp32-out", "1").apply(nn.Sequential(nn.Tanh(), nn.Tanh())), BadInput, "no nn.Linear"),
        (lambda: Policy("bf16", operations=("softmax",)), BadInput, "add rules with keep_op(precision, name)."),
    ],
)
def test_mistakes(wrong, error, text):
    with pytest.raises(error) as raised:
        wrong()
    assert text in str(raised.value)
