"""Kernels that compute something else than they should are found before a model is trained with them."""

import builtins
from types import SimpleNamespace

import pytest
import torch

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.float8 import backends as checking
from ampwise.train.float8.backends import refuse_wrong_kernels, wrong_results
from ampwise.train.float8.fp8_cast import Fp8Matrix, cast_to_fp8
from ampwise.train.float8.recipe import Fp8

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def anew():
    wrong_results.cache_clear()
    yield
    wrong_results.cache_clear()


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("e5m2", [True, False])
def test_what_is_right_is_found_right_and_no_random_numbers_are_drawn(current, e5m2):
    state = torch.get_rng_state()
    assert wrong_results(CPU, current, e5m2) == ""
    assert torch.equal(torch.get_rng_state(), state)


def spoiled(part, dtype):
    def wrong(x, scale, **kwargs):
        found = cast_to_fp8(x, scale, **kwargs)
        if x.dtype != dtype:
            return found
        tensor = found[part].clone()
        tensor.reshape(-1).view(torch.uint8)[3] ^= 1  # one bit
        return Fp8Matrix(*(tensor if place == part else each for place, each in enumerate(found)))

    return wrong


@pytest.mark.parametrize("part", range(len(Fp8Matrix._fields)))
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "a weight"), (torch.bfloat16, "an input")])
def test_one_wrong_bit_is_found(monkeypatch, part, dtype, name):
    monkeypatch.setattr(checking, "cast_to_fp8", spoiled(part, dtype))
    assert wrong_results(CPU, True, True) == name


def test_a_device_whose_kernels_are_wrong_is_refused(monkeypatch):
    asked = []

    def answer(device, current, e5m2):
        asked.append((current, e5m2))
        return "a weight"

    pytest.importorskip("triton")
    monkeypatch.setattr(checking, "wrong_results", answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    text = r"Triton \S+ casts a weight wrongly on NVIDIA H200, so ampwise's kernels are not used. Use torchao's"
    with pytest.raises(PrecisionUnavailable, match=text):
        refuse_wrong_kernels(Fp8("delayed", gradients="e4m3"), CUDA)
    assert asked == [(False, False)]
    refuse_wrong_kernels(Fp8(), CPU)  # whose way is the reference
    monkeypatch.setattr(checking, "wrong_results", lambda *_: "")
    refuse_wrong_kernels(Fp8(), CUDA)


def test_triton_that_is_missing(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "triton":
            raise ImportError
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        MissingDependency, match=r"need Triton, which is not installed. Install it: pip install triton; or use"
    ):
        refuse_wrong_kernels(SimpleNamespace(recipe="current"), CUDA)
