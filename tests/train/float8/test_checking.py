"""Kernels that compute something else than they should are found before a model is trained with them."""

import builtins
from types import SimpleNamespace

import pytest
import torch

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.float8 import backends as checking
from ampwise.train.float8 import block_check
from ampwise.train.float8.backends import refuse_wrong_kernels, wrong_results
from ampwise.train.float8.block_cast import BlockMatrix, cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_check import blas_has_blocks, wrong_block_results
from ampwise.train.float8.fp8_cast import Fp8Matrix, cast_to_fp8
from ampwise.train.float8.recipe import Fp8

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def anew():
    for checked in (wrong_results, wrong_block_results, blas_has_blocks):
        checked.cache_clear()
    yield
    for checked in (wrong_results, wrong_block_results, blas_has_blocks):
        checked.cache_clear()


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


def test_blocks_that_are_right_are_found_right():
    state = torch.get_rng_state()
    assert wrong_block_results(CPU) == ""
    assert not blas_has_blocks(CPU)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("cast", "name"), [(cast_to_strips, "an input"), (cast_to_tiles, "a weight")])
def test_one_wrong_bit_of_a_cast_in_blocks_is_found(monkeypatch, part, cast, name):
    def wrong(x, **kwargs):
        found = [each.clone() for each in cast(x, **kwargs)]
        found[part].reshape(-1).view(torch.uint8)[3] ^= 1
        return BlockMatrix(*found)

    monkeypatch.setattr(block_check, cast.__name__, wrong)
    assert wrong_block_results(CPU) == f"casts {name} in blocks"


def test_wrong_sums_of_a_cast_in_blocks_are_found(monkeypatch):
    def wrong(x, **kwargs):
        found = cast_to_strips(x, **kwargs)
        return found._replace(sums=found.sums * 1.001)

    monkeypatch.setattr(block_check, "cast_to_strips", wrong)
    assert wrong_block_results(CPU) == "adds up an input"


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("by_tiles", [True, False])
def test_scales_at_a_wrong_place_in_a_matmul_are_found(monkeypatch, operand, by_tiles):
    real = block_check.block_matmul

    def wrong(a, b, of_a, of_b, dtype, *, tiles, **kwargs):
        if tiles == by_tiles:  # as if read one block further on
            of_a, of_b = (of_a.roll(1, 0), of_b) if operand == "a" else (of_a, of_b.roll(1, 1 if tiles else 0))
        return real(a, b, of_a, of_b, dtype, tiles=tiles, **kwargs)

    monkeypatch.setattr(block_check, "block_matmul", wrong)
    assert wrong_block_results(CPU) == "multiplies blocks"


def test_a_device_that_multiplies_blocks_wrongly_is_refused(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(checking, "wrong_block_results", lambda device: "multiplies blocks")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(PrecisionUnavailable, match=r"Triton \S+ multiplies blocks wrongly on NVIDIA H200, so"):
        refuse_wrong_kernels(Fp8("block"), CUDA)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, None])
def test_cublas_is_used_where_it_multiplies_blocks(monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def multiplied(sizes, device, *, blas):
        assert blas
        if error is not None:
            raise error("requires cublasLt >= 12.9")
        return True

    monkeypatch.setattr(block_check, "_multiplies_well", multiplied)
    assert blas_has_blocks(CUDA) is (error is None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    blas_has_blocks.cache_clear()
    assert not blas_has_blocks(CUDA)


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
