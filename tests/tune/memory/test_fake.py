"""Tensors without memory, and code that names devices or asks for values."""

import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from ampwise.tune.memory.fake_tensors import KnownValues, real_values, without_memory


def test_code_that_names_a_gpu_gets_fake_tensors():
    with without_memory():
        x = torch.zeros(4, 4, device="cuda").cuda().to("cuda:1").to(torch.device("cuda", 0))
        layer = nn.Linear(4, 4).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            with torch.autocast(device_type="cuda", enabled=False):
                assert layer(x).dtype == torch.float32
        assert layer.half().weight.dtype == torch.float16
    assert torch.zeros(1).item() == 0  # and afterwards tensors are real
    assert torch.autocast("cpu").device == "cpu"


def test_what_is_replaced_comes_back():
    before = (torch.autocast.__init__, torch.utils.swap_tensors, nn.init._no_grad_trunc_normal_)
    with without_memory(), real_values():
        assert torch.utils.swap_tensors is not before[1]
    with pytest.raises(ZeroDivisionError), without_memory(), real_values():
        _ = 1 / 0
    assert (torch.autocast.__init__, torch.utils.swap_tensors, nn.init._no_grad_trunc_normal_) == before
    assert "__deepcopy__" not in vars(FakeTensor)
    assert not logging.getLogger(FakeTensor.__module__).disabled


def test_a_deepcopy_has_a_storage_that_its_views_share():
    import copy

    with without_memory():
        layer = copy.deepcopy(nn.Linear(4, 8))
        buffer = copy.deepcopy(torch.zeros(4, 4))
        for tensor in (layer.weight, buffer):
            assert tensor.t().untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.requires_grad
        assert not buffer.requires_grad
        both = copy.deepcopy([buffer, buffer])
        assert both[0] is both[1]


def test_numbers_that_a_model_is_made_with_are_real_and_its_weights_are_not():
    with without_memory(), real_values():
        rates = [rate.item() for rate in torch.linspace(0, 1, 5)]
        assert rates == [0, 0.25, 0.5, 0.75, 1]
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.tensor([1, 2]).sum().item() == 3
        weight = nn.init.trunc_normal_(torch.empty(4, 4))
        assert "Fake" in type(weight).__name__
        assert "Fake" in type(torch.arange(2**21)).__name__  # of which there are many
        assert "Fake" in type(nn.Linear(4, 4).weight).__name__
        scale = nn.Parameter(torch.tensor(2.6))
        assert (type(scale.detach()).__name__, scale.requires_grad) == ("FakeTensor", True)


def test_a_loader_that_shuffles_may_make_the_batch():
    with without_memory(), real_values():
        data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
        x, y = next(iter(DataLoader(data, batch_size=8, shuffle=True)))
        assert (x.shape, y.shape) == ((8, 8), (8,))
        assert "Fake" in type(x).__name__


def test_in_a_step_numbers_that_depend_on_no_weight_have_values():
    with without_memory():
        with real_values():
            layer, mask = nn.Linear(4, 4), torch.ones(2, 8, dtype=torch.long)
            mask[:, 4:] = 0
        with KnownValues():
            assert not mask.all()
            assert mask[:, :4].sum().item() == 8
            causal = torch.full((8, 8), float("-inf")).triu(1)
            assert torch.equal(causal, nn.Transformer.generate_square_subsequent_mask(8))
            assert torch.rand([]) < 1
            shifted = mask.new_zeros(mask.shape)
            shifted[:, 1:] = mask[:, :-1]
            assert shifted.sum(1).tolist() == [4, 4]
            for unknown in (layer(torch.randn(2, 4)), torch.zeros(2**12, 2**12), layer.weight * 0):
                assert "Fake" in type(unknown).__name__
                with pytest.raises(DataDependentOutputException):
                    unknown.sum().item()
            causal[0, 0] = layer.weight[0, 0].detach()  # what is written into from a weight is not known any more
            with pytest.raises(DataDependentOutputException):
                causal.sum().item()


def test_code_that_asks_whether_it_is_traced_is_told_that_it_is_not():
    with without_memory():
        assert not isinstance(torch.zeros(1), torch._subclasses.FakeTensor)
    assert torch._subclasses.FakeTensor is FakeTensor
