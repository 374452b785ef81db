"""A kept function computes as if autocast were not there, from its first operation on."""

import inspect

import pytest
import torch
from torch import nn

import ampwise
from ampwise import BadInput
from ampwise.errors import UnknownName

from ...for_each import for_each

BF16 = torch.bfloat16


def scores(x, *, weight):
    """A matmul, and something that 16 bits show in."""
    return torch.logsumexp(x @ weight, -1)


kept = ampwise.keep("fp32")(scores)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 16)


@pytest.fixture
def weight():
    torch.manual_seed(1)
    return torch.randn(16, 4)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_it_is_the_function_in_fp32_on_the_upcast_inputs(x, weight, dtype):
    x = x.to(dtype)
    with torch.autocast("cpu", BF16):
        got, plain = kept(x, weight=weight), scores(x, weight=weight)
    assert torch.equal(got, scores(x.float(), weight=weight))
    assert not torch.equal(got, plain)  # or there would be nothing to keep


def test_without_autocast_inputs_are_cast_too(x, weight):
    got = kept(x.to(BF16), weight=weight.to(BF16))
    assert torch.equal(got, scores(x.to(BF16).float(), weight=weight.to(BF16).float()))


def test_autocast_is_as_before_afterwards(x, weight):
    with torch.autocast("cpu", BF16):
        kept(x, weight=weight)
        assert (x @ weight).dtype is BF16


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", BF16)])
@pytest.mark.parametrize("around", [False, True])
def test_a_16_bit_type_is_on_inside(x, weight, name, dtype, around):
    with torch.autocast("cpu", BF16, enabled=around):
        assert ampwise.keep(name)(torch.matmul)(x, weight).dtype is dtype


def test_without_tensors_among_the_arguments():
    @ampwise.keep("fp32")
    def square(size):
        return torch.ones(size, size) @ torch.ones(size, size)

    with torch.autocast("cpu", BF16):
        assert square(2).dtype is torch.float32
    assert ampwise.keep("bf16")(square.__wrapped__)(2).dtype is BF16


def test_gradients_come_back_in_the_type_of_the_inputs(x, weight):
    low = x.to(BF16).requires_grad_()
    with torch.autocast("cpu", BF16):
        loss = kept(low, weight=weight).sum()
    loss.backward()  # inside, autocast would reach into it
    high = low.detach().float().requires_grad_()
    scores(high, weight=weight).sum().backward()
    assert low.grad.dtype is BF16
    assert torch.equal(low.grad, high.grad.to(BF16))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    @ampwise.keep("fp32")
    def forward(self, x, extra=None):
        """What it does."""
        return self.linear(x) if extra is None else self.linear(x) + extra["bias"][0]


@pytest.mark.nightly
@pytest.mark.parametrize("extra", [None, {"bias": [torch.ones(4, dtype=BF16)]}])
def test_compile_traces_it_whole(x, extra):
    head = Head()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    low = x.to(BF16).requires_grad_()
    with torch.autocast("cpu", BF16):
        out = compiled(low, extra=extra)
        assert torch.equal(out, head(low, extra=extra))
    assert out.dtype is torch.float32
    out.sum().backward()
    assert low.grad.dtype is BF16


def test_compile_traces_a_function_of_no_tensors():
    @ampwise.keep("fp32")
    def square(size):
        return torch.ones(size, size) @ torch.ones(size, size)

    with torch.autocast("cpu", BF16):
        assert torch.compile(square, fullgraph=True, backend="aot_eager")(2).dtype is torch.float32


def test_it_looks_like_the_function():
    assert Head.forward.__doc__ == "What it does."
    assert list(inspect.signature(Head.forward).parameters) == ["self", "x", "extra"]


async def later():
    pass


def one_by_one():
    yield


async def both():
    yield


@for_each(
    ("refused", "text"),
    [
        (Head, "keep('fp32') of Head: expected a function, not a class or module."),
        (nn.Identity(), "keep('fp32') of Identity: expected a function, not a class or module."),
        (later, "of later: a coroutine or generator runs after its call has returned"),
        (one_by_one, "of one_by_one: a coroutine or generator runs after its call has returned"),
        (both, "of both: a coroutine or generator runs after its call has returned"),
        (staticmethod(scores), "of scores: put @ampwise.keep below @staticmethod"),
        (3, "keep('fp32') of int: expected a function."),
    ],
)
def test_what_is_no_plain_function_is_refused(refused, text):
    with pytest.raises(BadInput) as error:
        ampwise.keep("fp32")(refused)
    assert text in str(error.value)


@for_each(
    ("precision", "text"),
    [
        ("tf32", "keep('tf32'): TF32 is switched for a whole device, not for a part of a model. Use 'fp32' or"),
        (32, "keep(32): expected the name of a precision: 'fp32' or 'fp16' or 'bf16'."),
        (scores, 'keep() needs a precision: write @ampwise.keep("fp32").'),
    ],
)
def test_a_precision_it_cannot_have(precision, text):
    with pytest.raises(BadInput) as error:
        ampwise.keep(precision)
    assert text in str(error.value)


def test_an_unknown_precision():
    with pytest.raises(UnknownName, match=r"unknown precision 'fp61'. Did you mean fp16"):
        ampwise.keep("fp61")
