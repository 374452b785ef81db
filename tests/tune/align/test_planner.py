"""What is padded, what is left, and what is said about it."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.errors import BadInput
from ampwise.train.precision.policy import Policy
from ampwise.tune.align.pad import pad_
from ampwise.tune.align.padding_plan import plan_padding

from ...for_each import for_each
from .models import Block, LanguageModel, mlp


def sizes(padding):
    return {name: step.after for step in padding.padded for name in step.names}


def reasons(padding):
    return {each.name: each.why for each in padding.left}


def test_sizes_that_lie_well_are_left_in_silence():
    model = nn.Sequential(nn.Embedding(50257, 64, device="meta"), nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 512))
    padding = plan_padding(model)
    assert (padding.padded, padding.left) == ((), ())
    assert str(padding) == "nothing to pad: every size is aligned"


def test_a_vocabulary_is_padded_to_whole_lines_and_others_to_words():
    assert sizes(plan_padding(nn.Linear(768, 50257, device="meta"))) == {"": (50304, 768)}
    assert sizes(plan_padding(nn.Linear(1001, 777))) == {"": (784, 1008)}
    assert sizes(plan_padding(nn.Linear(1001, 777), to=64)) == {"": (832, 1024)}
    assert sizes(plan_padding(nn.Linear(1001, 777), precision="fp8")) == {"": (784, 1008)}
    assert sizes(plan_padding(nn.Linear(1001, 772), precision="tf32")) == {"": (772, 1004)}
    assert sizes(plan_padding(nn.Linear(768, 50257, device="meta"), precision="fp8")) == {"": (50304, 768)}


def test_what_is_too_small_or_too_thin_is_left_unless_it_is_named():
    padding = plan_padding(nn.Sequential(nn.Linear(768, 10), nn.Softmax(-1), nn.Linear(10, 771)))
    assert padding.padded == ()
    assert reasons(padding) == {"0": "10 outputs are too few to gain", "2": THIN.format(771, 10)}
    assert reasons(plan_padding(nn.Linear(128, 1001))) == {"": THIN.format(1001, 128)}
    assert sizes(plan_padding(nn.Linear(128, 1001), only=("*",))) == {"": (1008, 128)}


THIN = "too thin: padding {} outputs by {} inputs gains less than the copies cost"


def test_a_chain_is_padded_however_thin_it_is():
    padding = plan_padding(Block(12, 1001))
    assert sizes(padding) == {"expand": (1008, 12), "contract": (12, 1008)}
    assert [step.how for step in padding.padded] == ["stays padded up to the next layer", "takes padded inputs"]


def test_a_chain_of_which_only_one_layer_is_wanted_is_none():
    model = mlp((512, 1001, 512))
    padding = plan_padding(model, only=("0",))
    assert sizes(padding) == {"0": (1008, 512)}
    assert padding.padded[0].how == "outputs sliced"
    pad_(model, only="0")
    assert model(torch.randn(2, 512)).shape == (2, 512)


def test_names_are_those_without_wrappers():
    model = torch.compile(mlp((512, 1001, 512)), backend="eager")
    assert sizes(plan_padding(model, only=("0", "2"))) == {"0": (1008, 512), "2": (512, 1008)}


def test_experts_are_padded_each():
    experts = nn.ModuleList(mlp((512, 1001, 512)) for _ in range(3))
    assert len(plan_padding(experts).padded) == 6


class SharedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(512, 1001), nn.Linear(512, 1001)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.one(x) + self.other(x)


def test_layers_that_share_a_weight_are_padded_together():
    model = SharedTwice()
    plain = model(torch.ones(1, 512))
    assert plan_padding(model).padded[0].names == ("one", "other")
    pad_(model)
    assert model.one.weight is model.other.weight
    assert torch.allclose(model(torch.ones(1, 512)), plain, atol=1e-5)
    assert reasons(plan_padding(SharedTwice(), only=("one",))) == {"one": "a layer tied to it is not in only="}


def test_a_layer_in_two_places_gives_its_own_size_in_both():
    shared = nn.Linear(512, 1001)
    first, second = (nn.Sequential(shared, nn.ReLU(), nn.Linear(1001, 512)) for _ in range(2))
    model = nn.ModuleList([first, second])
    plain = first(torch.ones(1, 512))
    padding = pad_(model)
    assert padding.padded[0].how == "outputs sliced"
    assert shared(torch.ones(1, 512)).shape == (1, 1001)
    assert torch.allclose(first(torch.ones(1, 512)), plain, atol=1e-5)


def test_a_sequence_that_is_taken_apart_gives_its_own_sizes():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp((512, 1001, 512))

        def forward(self, x):
            return self.net[0](x)

    model = Features()
    pad_(model)
    assert model(torch.ones(1, 512)).shape == (1, 1001)


class Low(nn.Linear):
    pass


class SharedOddly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(512, 1001), nn.Module()
        self.kept.weight = self.layer.weight


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 1001)

    def forward(self, x):
        return F.linear(x, self.layer.weight)


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(512, 1001))


def pruned():
    layer = nn.Linear(512, 1001)
    del layer._parameters["weight"]
    layer.weight = torch.ones(1001, 512)
    return layer


def kept():
    model = nn.Sequential(nn.Linear(512, 1001))
    Policy("bf16").keep("fp32", "0").apply(model)
    return model


def whole_numbers():
    layer = nn.Linear(512, 1001)
    layer.weight = nn.Parameter(torch.ones(1001, 512, dtype=torch.int8), requires_grad=False)
    return layer


@for_each(
    ("make", "why"),
    [
        (lambda: Low(512, 1001), "a Low, which may use its weight differently from nn.Linear"),
        (spectral, "a ParametrizedLinear, which may use its weight differently from nn.Linear"),
        (pruned, "its weight is not a parameter (it is computed)"),
        (kept, "its forward has been replaced, for example by a policy: pad first"),
        (whole_numbers, "its weight is a Tensor of torch.int8"),
        (SharedOddly, "it shares its weight with kept"),
        (Reads, "the code of Reads reads its weight directly"),
        (lambda: nn.Conv2d(60, 100, 3), "a convolution; only linear layers and embeddings are padded"),
    ],
)
def test_why_a_layer_is_left(make, why):
    model = make()
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    padding = pad_(model)
    assert padding.padded == ()
    assert [each.why for each in padding.left] == [why]
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before


def test_the_channels_of_an_image_are_no_matter():
    assert plan_padding(nn.Conv2d(3, 64, 7)).left == ()


def test_layers_that_torch_uses_by_their_weights_are_left():
    layer = nn.TransformerEncoderLayer(68, 4, 1001, batch_first=True).eval()
    x = torch.randn(2, 3, 68)
    plain = layer(x)
    padding = pad_(layer)
    assert padding.padded == ()
    assert set(reasons(padding)) == {"self_attn.out_proj", "linear1", "linear2"}
    assert torch.equal(layer(x), plain)


def test_a_tied_embedding_that_is_not_among_those_named():
    with torch.device("meta"):
        model = LanguageModel(50257, 256)
    assert reasons(plan_padding(model, only=("lm_head",))) == {"lm_head": "a layer tied to it is not in only="}


def test_what_is_padded_is_reported():
    with torch.device("meta"):
        report = pad_(LanguageModel(50257, 256))
    assert str(report).splitlines() == [
        "3 weights padded, 13,568 zeros added",
        "  lm_head = wte: 50257×256 → 50304×256, outputs sliced",
        "  block.expand: 21×256 → 24×256, stays padded up to the next layer",
        "  block.contract: 256×21 → 256×24, takes padded inputs",
    ]
    plain = report.as_dict()
    assert plain["padded"][0] == {
        "names": ["lm_head", "wte"],
        "before": [50257, 256],
        "after": [50304, 256],
        "how": "outputs sliced",
        "added": 12032,
    }
    assert plain["left"] == []


def test_a_wrapped_model_is_refused():
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = mlp((512, 1001, 512))
        with pytest.raises(
            BadInput, match=r"pad_\(\): the model is wrapped in DistributedDataParallel, which has sized"
        ):
            pad_(DistributedDataParallel(model))
        pad_(model)
        wrapped = DistributedDataParallel(model)
        wrapped(torch.randn(2, 512)).sum().backward()
        assert wrapped.state_dict()["module.0.weight"].shape == (1001, 512)
        assert not model[0].weight.grad[1001:].any()
    finally:
        # DDP must not be the last to hold the group: its threads would be joined with the GIL held.
        wrapped = None
        gc.collect()
        dist.destroy_process_group()
