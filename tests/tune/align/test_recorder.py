"""The products of a step: as many as torch counts, of the layers they belong to, with the sizes they have."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ampwise.tune.align import matmul_recorder as shapes
from ampwise.tune.align.matmul_recorder import MatmulRecorder, matmul_shape
from ampwise.tune.align.matmuls import StepMatmuls
from ampwise.tune.align.pad import pad_

from ...for_each import for_each
from .models import Block, CodeTied, LanguageModel, mlp


def seen(model, step, precision="fp32"):
    recorder = MatmulRecorder(model, precision)
    with recorder.recording():
        step()
    return StepMatmuls(name="test", precision=precision, device="cpu", products=recorder.products)


def layers(products):
    return {layer.name: layer for layer in products.layers}


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 36, 3, stride=2, padding=1)
        self.back = nn.ConvTranspose2d(36, 12, 2)
        self.apart = nn.Conv2d(12, 12, 3, groups=12)

    def forward(self, x):
        return self.back(self.second(self.first(x)))


class Attention(nn.Module):
    def __init__(self, width=24, heads=2, fused=True):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value)
        return (query @ key.transpose(-2, -1)).softmax(-1) @ value


STEPS = [
    (lambda: mlp((13, 21, 7)), (4, 13)),
    (lambda: Block(12, 21), (2, 5, 12)),
    (Convolutions, (2, 3, 16, 16)),
    (lambda: Attention(fused=False), (2, 9, 24)),
]


@for_each(("make", "shape"), STEPS)
def test_the_work_is_what_torch_counts(make, shape):
    model, x = make(), torch.randn(shape)
    found = seen(model, lambda: model(x).square().sum().backward())
    with FlopCounterMode(display=False) as counter:
        model(x).square().sum().backward()
    assert found.flops == counter.get_total_flops()
    assert all(product.layer for product in found.products if product.kind != "product")


def test_a_layer_has_three_products_and_their_sizes_keep_their_roles():
    model, x = nn.Sequential(nn.Linear(13, 21)), torch.randn(5, 13, requires_grad=True)
    found = seen(model, lambda: model(x).square().sum().backward())
    assert [product.backward for product in found.products] == [False, True, True]
    assert {product.layer for product in found.products} == {"0"}
    for product in found.products:
        assert {each.role: each.size for each in product.sizes} == {"rows": 5, "inputs": 13, "outputs": 21}
        assert product.k.role != "inputs" or not product.backward
    (layer,) = found.layers
    assert (layer.product.shape, layer.kind) == ("5×21×13", "linear")


def test_what_is_summed_over_in_a_backward_pass_is_not_what_was_in_the_forward_pass():
    model, x = nn.Sequential(nn.Linear(5, 5)), torch.randn(5, 5, requires_grad=True)
    found = seen(model, lambda: model(x).square().sum().backward())
    assert [product.k.role == "inputs" for product in found.products] == [True, False, False]


def test_the_work_of_attention_is_what_torch_counts():
    shape = (2, 3, 40, 16)
    query = torch.empty(shape, device="meta")
    name = "aten::_scaled_dot_product_flash_attention"
    assert matmul_shape(name, (query, query, query), None).flops == sdpa_flop_count(shape, shape, shape)
    backward = matmul_shape(f"{name}_backward", (query, query, query, query), None)
    assert backward.flops == sdpa_backward_flop_count(shape, shape, shape, shape)
    assert matmul_shape("aten::_scaled_dot_product_attention_math", (query, query, query), None) is None


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16
def test_heads_that_torch_pads_are_seen_as_they_were_asked_for(monkeypatch):
    model, x = Attention(40, 2).bfloat16(), torch.randn(2, 8, 40).bfloat16()
    plain = shapes._attention

    def padded(*args, times=1.0):  # as on a GPU, where the kernel is given 24 of 20
        return replace(plain(*args, times), sizes={"m": 8, "n": 8, "k": 24}, rows={"k": 24})

    monkeypatch.setattr(shapes, "_attention", padded)
    found = seen(model, lambda: model(x).square().sum().backward(), "bf16")
    attention = next(layer for layer in found.layers if layer.kind == "attention")
    assert attention.off == (("head size", 20, 24),)
    assert attention.product.k.size == 20


def test_rows_of_a_batch_lie_along_no_matrix():
    model, x = nn.Linear(16, 24), torch.randn(5, 16, requires_grad=True)
    found = seen(model, lambda: model(x).square().sum().backward())
    assert found.layers[0].off == ()
    turned = torch.randn(16, 5, requires_grad=True)  # stored along them
    found = seen(model, lambda: model(turned.t()).square().sum().backward())
    assert found.layers[0].off == (("rows", 5, 8),)


def test_a_slice_of_something_aligned_is_aligned_and_one_that_begins_between_words_is_not():
    model, wide = nn.Linear(16, 24), torch.randn(8, 64)
    assert seen(model, lambda: model(wide[:, 4:20])).layers[0].off == ()
    assert seen(model, lambda: model(wide[:, 3:19])).layers[0].off == (("inputs", 16, 16),)
    assert seen(model, lambda: model(torch.randn(8, 63)[:, :16])).layers[0].off == (("inputs", 16, 16),)


def test_a_vector_has_no_rows():
    model = nn.Linear(13, 1)
    found = seen(model, lambda: model(torch.randn(1, 13)))
    assert found.layers[0].off == ()


def test_products_of_a_tied_weight_are_the_layers_or_the_embeddings():
    tokens = torch.arange(10).view(2, 5)
    for model, name in ((LanguageModel(), "lm_head"), (CodeTied(), "wte")):
        found = layers(seen(model, lambda model=model: model(tokens).square().sum().backward()))
        assert found[name].off == (("outputs", 101, 104),)
        assert len(found[name].products) == 3
        assert found[name].product.k.size == 16


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_copy_in_another_precision_is_the_same_weight():
    model, tokens = CodeTied(), torch.arange(10).view(2, 5)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            made = model(tokens)
        made.float().sum().backward()

    found = layers(seen(model, step, "bf16"))
    assert found["wte"].product.precision == "bf16"
    assert found["wte"].off == (("outputs", 101, 104),)


def test_a_padded_model_is_silent():
    model, tokens = CodeTied(), torch.arange(16).view(2, 8)
    pad_(model, only="*", head="wte", precision="fp32")
    found = seen(model, lambda: model(tokens).square().sum().backward())
    assert [layer.name for layer in found.layers if layer.off] == []


def test_a_weight_on_the_left():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(21, 13))

        def forward(self, x):
            return self.weight @ x

    model, x = nn.Sequential(Turned()), torch.randn(13, 5)
    (layer,) = seen(model, lambda: model(x).square().sum().backward()).layers
    assert {role: size for role, size, _ in layer.off} == {"inputs": 13, "rows": 5}
    assert {each.role: each.size for each in layer.product.sizes} == {"rows": 5, "inputs": 13, "outputs": 21}


def test_attention_by_hand_has_the_length_in_its_rows():
    model, x = Attention(24, 2, fused=False), torch.randn(2, 9, 24)
    products = [
        layer for layer in seen(model, lambda: model(x).square().sum().backward()).layers if layer.kind == "product"
    ]
    assert [layer.off for layer in products] == [(("size", 9, 12),)]


def test_heads_of_an_odd_size():
    model, x = Attention(36, 2), torch.randn(2, 8, 36)
    found = [
        layer
        for layer in seen(model, lambda: model(x).square().sum().backward(), "bf16").layers
        if layer.kind == "attention"
    ]
    assert [layer.product.k.size for layer in found] == [18]
    model.bfloat16()
    attention = next(
        layer
        for layer in seen(model, lambda: model(x.bfloat16()).sum().backward(), "bf16").layers
        if layer.kind == "attention"
    )
    assert attention.off == (("head size", 18, 24),)
    assert [product.off() for product in attention.products] == [(("head size", 18, 24),)] * 2


def test_channels_that_are_off_and_kernels_of_their_own():
    model, x = Convolutions().bfloat16(), torch.randn(2, 3, 16, 16).bfloat16()
    found = layers(seen(model, lambda: model.apart(model(x)).sum().backward(), "bf16"))
    assert found["first"].off == (("output channels", 20, 24),)  # three channels are an image's
    assert dict(each[:2] for each in found["second"].off) == {"output channels": 36, "input channels": 20}
    assert found["apart"].off == ()
    assert dict(each[:2] for each in found["back"].off) == {"output channels": 12, "input channels": 36}


def test_blocks_alike_are_one_and_their_work_is_added():
    model, x = nn.Sequential(*(Block(16, 21) for _ in range(3))), torch.randn(2, 16)
    found = layers(seen(model, lambda: model(x).square().sum().backward()))
    assert set(found) == {"*.expand", "*.contract"}
    assert found["*.expand"].names == ("0.expand", "1.expand", "2.expand")
    assert len(found["*.expand"].products) == 9


def test_what_is_computed_once_more_is_forward():
    model, x = Block(16, 21), torch.randn(2, 16, requires_grad=True)
    found = seen(model, lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    expand = layers(found)["expand"]
    forward = [product for product in expand.products if not product.backward]
    assert [product.count for product in forward] == [2]
    assert sum(product.count for product in expand.products) == 4


def test_in_fp8_what_is_summed_over_counts_too():
    model, x = nn.Sequential(nn.Linear(32, 48)).bfloat16(), torch.randn(24, 32).bfloat16()
    found = seen(model, lambda: model(x).square().sum().backward(), "fp8")
    assert found.layers[0].product.precision == "fp8"
    assert found.layers[0].off == (("rows", 24, 32),)


def test_nothing_is_left_behind():
    from torch.nn.modules import module

    hooks = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    model = mlp()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        seen(model, lambda: model(torch.randn(2, 3)))
    assert hooks == (len(module._global_forward_hooks), len(module._global_forward_pre_hooks))
