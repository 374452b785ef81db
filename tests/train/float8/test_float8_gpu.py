"""On a GPU with FP8: kernels against their reference, products against FP64, and training by each recipe."""

import importlib.util
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise import Engine, Policy
from ampwise.train.float8.backends import wrong_results
from ampwise.train.float8.fp8_cast import AMAX, E4M3, E5M2, SATURATED, cast_reference, cast_to_fp8, recast_fp8_
from ampwise.train.float8.fp8_linear import fp8_linear
from ampwise.train.float8.recipe import RECIPES, Fp8
from ampwise.train.float8.recipe_timing import CALLS, ROUNDS, WARM_UP, time_graphs_in_turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # what dynamo does itself
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence"),  # in torchao, read by Python 3.12
    pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype"),  # which torchao calls
    pytest.mark.filterwarnings("ignore:.*script_method"),  # what torch 2.11 says when inductor is loaded
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores"),  # what inductor says of every FP32 product
]

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs FP8 tensor cores", allow_module_level=True)

SHAPES = [(128, 64), (8192, 512), (1, 16), (17, 48), (1000, 4112), (4096, 1024), (300, 272)]
EPSILON = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # half an ulp of a value's neighbours


def codes(tensor):
    """NaN has two signs."""
    found = tensor.contiguous().view(torch.uint8)
    return torch.where(tensor.float().isnan(), torch.full_like(found, 127), found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", ["plain", "tiny", "odd"])
@pytest.mark.parametrize("current", [True, False])
def test_the_kernel_is_the_reference_bit_for_bit(shape, wide, dtype, kind, current):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda")
    if kind == "tiny":
        x = x * torch.randint(-30, 3, shape, device="cuda").float().exp2()
    if kind == "odd":
        flat = x.flatten()
        flat[:: max(1, flat.numel() // 7)] = torch.inf
        flat[1 :: max(2, flat.numel() // 5)] = torch.nan
        flat[2 :: max(3, flat.numel() // 11)] = -6e4
        x = flat.view(shape)
    x = x.to(wide)
    scale = None if current else torch.tensor(64.0, device="cuda")
    exact = x.double().sum(0)
    bound = x.double().abs().sum(0).nan_to_num(0.0, 0.0) * 2.0**-18  # FP32, in any order
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = cast_to_fp8(x, scale, e5m2=dtype is E5M2, rows=rows, columns=columns, sums=True)
        expected = cast_reference(x, scale, dtype is E5M2, rows, columns)
        assert torch.equal(found.sums.isnan(), exact.isnan())
        finite = exact.isfinite()
        assert ((found.sums.double() - exact).abs() <= bound)[finite].all()
        assert torch.equal(codes(found.rows), codes(expected[0]))
        # Scaled by NaN, the kernel's padding is NaN, too, as is everything else.
        within = slice(shape[0]) if current and kind == "odd" else slice(None)
        assert torch.equal(codes(found.columns)[..., within], codes(expected[1])[..., within])
        assert torch.equal(found.inverse.nan_to_num(-1.0), expected[2].nan_to_num(-1.0))
        seen = [each.nan_to_num(-1.0, -2.0) for each in (found.seen, expected[3])]
        if kind == "odd" and not current:  # a magnitude of inf or NaN: either says so
            seen = [each[SATURATED] for each in seen]
            assert not found.seen[AMAX].isfinite()
        assert torch.equal(*seen)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
def test_a_cast_again_is_as_a_first_one(wide, rows, columns):
    wanted = {"e5m2": False, "rows": rows, "columns": columns}
    first, second = (torch.randn(1000, 272, device="cuda").mul(scale).to(wide) for scale in (1.0, 1e-3))
    found = cast_to_fp8(first, None, **wanted)
    recast_fp8_(second, found)
    for ours, theirs in zip(found, cast_to_fp8(second, None, **wanted), strict=True):
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_the_kernels_pass_the_check_before_training():
    for current in (True, False):
        for e5m2 in (True, False):
            assert wrong_results(torch.device("cuda", 0), current, e5m2) == ""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_magnitudes_are_those_of_the_reference(shape, wide, bad):
    x = torch.randn(shape, device="cuda").to(wide)
    if bad is not None:
        x[-1, -1] = bad
    expected = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    found = cast_to_fp8(x, None, e5m2=False, rows=True, columns=False).seen[AMAX]
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("rows", [8192, 1000, 17, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("e5m2", "narrow"),
    [(True, (True, True, True)), (False, (True, True, True)), (True, (True, False, False)), (True, (False, True, True)),
     (True, (True, True, False))],
)  # fmt: skip
def test_products_are_near_those_of_fp64(rows, bias, wide, e5m2, narrow):
    torch.manual_seed(0)
    x = torch.randn(rows, 256, device="cuda", dtype=wide, requires_grad=True)
    weight = (torch.randn(512, 256, device="cuda") * 0.05).requires_grad_()
    b = torch.randn(512, device="cuda", requires_grad=True) if bias else None
    with torch.autocast("cuda", torch.bfloat16):
        y = fp8_linear(x, weight, b, None, None, e5m2, *narrow)
    g = torch.randn_like(y)
    leaves = [each for each in (x, weight, b) if each is not None]
    ours = torch.autograd.grad(y, leaves, g)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = F.linear(*exact)
    theirs = torch.autograd.grad(expected, exact, g.double())
    assert y.dtype == torch.bfloat16
    for found, true in zip((y, *ours), (expected, *theirs), strict=True):
        assert (found.double() - true).norm() <= 0.1 * true.norm()
    for found, leaf in zip(ours, leaves, strict=True):
        assert found.dtype == leaf.dtype


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=512, depth=3, checkpointed=False):
        super().__init__()
        self.inside = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 64)
        self.checkpointed = checkpointed

    def forward(self, x, y):
        x = self.inside(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), y.flatten())


def trained(precision, fp8=None, *, compiled=False, steps=12, checkpointed=False, **settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Net(checkpointed=checkpointed)
        x = torch.randint(64, (8, 50))
    y = (x * 5 + 1) % 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    engine = Engine(model, optimizer, precision if fp8 is None else fp8, clip_norm=1.0, **settings)
    if compiled:
        model.compile(fullgraph=not checkpointed)
    losses = [engine.step(model, x, y).loss for _ in range(steps)]
    return engine, model, losses


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_trains_by_each_recipe(recipe, compiled):
    if RECIPES[recipe][0] == "torchao" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    _, _, wide = trained("bf16", compiled=compiled)
    engine, _, losses = trained("fp8", Fp8(recipe), compiled=compiled)
    assert engine.skipped_steps == 0
    assert losses[-1] < 0.5 * losses[0]
    assert abs(losses[0] - wide[0]) < 0.02 * wide[0]
    assert abs(losses[-1] - wide[-1]) < 0.1 * wide[0]


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize(
    "way",
    ["checkpointed", "graph", "accumulate", "checkpointed and compiled", "accumulate and graph",
     "accumulate and compiled", "accumulate, graph and compiled"],
)  # fmt: skip
def test_it_is_the_same_by_other_ways(recipe, way):
    _, _, plain = trained("fp8", Fp8(recipe))
    accumulates = way.startswith("accumulate")
    settings = {"graph": "graph" in way, "accumulate": 2 if accumulates else 1}
    steps = 24 if accumulates else 12
    checkpointed = way.startswith("checkpointed")
    _, _, losses = trained(
        "fp8", Fp8(recipe), checkpointed=checkpointed, compiled=way.endswith("compiled"), steps=steps, **settings
    )
    losses = losses[::2] if accumulates else losses
    assert losses[0] == pytest.approx(plain[0], rel=1e-3)
    assert losses[-1] == pytest.approx(plain[-1], rel=0.2, abs=0.05)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_measured_says_its_times(compiled, graph):
    _, model, losses = trained("fp8", Fp8("measured", backend="ampwise"), compiled=compiled, graph=graph)
    assert losses[-1] < 0.5 * losses[0]
    text = Policy("fp8").describe(model)
    assert "measured:" in text
    assert "last layer" in text


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_auto_measures_times_and_errors_and_errors_again(monkeypatch, compiled, graph):
    monkeypatch.setattr("ampwise.train.fp8_plugin.DECIDE_AFTER", (1, 8))
    engine, model, losses = trained("fp8", Fp8("auto"), compiled=compiled, graph=graph)
    assert losses[-1] < 0.5 * losses[0]
    choices = engine.fp8_choices()
    assert choices.decided_after == 8
    assert choices.layers
    for choice in choices.layers:
        assert all(0.01 < error < 0.5 for error in choice.errors)
        assert choice.gain is not None
    assert "last layer" in Policy("fp8").describe(model)


@pytest.mark.parametrize("graph", [False, True])
def test_auto_with_some_matmuls_in_fp8_is_compiled_once_for_each_choice(monkeypatch, graph):
    """Whatever is faster: times by a rule."""
    monkeypatch.setattr("ampwise.train.fp8_plugin.DECIDE_AFTER", (1, 8, 14))

    def timer(works, device):
        counts = {name: len(name.partition(" ")[2].split("+")) if " " in name else 3 for name in works}
        return {name: [1e-3 if name == "bf16" else 1e-3 - 2e-4 * counts[name]] * ROUNDS for name in works}

    monkeypatch.setattr("ampwise.train.float8.recipe_timing.time_in_turns", timer)
    monkeypatch.setattr("ampwise.train.float8.recipe_timing.time_graphs_in_turns", timer)
    engine, model, losses = trained("fp8", Fp8("auto", limit=0.9), compiled=True, graph=graph, steps=10)
    first = {choice.matmuls for choice in engine.fp8_choices().layers}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine._plugin._auto._limit = 0.001  # as if errors had grown
    with torch.device("cuda"):
        x = torch.randint(64, (8, 50))
    losses += [engine.step(model, x, (x * 5 + 1) % 64).loss for _ in range(8)]
    assert first == {("forward", "dgrad", "wgrad")}
    assert {choice.matmuls for choice in engine.fp8_choices().layers} == {()}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert all(torch.isfinite(torch.tensor(losses)))


def test_what_is_replayed_is_timed_without_the_host():
    calls = []
    value = torch.zeros(1, device="cuda")
    found = time_graphs_in_turns({"bf16": lambda: calls.append(value.add_(1))}, value.device)
    assert len(found["bf16"]) == ROUNDS
    assert len(calls) == WARM_UP + 1  # by the host: once more to be captured
    assert value == 2 * WARM_UP + ROUNDS * CALLS


def test_what_cannot_be_captured_is_left_out_and_torch_is_as_before():
    value, before = torch.zeros(1, device="cuda"), torch.cuda.current_stream()
    works = {"bf16": lambda: value.add_(1), "waits": lambda: value.item()}
    assert list(time_graphs_in_turns(works, value.device)) == ["bf16"]
    assert torch.cuda.current_stream() == before
    assert torch.rand(2, device="cuda").isfinite().all()  # the generator does not believe that a capture goes on


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_compiled_layers_are_launched_by_torch_and_compute_the_same(recipe):
    _, _, eager = trained("fp8", Fp8(recipe), steps=4)
    _, _, compiled = trained("fp8", Fp8(recipe), steps=4, compiled=True)
    assert compiled == pytest.approx(eager, rel=2e-2)


def test_a_state_goes_on_where_it_was():
    engine, model, _ = trained("fp8", Fp8("delayed"), steps=5)
    # Copies: a state holds the tensors themselves, and training goes on.
    state, weights = deepcopy(engine.state_dict()), deepcopy(model.state_dict())
    moments = deepcopy(engine.optimizers[0].state_dict())
    torch.manual_seed(1)
    with torch.device("cuda"):
        x = torch.randint(64, (8, 50))
    expected = [engine.step(model, x, x).loss for _ in range(3)]
    other, again, _ = trained("fp8", Fp8("delayed"), steps=0)
    again.load_state_dict(weights)
    other.optimizers[0].load_state_dict(moments)
    other.load_state_dict(state)
    assert [other.step(again, x, x).loss for _ in range(3)] == pytest.approx(expected, rel=1e-5)
