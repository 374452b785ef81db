"""A loss whose backward is plain and that carries the scale all the same, or may."""

import textwrap

import pytest

from ampwise.check.source.scaled_losses import may_be_scaled

from .reading import code_of

REST = """
def helped(loss, scaler):
    return scaler.scale(loss)

def halved(loss):
    return loss / 2
"""


def is_in_doubt(body):
    text = f"def main(model, opt, scaler, xs, y):\n{textwrap.indent(body, '    ')}\n    scaler.step(opt)\n{REST}"
    (backward,) = (event for event in code_of(text).events if event.kind == "backward")
    return may_be_scaled(backward)


@pytest.mark.parametrize(
    "body",
    [
        "loss = model(xs)\nloss.backward()",
        "model(xs).sum().backward()",
        "loss = halved(model(xs))\nloss.backward()",
        "loss = model(xs)\nscaler.scale(loss)\nloss.backward()",
        "total = 0\nfor x in xs:\n    total += model(x)\ntotal.backward()",
        "loss = model(xs)\nloss.backward(retain_graph=True)",
        "losses = []\nfor x in xs:\n    losses.append(model(x))\nsum(losses).backward()",
    ],
)
def test_a_loss_that_never_meets_a_scale(body):
    assert not is_in_doubt(body)


@pytest.mark.parametrize(
    "body",
    [
        "loss = model(xs) * scaler.get_scale()\nloss.backward()",
        "loss = helped(model(xs), scaler)\nloss.backward()",
        "total = 0\nfor x in xs:\n    total += scaler.scale(model(x))\ntotal.backward()",
        "losses = []\nfor x in xs:\n    losses.append(scaler.scale(model(x)))\nsum(losses).backward()",
        "first = scaler.scale(model(xs))\nsecond = first + y\nthird = second * 2\n(third + 1).backward()",
        "loss = model(xs)\nloss.backward(scaler.scale(y))",
        "loss = model(xs)\nloss.backward(gradient=scaler.scale(y))",
        "a, b = scaler.scale([model(xs), y])\nb.backward()",
        "scaled_loss.backward()",
    ],
)
def test_a_loss_that_may(body):
    assert is_in_doubt(body)


def test_a_loss_from_a_caller_out_of_sight_may():
    text = "def main(loss, opt, scaler):\n    loss.backward()\n    scaler.step(opt)\n"
    assert may_be_scaled(code_of(text).events[0])
