"""What goes into a region: the right tensors cast, everything else the same object."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.train.precision.call_in_precision import REGIONS, autocast_for, call_in_precision, cast_inputs

Pair = namedtuple("Pair", ["a", "b"])
WIDE = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]
NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]

tensors = st.sampled_from([*WIDE, *NARROW]).map(lambda dtype: torch.ones(2).to(dtype))
trees = st.recursive(
    tensors | st.none() | st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2)
        | st.builds(Pair, inner, inner)
        | inner.map(lambda value: OrderedDict(first=value))
    ),
    max_leaves=6,
)


def leaves(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def expected(name, dtype):
    """The definition, in words that are not the code's."""
    if name == "fp32":
        return torch.float32 if dtype in NARROW else dtype
    own, other = (torch.float16, torch.bfloat16) if name == "fp16" else (torch.bfloat16, torch.float16)
    return own if dtype is other else dtype


@given(st.sampled_from(list(REGIONS)), trees)
def test_every_leaf_is_cast_as_defined_and_the_rest_is_the_same_object(name, tree):
    got = cast_inputs(name, tree)
    assert type(got) is type(tree)
    before, after = leaves(tree), leaves(got)
    assert len(before) == len(after)
    changed = False
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor) and expected(name, old.dtype) != old.dtype:
            assert new.dtype is expected(name, old.dtype)
            assert torch.equal(new.double(), old.double())
            changed = True
        else:
            assert new is old
    assert changed or got is tree


def test_a_dict_that_needs_no_cast_can_be_written_to():
    cache = {"keys": torch.ones(2)}
    call_in_precision("fp32", lambda state: state.update(more=1), (cache,), {})
    assert cache["more"] == 1


def test_a_dataclass_is_left_alone():
    @dataclass
    class Batch:
        x: torch.Tensor

    batch = Batch(torch.ones(2, dtype=torch.bfloat16))
    assert cast_inputs("fp32", batch) is batch


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_16_bit_region_turns_autocast_on(name, dtype):
    a = torch.ones(2, 2)
    with autocast_for(name, "cpu"):
        assert (a @ a).dtype is dtype
    assert (a @ a).dtype is torch.float32


def test_fp32_turns_autocast_off():
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), autocast_for("fp32", "cpu"):
        assert (a @ a).dtype is torch.float32


def test_a_weight_used_in_two_types_has_the_right_one_in_each():
    """Autocast keeps the first cast of a weight, and gives it out whatever type is asked for later."""
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ weight).dtype is torch.bfloat16
        assert call_in_precision("fp16", torch.matmul, (x, weight), {}).dtype is torch.float16
        assert (x @ weight).dtype is torch.bfloat16


def test_devices_without_autocast_are_passed_by():
    x = torch.ones(2, 2, device="meta", dtype=torch.float16)
    assert call_in_precision("bf16", torch.matmul, (x, x), {}).dtype is torch.bfloat16
