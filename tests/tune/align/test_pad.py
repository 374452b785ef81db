"""A padded model computes what it did: outputs, gradients, training, checkpoints, and back again."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.tune.align.layers import PaddedEmbedding, PaddedLinear, TiedEmbedding
from ampwise.tune.align.pad import pad_, unpad_

from ...for_each import for_each
from .models import Block, CodeTied, Gated, LanguageModel, Statements, integers_, mlp, own, padding_of

ALL = "*"  # named, so padded however small
sizes = st.integers(1, 40)


def pair(model, **options):
    """A model, and the same padded."""
    padded = copy.deepcopy(model)
    report = pad_(padded, **{"only": ALL} | options)
    return model, padded, report


def gradients(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(model, padded, close=torch.equal):
    for (name, plain), wide in zip(model.named_parameters(), padded.parameters(), strict=True):
        assert close(own(wide.grad, plain), plain.grad), name
        assert not padding_of(wide.grad, plain).any(), f"{name}: the padding has a gradient"


# Laws


@given(sizes, sizes, sizes, st.integers(1, 5), st.sampled_from([None, 8, 16, 64]), st.booleans())
def test_whole_numbers_stay_exactly_what_they_were(width, hidden, out, rows, to, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, hidden, bias), nn.ReLU(), nn.Linear(hidden, out), nn.LeakyReLU(0.5))
    model, padded, _ = pair(integers_(model), to=to)
    x = torch.randint(-3, 4, (rows, width)).float()
    expected, got = model(x), padded(x)
    assert torch.equal(got, expected)
    assert got.shape == expected.shape
    expected.sum().backward()
    got.sum().backward()
    assert_same_gradients(model, padded)


@given(sizes, sizes, sizes)
def test_random_numbers_stay_within_the_error_of_a_sum(width, hidden, out):
    torch.manual_seed(0)
    model, padded, _ = pair(mlp((width, hidden, out), nn.GELU))
    x = torch.randn(3, width)
    with torch.no_grad():
        expected, got = model(x), padded(x)
    # Zeros change the order of a sum, no more; so few ulps of its parts are the most that may differ.
    exact = copy.deepcopy(model).double()(x.double()).detach()
    scale = torch.finfo(torch.float32).eps * max(1.0, float(exact.abs().max()))
    assert (got - expected).abs().max() <= 4 * scale
    assert (got - exact).abs().max() <= 8 * scale


@given(st.integers(2, 60), st.sampled_from(["sgd", "adamw"]), st.booleans(), st.sampled_from(["sliced", "masked"]))
def test_five_steps_of_training_are_the_same(vocabulary, optimizer, tied, logits):
    torch.manual_seed(0)
    model, padded, _ = pair(LanguageModel(vocabulary, 9, tied).double(), head="lm_head", logits=logits)
    tokens = torch.randint(vocabulary, (2, 6))
    for each in (model, padded):
        step = make_optimizer(optimizer, each)
        for _ in range(5):
            loss = F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            step.step()
            step.zero_grad()
    for (name, plain), wide in zip(model.named_parameters(), padded.parameters(), strict=True):
        assert torch.allclose(own(wide, plain), plain, rtol=1e-9, atol=1e-12), name
        assert not padding_of(wide, plain).any(), f"{name}: the padding is no longer zero"


def make_optimizer(name, model):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1)


MODELS = [mlp, Block, Statements, Gated, LanguageModel, CodeTied]


def made(kind):
    torch.manual_seed(0)
    return kind()


def given_to(model):
    vocabulary = isinstance(model, LanguageModel | CodeTied)
    return torch.arange(10).view(2, 5) if vocabulary else torch.randn(2, 5, next(model.parameters()).shape[-1])


def options_for(kind):
    return {"head": "wte"} if kind is CodeTied else {}


@for_each("kind", MODELS)
def test_checkpoints_load_both_ways(kind):
    model, padded, report = pair(made(kind), **options_for(kind))
    assert report.padded
    saved, saved_padded = model.state_dict(), padded.state_dict()
    assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in saved_padded.items()}
    assert all(torch.equal(saved[name], saved_padded[name]) for name in saved)

    other = made(kind)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(saved_padded, strict=True)
    assert all(torch.equal(saved[name], value) for name, value in other.state_dict().items())

    for parameter in padded.parameters():
        parameter.data.fill_(7.0)  # the padding too, which loading makes zero again
    padded.load_state_dict(saved, strict=True)
    for plain, wide in zip(model.parameters(), padded.parameters(), strict=True):
        assert torch.equal(own(wide, plain), plain)
        assert not padding_of(wide, plain).any()


@for_each("kind", MODELS)
def test_unpadding_restores_every_bit(kind):
    model, padded, _ = pair(made(kind), **options_for(kind))
    unpad_(padded)
    assert repr(padded) == repr(model)
    for (name, plain), now in zip(model.named_parameters(), padded.parameters(), strict=True):
        assert torch.equal(now, plain), name
    assert [type(module) for module in padded.modules()] == [type(module) for module in model.modules()]
    assert "gives" not in vars(next(padded.modules()))


@for_each("kind", MODELS)
def test_padding_twice_is_padding_once(kind):
    model, padded, _ = pair(made(kind), **options_for(kind))
    shapes = [parameter.shape for parameter in padded.parameters()]
    again = pad_(padded, only=ALL, **options_for(kind))
    assert again.padded == ()
    assert [parameter.shape for parameter in padded.parameters()] == shapes
    x = given_to(model)
    assert torch.allclose(padded(x), model(x), atol=1e-6)


@for_each("kind", MODELS)
def test_copies_are_padded_models_of_their_own(kind):
    model, padded, _ = pair(made(kind), **options_for(kind))
    for twin in (copy.deepcopy(padded), reloaded(padded)):
        x = given_to(model)
        assert torch.equal(twin(x), padded(x))  # noqa: AMP501
        nn.init.zeros_(next(twin.parameters()))
        assert next(padded.parameters()).any()


def reloaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# torch.compile of 2.6 cannot follow a property of a module in place of its parameter.
FOLLOWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)
OLD = "torch before 2.7 cannot compile an embedding whose weight is a property"


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_padded_model_compiles_in_one_graph(kind, backend):
    if kind is CodeTied and not FOLLOWS:
        pytest.skip(OLD)
    torch._dynamo.reset()
    model, padded, _ = pair(made(kind), **options_for(kind))
    compiled = torch.compile(padded, backend=backend, fullgraph=True)
    x = given_to(model)
    expected, got = model(x), compiled(x)
    assert torch.allclose(got, expected, atol=1e-6)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(model, padded, lambda a, b: torch.allclose(a, b, atol=1e-4, rtol=1e-4))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16
@pytest.mark.parametrize("kind", MODELS)
def test_under_autocast(kind):
    model, padded, _ = pair(made(kind), **options_for(kind))
    x = given_to(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(x), padded(x)
    assert got.dtype == expected.dtype
    assert torch.allclose(got.float(), expected.float(), atol=0.05)
    got.float().sum().backward()
    assert all(parameter.grad is not None for parameter in padded.parameters())


# Heads


@pytest.mark.parametrize("bias", [False, True])
def test_a_tied_head_stays_tied(bias):
    model, padded, report = pair(LanguageModel(bias=bias))
    assert padded.lm_head.weight is padded.wte.weight
    assert padded.wte.weight.shape == (104, 16)
    assert report.padded[0].names == ("lm_head", "wte")
    assert isinstance(padded.lm_head, PaddedLinear)
    assert isinstance(padded.wte, PaddedEmbedding)
    tokens = torch.arange(101).view(1, -1)
    assert padded(tokens).shape == (1, 101, 101)
    assert torch.equal(padded(tokens).argmax(-1), model(tokens).argmax(-1))
    assert (padded.lm_head.in_features, padded.lm_head.out_features, padded.wte.num_embeddings) == (16, 101, 101)


def test_masked_logits_are_as_wide_as_the_padding_and_never_chosen():
    model, padded, report = pair(LanguageModel(), logits="masked")
    tokens = torch.arange(10).view(1, -1)
    logits = padded(tokens)
    assert logits.shape == (1, 10, 104)
    assert (logits[..., 101:] == -torch.inf).all()
    assert report.padded[0].how == "logits masked"
    expected = F.cross_entropy(model(tokens)[0], tokens[0])
    loss = F.cross_entropy(logits[0], tokens[0])
    assert torch.allclose(loss, expected)
    gradients(model, expected)
    gradients(padded, loss)
    assert_same_gradients(model, padded, torch.allclose)


def test_sliced_logits_take_label_smoothing_which_masked_ones_cannot():
    model, padded, _ = pair(LanguageModel())
    tokens = torch.arange(10).view(1, -1)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert torch.allclose(smooth(padded(tokens)[0], tokens[0]), smooth(model(tokens)[0], tokens[0]))
    _, masked, _ = pair(model, logits="masked")
    assert smooth(masked(tokens)[0], tokens[0]).isinf()


def test_an_embedding_that_code_multiplies_with_is_padded_only_when_named():
    model, padded, report = pair(CodeTied(), only=())
    (left,) = [each for each in report.left if each.name == "wte"]
    assert (
        left.why == "the code of CodeTied reads its weight directly: if that makes the logits, pad_(model, head='wte')"
    )
    assert type(padded.wte) is nn.Embedding
    report = pad_(padded, head="wte")
    assert isinstance(padded.wte, TiedEmbedding)
    assert report.padded[0].after == (104, 16)
    tokens = torch.arange(101).view(1, -1)
    assert padded(tokens).shape == (1, 101, 101)
    assert torch.allclose(padded(tokens), model(tokens), atol=1e-6)


def test_who_asks_for_the_weight_of_such_an_embedding_sees_its_own_rows():
    _, padded, _ = pair(CodeTied(), head="wte")
    weight = padded.wte.weight
    assert weight.shape == (101, 16)
    assert dict(padded.named_parameters())["wte.weight"].shape == (104, 16)
    x = torch.randn(3, 16)
    assert (weight.T.shape, weight.T.sum().shape) == ((16, 101), ())
    assert torch.allclose(x @ weight.transpose(0, 1), F.linear(x, weight), atol=1e-6)
    assert torch.equal(
        torch.einsum("bd,vd->bv", x, weight).shape and weight.sum(), padded.state_dict()["wte.weight"].sum()
    )
    assert weight.grad is None
    padded(torch.arange(5).view(1, -1)).sum().backward()
    assert padded.wte.weight.grad.shape == (101, 16)
    nn.init.ones_(padded.wte.weight)
    assert not padding_of(padded.wte._parameters["weight"], weight).any()


class Product(CodeTied):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, tokens):
        return self.how(self.block(self.wte(tokens)), self.wte.weight)


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "how",
    [
        lambda x, weight: x @ weight.T,
        lambda x, weight: x @ weight.t(),
        lambda x, weight: torch.matmul(x, weight.mT),
        lambda x, weight: x.matmul(torch.t(weight)),
        lambda x, weight: F.linear(x, weight, torch.ones(101)),
    ],
)
def test_products_with_the_weight_have_its_padding(how):
    model, padded, _ = pair(Product(how), head="wte")
    tokens = torch.arange(10).view(2, 5)
    expected, got = model(tokens), padded(tokens)
    assert torch.allclose(got, expected, atol=1e-6)
    assert got.stride(-2) == 104  # a view of what has the padding
    expected.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(model, padded, lambda a, b: torch.allclose(a, b, atol=1e-4, rtol=1e-4))
    if FOLLOWS:
        torch._dynamo.reset()
        compiled = torch.compile(padded, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(tokens), expected, atol=1e-6)


def test_the_same_with_masked_logits():
    model, padded, _ = pair(CodeTied(), head="wte", logits="masked")
    tokens = torch.arange(10).view(1, -1)
    assert padded(tokens).shape == (1, 10, 104)
    assert torch.allclose(F.cross_entropy(padded(tokens)[0], tokens[0]), F.cross_entropy(model(tokens)[0], tokens[0]))


# Details


def test_a_hidden_size_stays_padded_only_between_its_layers():
    seen = {}
    _, padded, report = pair(Block())
    padded.contract.register_forward_pre_hook(lambda _, args: seen.update(width=args[0].shape[-1]))
    padded(torch.randn(2, 12))
    assert seen == {"width": 24}
    assert [step.how for step in report.padded] == ["stays padded up to the next layer", "outputs sliced"]


def test_inputs_of_the_wrong_size_are_refused_as_they_were():
    _, padded, _ = pair(mlp((13, 21, 7)))
    for size in (12, 14):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            padded(torch.randn(2, size))


def test_outputs_can_be_written_to():
    model, padded, _ = pair(nn.Sequential(nn.Linear(16, 21), nn.ReLU(inplace=True), nn.LayerNorm(21)))
    x = torch.randn(4, 16)
    expected, got = model(x), padded(x)
    assert torch.allclose(got, expected, atol=1e-6)
    got.sum().backward()


def test_a_gradient_that_is_there_is_padded_too():
    model = mlp()
    padded = copy.deepcopy(model)
    x = torch.randn(2, 13)
    for each in (model, padded):
        each(x).sum().backward()
    pad_(padded, only=ALL)
    assert_same_gradients(model, padded)
    unpad_(padded)
    assert_same_gradients(model, padded)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizer_made_before_goes_on(name):
    torch.manual_seed(0)
    model, x = mlp().double(), torch.randn(4, 13).double()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = make_optimizer(name, each)
        for step in range(6):
            if each is twin and step == 2:
                pad_(each, only=ALL, optimizer=optimizer)
            if each is twin and step == 4:
                unpad_(each, optimizer=[optimizer])
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for plain, now in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(now, plain, rtol=1e-9)


def test_an_optimizer_whose_state_was_not_padded_says_so_at_once():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for padded in (False, True):
        if padded:
            pad_(model, only=ALL)
        model(torch.randn(2, 13)).sum().backward()
        if padded:
            with pytest.raises(RuntimeError, match=r"must match|size"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()


def test_weights_of_another_size_are_refused_with_both_sizes():
    _, padded, _ = pair(mlp((13, 21, 7)))
    before = padded.state_dict()["0.weight"].clone()
    other = mlp((13, 22, 7)).state_dict() | {"2.weight": torch.zeros(7, 21)}
    with pytest.raises(RuntimeError) as caught:
        padded.load_state_dict(other)
    assert (
        "size mismatch for 0.weight: copying a param with shape torch.Size([22, 13]) from checkpoint, the shape in "
        "current model is torch.Size([21, 13]) (which is padded to torch.Size([24, 16]))." in str(caught.value)
    )
    assert torch.equal(padded.state_dict()["0.weight"], before)
    wide = mlp((16, 24, 8)).state_dict()  # as large as the padding: not this model's either
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        padded.load_state_dict(wide)


def test_what_is_written_to_a_state_dict_is_written_to_the_model():
    _, padded, _ = pair(mlp())
    for value in padded.state_dict().values():
        value.copy_(torch.ones_like(value))
    assert all((parameter.sum() > 0) for parameter in padded.parameters())
    assert all(torch.equal(value, torch.ones_like(value)) for value in padded.state_dict().values())


def test_values_drawn_anew_are_those_of_the_layer_without_padding():
    plain, padded, _ = pair(LanguageModel(tied=False, bias=True))
    for name in ("lm_head", "wte"):
        torch.manual_seed(3)
        getattr(plain, name).reset_parameters()
        torch.manual_seed(3)
        getattr(padded, name).reset_parameters()
    x = torch.arange(10).view(1, -1)
    assert torch.allclose(padded(x), plain(x), atol=1e-6)
    for before, now in zip(plain.parameters(), padded.parameters(), strict=True):
        assert not padding_of(now, before).any()


def test_a_model_without_memory():
    with torch.device("meta"):
        model = LanguageModel()
    pad_(model, only=ALL)
    assert model.wte.weight.shape == (104, 16)
    assert model.wte.weight.is_meta
    full = LanguageModel()
    model.load_state_dict(full.state_dict(), assign=True)
    tokens = torch.arange(10).view(1, -1)
    assert torch.allclose(model(tokens), full(tokens), atol=1e-6)


def test_a_tied_embedding_moves_and_takes_a_checkpoint_as_its_own():
    model, padded, _ = pair(CodeTied(), head="wte")
    padded.double().load_state_dict(model.double().state_dict(), assign=True)
    tokens = torch.arange(10).view(1, -1)
    assert padded.wte._parameters["weight"].shape == (104, 16)
    assert torch.allclose(padded(tokens), model(tokens), atol=1e-12)


def test_frozen_weights_stay_frozen():
    model = mlp().requires_grad_(False)
    pad_(model, only=ALL)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_what_is_assigned_to_a_tied_head_stays_tied():
    _, padded, _ = pair(LanguageModel())
    saved = LanguageModel().state_dict()
    padded.load_state_dict(saved, assign=True)
    assert padded.wte.weight.data_ptr() == padded.lm_head.weight.data_ptr()
    assert torch.equal(padded.state_dict()["wte.weight"], saved["wte.weight"])
    saved["lm_head.weight"] = torch.ones(101, 16)  # no longer one: each has its own
    padded.load_state_dict(saved, assign=True)
    assert padded.state_dict()["lm_head.weight"].eq(1).all()
    assert torch.equal(padded.state_dict()["wte.weight"], saved["wte.weight"])


def test_a_graph_that_is_still_held_is_no_matter():
    model, x = mlp(), torch.randn(2, 13)
    loss = model(x).sum()
    loss.backward()
    for change in (lambda: pad_(model, only=ALL), lambda: unpad_(model)):
        change()
        model.zero_grad()
        held = model(x).sum()
        held.backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


# Bad input


def test_state_that_cannot_be_padded_is_refused_before_anything_is_touched():
    model = nn.Sequential(nn.Linear(13, 21), nn.ReLU(), nn.Linear(21, 7))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(2, 13)).sum().backward()
    optimizer.step()
    before = repr(model)
    with pytest.raises(
        BadInput, match=r"Adafactor keeps 'row_var' of \(21, 1\) for a parameter of \(21, 13\), which cannot"
    ):
        pad_(model, only=ALL, optimizer=optimizer)
    assert repr(model) == before
    model = nn.Sequential(nn.Linear(13, 21), nn.Linear(21, 8), nn.Embedding(8, 13, sparse=True), nn.Linear(13, 8))
    model[2](torch.tensor([1])).sum().backward()
    before = repr(model)
    with pytest.raises(BadInput, match=r"a gradient of the model is sparse and cannot be padded\. Call zero_grad\(\)"):
        pad_(model, only=ALL)
    assert repr(model) == before


def test_what_is_no_model_is_refused():
    with pytest.raises(BadInput, match=r"pad_\(\): expected a torch\.nn\.Module, got str\."):
        pad_("model")
    with pytest.raises(BadInput, match=r"unpad_\(\): expected a torch\.nn\.Module, got NoneType\."):
        unpad_(None)


def test_options_that_make_no_sense():
    model = mlp()
    with pytest.raises(BadInput, match=r"to=12 is not a multiple of 8, which bf16 needs; use 8, 16, 64 or 128\."):
        pad_(model, to=12)
    with pytest.raises(BadInput, match=r"to=0 is not a multiple of 4, which tf32 needs"):
        pad_(model, to=0, precision="tf32")
    with pytest.raises(UnknownName, match=r"unknown precision 'bf61'\. Did you mean bf16"):
        pad_(model, precision="bf61")
    with pytest.raises(UnknownName, match=r"unknown module 'heda'"):
        pad_(model, only="heda")
    with pytest.raises(UnknownName, match=r"unknown module 'lm_head'"):
        pad_(model, head="lm_head")
    with pytest.raises(BadInput, match=r"pad_\(head='1'\): that is a ReLU\. The head is the nn\.Linear that makes"):
        pad_(model, head="1")
    with pytest.raises(BadInput, match=r"pad_\(logits='hidden'\): expected 'sliced' or 'masked'\."):
        pad_(model, logits="hidden")
    with pytest.raises(BadInput, match=r"no padded layer makes the logits\. Name the layer"):
        pad_(model, logits="masked")
    with pytest.raises(BadInput, match=r"expected a torch\.optim\.Optimizer, got list_iterator"):
        pad_(model, optimizer=[iter([])])
    assert all(type(module) in (nn.Sequential, nn.Linear, nn.ReLU) for module in model.modules())


# A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("logits", ["sliced", "masked"])
@pytest.mark.parametrize("kind", [LanguageModel, CodeTied])
def test_on_a_gpu_under_autocast(kind, logits):
    torch.manual_seed(0)
    model, padded, _ = pair(kind(5003, 256).cuda(), head="wte" if kind is CodeTied else "lm_head", logits=logits)
    tokens = torch.randint(5003, (4, 64), device="cuda")
    losses = []
    for each in (model, padded):
        with torch.autocast("cuda", torch.bfloat16):  # noqa: AMP303
            losses.append(F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()))
        losses[-1].backward()
    assert torch.allclose(*losses, rtol=1e-3)
    assert_same_gradients(model, padded, lambda a, b: torch.allclose(a, b, rtol=0.1, atol=1e-3))
