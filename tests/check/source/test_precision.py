"""Autocast contexts in their spellings, and the dtypes that expressions may be."""

import ast

import pytest

from ampwise.check.source.precision import argument_of, autocast_of, dtypes_of

from .reading import asked, code_of

HEAD = """
import contextlib
import functools
import torch
from functools import partial
from torch.amp import autocast
from torch.cuda import amp
from contextlib import nullcontext
DTYPE = torch.bfloat16
"""


def question(body, rest="", **others):
    """The node and frame of ``ask(...)`` in a function of ``body``."""
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    text = f"{HEAD}\ndef main(scaler, opt, args, flag, dtype, device):\n{lines}\n    scaler.step(opt)\n{rest}"
    ((context, node),) = asked(code_of(text, **others))
    return node, context.frame


def autocast(body, rest="", **others):
    return autocast_of(*question(body, rest, **others))


@pytest.mark.parametrize(
    ("expression", "device", "dtype", "enabled"),
    [
        ("torch.autocast('cuda')", "cuda", "float16", True),
        ("torch.autocast(device_type='cuda:1')", "cuda", "float16", True),
        ("torch.autocast('cpu')", "cpu", "bfloat16", True),
        ("autocast('cuda', torch.bfloat16)", "cuda", "bfloat16", True),
        ("autocast('cuda', torch.half, False)", "cuda", "float16", False),
        ("autocast('cuda', dtype=torch.bfloat16, enabled=args.amp)", "cuda", "bfloat16", None),
        ("autocast('cuda', dtype=DTYPE)", "cuda", "bfloat16", True),
        ("amp.autocast()", "cuda", "float16", True),
        ("amp.autocast(False)", "cuda", "float16", False),
        ("amp.autocast(flag)", "cuda", "float16", None),
        ("amp.autocast(True, torch.bfloat16)", "cuda", "bfloat16", True),
        ("torch.cpu.amp.autocast()", "cpu", "bfloat16", True),
        ("torch.autocast(device, dtype=torch.float16)", None, "float16", True),
    ],
)
def test_a_constructor_is_read(expression, device, dtype, enabled):
    found = autocast(f"ask({expression})")
    assert (found.device, found.dtypes, found.enabled) == (device, {dtype}, enabled)
    assert found.known
    assert not found.optional


def test_a_dtype_that_is_a_parameter_cannot_be_reported():
    found = autocast("ask(torch.autocast('cuda', dtype=dtype))")
    assert found.dtypes is None
    assert not found.is_surely("float16")
    assert not found.surely_fp16


SAME = {
    "stored": "context = torch.autocast('cuda', dtype=torch.bfloat16)\nask(context)",
    "an alias of the class": "cast = torch.autocast\nask(cast('cuda', dtype=torch.bfloat16))",
    "partial": "cast = partial(torch.autocast, 'cuda', dtype=torch.bfloat16)\nask(cast())",
    "partial by its full name": "cast = functools.partial(autocast, dtype=torch.bfloat16)\nask(cast('cuda'))",
    "partial of the old one": "cast = partial(amp.autocast, dtype=torch.bfloat16)\nask(cast())",
    "a function": "ask(make())",
    "a function with a dtype": "ask(make_with(torch.bfloat16))",
}
MAKERS = """
def make():
    return torch.autocast("cuda", dtype=torch.bfloat16)

def make_with(dtype):
    return torch.autocast("cuda", dtype=dtype)
"""


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_autocast_by_another_way(body):
    found = autocast(body, MAKERS)
    assert (found.device, found.dtypes, found.enabled) == ("cuda", {"bfloat16"}, True)


OPTIONAL = {
    "a choice": "ask(torch.autocast('cuda') if flag else nullcontext())",
    "a choice the other way": "context = nullcontext() if flag else torch.autocast('cuda')\nask(context)",
    "an if": "context = nullcontext()\nif flag:\n    context = torch.autocast('cuda')\nask(context)",
}


@pytest.mark.parametrize("body", OPTIONAL.values(), ids=OPTIONAL)
def test_autocast_that_may_be_nothing_is_optional(body):
    node, frame = question(body)
    found = autocast_of(node, frame)
    assert found.optional
    assert found.dtypes == {"float16"}


def test_partial_or_nothing_is_optional():
    found = autocast("cast = contextlib.suppress\nif flag:\n    cast = partial(torch.autocast, 'cuda')\nask(cast())")
    assert found.optional
    assert found.dtypes == {"float16"}


def test_two_autocasts_are_both():
    found = autocast(
        "ask(torch.autocast('cuda', dtype=torch.bfloat16) if flag else torch.autocast('cuda', enabled=False))"
    )
    assert found.dtypes == {"bfloat16", "float16"}
    assert found.enabled is None
    assert not found.optional


@pytest.mark.parametrize(
    "node", ["nullcontext()", "contextlib.suppress(E)", "torch.no_grad()", "open('f')", "args.lock"]
)
def test_other_contexts_are_no_autocast(node):
    assert autocast(f"ask({node})") is None


def test_by_its_name_alone_it_is_not_known():
    found = autocast("ask(args.amp_context())")
    assert not found.known
    assert found.dtypes is None


def test_an_attribute_of_self():
    text = f"""{HEAD}
class Trainer:
    def __init__(self, flag):
        self.ctx = torch.autocast("cuda", dtype=torch.bfloat16) if flag else nullcontext()

    def train(self, scaler, opt):
        ask(self.ctx)
        scaler.step(opt)
"""
    ((context, node),) = asked(code_of(text))
    found = autocast_of(node, context.frame)
    assert found.dtypes == {"bfloat16"}
    assert found.optional


def test_a_method_that_returns_it():
    text = f"""{HEAD}
class Trainer:
    def cast(self):
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def train(self, scaler, opt):
        ask(self.cast())
        scaler.step(opt)
"""
    ((context, node),) = asked(code_of(text))
    assert autocast_of(node, context.frame).dtypes == {"bfloat16"}


def test_a_function_of_another_given_file():
    text = "from precision import cast\ndef main(scaler, opt):\n    ask(cast())\n    scaler.step(opt)\n"
    helper = "import torch\ndef cast():\n    return torch.autocast('cuda', dtype=torch.bfloat16)\n"
    ((context, node),) = asked(code_of(text, precision=helper))
    assert autocast_of(node, context.frame).dtypes == {"bfloat16"}


@pytest.mark.parametrize(
    ("body", "dtypes"),
    [
        ("ask(torch.float16)", {"float16"}),
        ("ask(torch.half)", {"float16"}),
        ("ask(torch.bfloat16)", {"bfloat16"}),
        ("ask(DTYPE)", {"bfloat16"}),
        ("ask('bf16')", {"bfloat16"}),
        ("ask('float16')", {"float16"}),
        ("ask(torch.bfloat16 if flag else torch.float16)", {"bfloat16", "float16"}),
        ("d = torch.float16\nif flag:\n    d = torch.bfloat16\nask(d)", {"bfloat16", "float16"}),
        ("d = {'a': torch.float16, 'b': torch.float32}[args.d]\nask(d)", {"float16", "float32"}),
        ("ask(dtype)", None),
        ("ask(torch.float16 if flag else dtype)", None),
        ("ask(getattr(torch, args.dtype))", None),
        ("ask(args.dtype)", None),
    ],
)
def test_the_dtypes_of_an_expression(body, dtypes):
    assert dtypes_of(*question(body)) == dtypes


def test_no_expression_has_no_dtypes():
    assert dtypes_of(None, question("ask(1)")[1]) is None


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("f(1, b=2)", "2"),
        ("f(1, 3)", "3"),
        ("f(1)", None),
        ("f(*rest)", None),
        ("f(1, *rest)", None),
        ("f(1, 3, **more)", "3"),
    ],
)
def test_an_argument_by_keyword_or_position(call, found):
    node = argument_of(ast.parse(call, mode="eval").body, "b", 1)
    assert (node and ast.unparse(node)) == found
