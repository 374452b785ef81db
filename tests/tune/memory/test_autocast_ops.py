"""The lists of CUDA's autocast, held to torch's own header and to what torch has registered."""

import re
from pathlib import Path

import pytest
import torch

from ampwise.tune.memory.autocast_ops import FP32, FP32_OUTPUT, LOWER, NORMS, PROMOTE

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LISTS = {
    "LOWER_PRECISION_FP": LOWER,
    "FP32": FP32,
    "FP32_SET_OPT_DTYPE": FP32_OUTPUT,
    "PROMOTE": PROMOTE,
}


def of_header(name):
    macro = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", macro[1])
    return {f"{name}.{overload}" if overload else name for name, overload in entries if not of_names(overload)}


def of_names(name):
    """Whether it is for tensors whose dimensions have names, which torch once had and nobody trained with."""
    return "dimname" in name.lower() or name.startswith("norm.names")


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without headers, or keeps its lists elsewhere")
@pytest.mark.parametrize("name", LISTS)
def test_each_list_is_the_headers(name):
    # Other versions of torch have an operation more or fewer; those that it lacks are left alone, as it leaves them.
    known, ours = of_header(name), LISTS[name]
    assert known <= ours, "torch has put more on its list: put them on ours"
    if (2, 13) <= torch.__version__ < (2, 14):
        assert known == ours


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without headers, or keeps its lists elsewhere")
def test_the_norms_are_the_headers():
    macro = re.search(r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())
    assert {name for name in re.findall(r'"(norm\.\w+)"', macro[1]) if not of_names(name)} == {*NORMS}


def test_an_operation_is_on_one_list():
    lists = [*LISTS.values(), {*NORMS}]
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_what_torch_casts_on_cuda_is_on_a_list():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::") and not of_names(name)}
    listed = set().union(*LISTS.values(), NORMS)
    # Those are called by nobody but torch itself, or refused.
    left = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
    assert names - listed <= left, names - listed - left
