"""Layers put on and taken off: ours, torchao's, and Transformer Engine's by a stand-in."""

import copy
import importlib.metadata
import importlib.util
import pickle
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise import Policy
from ampwise.errors import BadInput, MissingDependency
from ampwise.train.float8 import backends as by_transformer_engine
from ampwise.train.float8 import torchao_backend as by_torchao
from ampwise.train.float8.backends import make_forward
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.layer_forward import AmpwiseForward, has_fp8_forward, install_forward, remove_forward
from ampwise.train.float8.recipe import RECIPES, Fp8
from ampwise.train.float8.torchao_backend import prepare

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # what torch says of a CPU without BF16
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
OF_TORCHAO = [recipe for recipe, backends in RECIPES.items() if backends[0] == "torchao"]


@pytest.fixture(autouse=True)
def as_in_training():
    with torch.autocast("cpu", torch.bfloat16):
        yield


def layer(inputs=48, outputs=32):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def near(a, b):
    return bool((a - b).norm() < 0.1 * b.norm())


def test_a_layer_stays_the_object_it_is():
    module, x = layer(), torch.randn(4, 48)
    plain = module(x)
    heard = []
    module.register_forward_hook(lambda module, args, out: heard.append(out))
    keys, parameters = list(module.state_dict()), list(module.parameters())
    install_forward(module, AmpwiseForward(e5m2=True))
    narrow = module(input=x)
    assert near(narrow, plain)
    assert not torch.equal(narrow, plain)
    assert heard[-1] is narrow
    assert type(module) is nn.Linear
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    install_forward(module, AmpwiseForward(e5m2=False))  # in its place
    remove_forward(module)
    assert "forward" not in module.__dict__
    assert torch.equal(module(x), plain)
    remove_forward(module)  # nothing to do


def test_where_a_model_turns_autocast_off_it_gets_fp32():
    module, x = layer(), torch.randn(4, 48)
    install_forward(module, AmpwiseForward(e5m2=True))
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
        assert module(x.bfloat16()).dtype == torch.bfloat16  # in 16 bits it is FP8, with or without autocast
    assert module(x).dtype == torch.bfloat16


def test_copies_have_weights_and_scales_of_their_own():
    module, x = layer(), torch.randn(4, 48)
    slot, scales = torch.zeros(3, 2, requires_grad=True), torch.tensor([64.0, 512.0, 1024.0])
    install_forward(module, AmpwiseForward(e5m2=True), slot, scales)
    other = copy.deepcopy(module)
    assert torch.equal(other(x), module(x))
    with torch.no_grad():
        module.weight.zero_()
        scales.fill_(1.0)
    assert other(x).norm() > module(x).norm()
    assert other.fp8_scales.tolist() == [64.0, 512.0, 1024.0]
    assert has_fp8_forward(other)


def test_a_pickled_layer_is_a_plain_one_that_can_be_fitted():
    module, x = layer(), torch.randn(4, 48)
    plain = module(x)
    install_forward(module, AmpwiseForward(e5m2=True))
    other = pickle.loads(pickle.dumps(module))
    assert torch.equal(other(x), plain)
    assert not has_fp8_forward(other)
    assert [choice.fp8 for choice in choose_layers(nn.Sequential(other), {}, Fp8(narrow=("0",))).values()] == [True]
    install_forward(other, AmpwiseForward(e5m2=True))
    assert torch.equal(other(x), module(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
@pytest.mark.parametrize("delayed", [False, True])
def test_blocks_alike_are_compiled_once(delayed):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    blocks = [nn.Sequential(layer(48, 48), nn.ReLU(), layer(48, 48)) for _ in range(4)]
    for block in blocks:
        for module in (block[0], block[2]):
            given = (torch.zeros(3, 2, requires_grad=True), torch.ones(3)) if delayed else ()
            install_forward(module, make_forward(module, Fp8()), *given)
        block.compile(backend=backend, fullgraph=True)
    x = torch.randn(4, 48, dtype=torch.bfloat16, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_weight_in_parts_is_refused():
    module = layer()
    install_forward(module, AmpwiseForward(e5m2=True))
    module.weight.device_mesh = "two ranks"
    with pytest.raises(BadInput, match=r"split over ranks\. For .* Fp8\(\"tensorwise\"\)"):
        module(torch.randn(4, 48))


# torchao


@needs_torchao
@pytest.mark.parametrize("recipe", OF_TORCHAO)
def test_torchaos_layers_compute_as_torchao_does(recipe):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    module, x = layer(), torch.randn(16, 48, dtype=torch.bfloat16)  # torchao asks for CUDA's autocast alone
    before = dict(module.__dict__)
    theirs = copy.deepcopy(module)
    config = Float8LinearConfig.from_recipe_name(by_torchao.NAMES[recipe])
    object.__setattr__(config, "emulate", True)
    theirs = convert_to_float8_training(theirs, config=config)
    install_forward(module, make_forward(module, Fp8(recipe)))
    out = [each(x) for each in (module, theirs)]
    for each in out:
        each.square().sum().backward()
    assert torch.equal(*out)
    assert torch.equal(module.weight.grad, theirs.weight.grad)
    assert torch.equal(module.bias.grad, theirs.bias.grad)
    remove_forward(module)
    assert module.__dict__.keys() == before.keys()
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))


@needs_torchao
@pytest.mark.parametrize("recipe", OF_TORCHAO)
@pytest.mark.parametrize("shape", [(3, 7), (1,), (2, 0), (16,)])
def test_torchaos_layers_take_any_number_of_rows(monkeypatch, recipe, shape):
    summed = []
    mm = torch.mm

    def noted(a, b, *args, **kwargs):
        summed.append(a.shape[1])
        return mm(a, b, *args, **kwargs)

    module = layer()
    install_forward(module, make_forward(module, Fp8(recipe)))
    monkeypatch.setattr(torch, "mm", noted)
    x = torch.randn(*shape, 48, requires_grad=True)
    out = module(x)
    out.float().square().sum().backward()
    wide = F.linear(x, module.weight, module.bias)
    assert out.shape == wide.shape
    assert out.numel() == 0 or near(out, wide)
    gradient = torch.autograd.grad(wide.float().square().sum(), module.weight)[0]
    assert torch.linalg.vector_norm(module.weight.grad - gradient) <= 0.1 * gradient.norm()
    assert all(each % 16 == 0 for each in summed)  # which is what a GPU takes
    assert module.bias.grad is not None  # zeros of an empty batch, which DDP waits for


@needs_torchao
def test_prepare_puts_torchaos_layers_in_for_fsdp2():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    prepare(model, Fp8("tensorwise", narrow=("1",)), emulate=True)
    assert [type(each).__name__ for each in model] == ["Linear", "Float8Linear", "Linear"]
    assert type(model[1].weight.data).__name__ == "WeightWithDynamicFloat8CastTensor"
    (line,) = [line for line in Policy("bf16").describe(model).splitlines() if "Float8Linear" in line]
    assert "fp8 " in line  # whatever the precision around it


def test_prepare_is_for_torchaos_tensorwise():
    with pytest.raises(BadInput, match=r"prepare\(fp8='current'\): expected a recipe of torchao, 'ten"):
        prepare(layer(), "current")


def test_torchao_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        MissingDependency, match=r"Fp8\('rowwise'\) needs .* Install it: pip install 'ampwise\[fp8\]'; or use 'c"
    ):
        by_torchao.TorchaoForward("rowwise")


@pytest.mark.parametrize("version", ["0.7.0", "1.2.0"])
def test_torchao_of_another_version(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "torchao.float8", ModuleType("torchao.float8"))
    with pytest.raises(MissingDependency, match=f"needs torchao 0.12 or later, below 1.0; {version} is installed"):
        by_torchao.TorchaoForward("rowwise")


# Transformer Engine


@pytest.fixture(params=["fp8_autocast", "autocast"])
def stand_in(request, monkeypatch):
    """As its documentation has it; the older name of its context, and the newer."""
    seen = []

    class Linear(nn.Linear):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

        def forward(self, x, is_first_microbatch=None):
            seen.append((active[-1], self.training))
            return super().forward(x)

        def get_extra_state(self):  # a pickle, as a tensor
            seen.append("saved")
            return torch.zeros(1, dtype=torch.uint8)

        def set_extra_state(self, state):
            seen.append("unpickled")

    active = [None]

    @contextmanager
    def older(enabled=True, fp8_recipe=None):
        active.append(fp8_recipe if enabled else None)
        yield
        active.pop()

    @contextmanager
    def newer(enabled=True, recipe=None):
        with older(enabled, recipe):
            yield

    te = ModuleType("transformer_engine.pytorch")
    te.Linear = Linear
    setattr(te, request.param, older if request.param == "fp8_autocast" else newer)
    recipes = ModuleType("transformer_engine.common.recipe")
    recipes.Format = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    recipes.DelayedScaling = lambda **kwargs: {"delayed": kwargs}
    recipes.Float8CurrentScaling = lambda **kwargs: {"current": kwargs}
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, te.__name__, te)
    monkeypatch.setitem(sys.modules, recipes.__name__, recipes)
    return seen


def test_transformer_engine_computes_with_the_modules_parameters(stand_in):
    module, x = layer(), torch.randn(4, 48)
    plain = module(x)
    keys = list(module.state_dict())
    install_forward(
        module, make_forward(module, Fp8("delayed", "transformer-engine", history=4, margin=1, update="last"))
    )
    out = module.eval()(x)
    assert torch.equal(out, plain)
    out.sum().backward()
    assert module.weight.grad is not None
    assert list(module.state_dict()) == keys
    delayed = {"margin": 1, "fp8_format": "hybrid", "amax_history_len": 4, "amax_compute_algo": "most_recent"}
    assert stand_in == [({"delayed": delayed}, False)]
    module.weight = nn.Parameter(torch.zeros_like(module.weight))  # as FSDP does
    assert torch.equal(module(x), module.bias.expand(4, -1).bfloat16())


def test_transformer_engine_is_given_no_saved_state_as_it_would_run_what_is_in_it(stand_in):
    module = layer()
    install_forward(module, make_forward(module, Fp8("delayed", "transformer-engine")))
    saved = module.state_dict()
    module.load_state_dict({**saved, "_extra_state": torch.zeros(1, dtype=torch.uint8)}, strict=False)
    assert list(saved) == ["weight", "bias"]
    assert stand_in == []


def test_transformer_engine_with_current_scaling(stand_in):
    module = layer()
    install_forward(module, make_forward(module, Fp8("current", "transformer-engine")))
    module(torch.randn(4, 48))
    assert stand_in == [({"current": {"fp8_format": "hybrid"}}, True)]


def test_transformer_engine_that_is_missing():
    if importlib.util.find_spec(by_transformer_engine.TRANSFORMER_ENGINE_PACKAGE):
        pytest.skip("it is installed")
    with pytest.raises(MissingDependency, match=r"Transformer Engine is not installed .* or remove backend"):
        make_forward(layer(), Fp8("delayed", "transformer-engine"))
