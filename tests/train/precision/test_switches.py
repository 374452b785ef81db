"""TF32 for a while: what holds inside, and that a program cannot tell afterwards that it was inside.

The switches are global, and some of their states cannot be reached again once left. So each program is run in
a fork of one process in which torch is as it was imported; it is a list of statements, and ends with a look.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from ampwise.train.precision.contexts import HAS_NEW_NAMES, tf32_setting

RUNNER = """
import gc, json, os, sys, warnings
import torch
from ampwise.train.precision.contexts import tf32_setting

NAMES = [
    "torch.get_float32_matmul_precision()",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.mkldnn.fp32_precision",
]

def look():
    seen = {}
    for name in NAMES:
        try:
            seen[name] = eval(name)
        except Exception as error:
            seen[name] = type(error).__name__
    return seen

warnings.simplefilter("error")
gc.freeze()  # the forks leave the pages of torch's objects alone
for line in sys.stdin:
    reading, writing = os.pipe()
    if os.fork() == 0:
        looks = []
        try:
            exec("\\n".join(json.loads(line)))
            said = json.dumps([*looks, look()])
        except BaseException as error:
            said = json.dumps(repr(error))
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""

OLD = [
    "",
    "torch.set_float32_matmul_precision('highest')",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.allow_tf32 = True",
]
AGREEING = [  # with the old names, which can be read
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.set_float32_matmul_precision('medium'); torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
]
ABOVE = [
    "torch.backends.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'bf16'",
    "torch.backends.cudnn.fp32_precision = 'ieee'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cudnn.fp32_precision = 'tf32'",
]
NEW = [
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.conv.fp32_precision = 'none'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
]
MIXED = [
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.set_float32_matmul_precision('medium'); torch.backends.fp32_precision = 'ieee'",
]
READABLE = [*OLD, *AGREEING] if HAS_NEW_NAMES else OLD
SETTINGS = [*READABLE, *ABOVE, *NEW, *MIXED] if HAS_NEW_NAMES else OLD
LATER = [OLD[3], OLD[5], ABOVE[0], ABOVE[4], NEW[0], NEW[1]] if HAS_NEW_NAMES else OLD[1:]


def block(tf32, body="pass"):
    return f"with tf32_setting({tf32}): {body}"


@pytest.fixture(scope="module")
def run(warm):
    """Runs a program; what its ``looks`` have seen, and a look at the end."""
    if sys.platform == "win32":
        pytest.skip("no fork here")

    def run(*program):
        looks = json.loads(ask(json.dumps(program)))
        assert isinstance(looks, list), f"{program}: {looks}"
        return looks

    with Path(os.devnull).open("w") as said, warm.asked_by_lines("-c", RUNNER, said=said) as ask:
        yield run


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tf32", [True, False])
def test_inside_it_is_as_wanted_and_afterwards_as_it_was(run, setting, tf32):
    before, inside, after = run(setting, "looks += [look()]", block(tf32, "looks += [look()]"))
    assert after == before
    if HAS_NEW_NAMES:
        operations = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
        assert {inside[f"torch.backends.{name}.fp32_precision"] == "tf32" for name in operations} == {tf32}


@pytest.mark.half_by_day
@pytest.mark.parametrize("setting", READABLE)
@pytest.mark.parametrize("tf32", [True, False])
def test_inside_the_old_names_can_be_read(run, setting, tf32):
    """A model may do so, and torch.backends.cudnn.flags() does."""
    inside, _ = run(setting, block(tf32, "looks += [look()]"))
    assert inside["torch.backends.cuda.matmul.allow_tf32"] is tf32
    assert inside["torch.backends.cudnn.allow_tf32"] is tf32
    assert (inside["torch.get_float32_matmul_precision()"] != "highest") is tf32
    run(setting, block(tf32, "\n with torch.backends.cudnn.flags(enabled=False, allow_tf32=False): pass"))


@pytest.mark.few_by_day(6)
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_set_afterwards_does_what_it_would_have_done(run, setting, later):
    assert run(setting, block(True), later) == run(setting, later)
    # torch cannot be told to go back to cuDNN's default, which a name above it can change; only to what it was.
    as_it_was = "torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32" if setting in READABLE else ""
    assert run(setting, block(False), later) == run(setting, as_it_was, later)


@pytest.mark.parametrize("setting", SETTINGS)
def test_nested(run, setting):
    before, outer, inner, outer_again, after = run(
        setting,
        "looks += [look()]",
        "with tf32_setting(True) as _:",
        "  looks += [look()]",
        "  with tf32_setting(False): looks += [look()]",
        "  looks += [look()]",
    )
    assert (after, outer_again) == (before, outer)
    assert inner != outer


def test_one_can_be_entered_again_and_within_itself(run):
    *inside, _ = run(
        "exact = tf32_setting(False)",
        "for _ in range(2):",
        "  with exact:",
        "    with exact: pass",
        "    looks += [look()]",
    )
    assert [seen["torch.backends.cudnn.allow_tf32"] for seen in inside] == [False, False]


def test_an_exception_puts_it_back(run):
    before, after = run(
        "looks += [look()]", "try:", " with tf32_setting(True): 1 / 0", "except ZeroDivisionError: pass"
    )
    assert after == before


def test_none_leaves_everything_alone(run):
    before, inside, after = run("looks += [look()]", block(None, "looks += [look()]"))
    assert before == inside == after


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [True, False])
def test_the_switch_reaches_the_products(tf32):
    """A sum of 1 + 2^-12 is 1 in TF32, which keeps ten bits."""
    if torch.cuda.get_device_capability() < (8, 0) or torch.version.hip:
        pytest.skip("no TF32 here")
    ones = torch.full((256, 256), 1 + 2.0**-12, device="cuda")
    with tf32_setting(tf32):
        product = ones @ torch.eye(256, device="cuda")
        convolved = torch.conv2d(ones.view(1, 256, 16, 16), torch.eye(256, device="cuda").view(256, 256, 1, 1))
    assert torch.equal(product, ones) is not tf32
    assert tf32 or torch.equal(convolved.view(256, 256), ones)
