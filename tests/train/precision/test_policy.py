"""A policy on a model: kept modules compute in their precision, everything else is as it was."""

import copy
import inspect
import itertools
import json
import pickle
import re
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise import BadInput, Policy
from ampwise.errors import UnknownName

from ...for_each import for_each

BF16 = torch.bfloat16
KEPT = Policy("bf16").keep("fp32", "*.router", "head")


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(Expert(width) for _ in range(2))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        return x + sum(expert(x) * shares[..., i : i + 1] for i, expert in enumerate(self.experts))


class Moe(nn.Module):
    reentrant = None

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class Wrapper(nn.Module):
    """As DistributedDataParallel is seen from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Moe()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, 16)


def autocast():
    return torch.autocast("cpu", BF16)


def run(model, x):
    with autocast():
        return model(x)


def spied(module):
    """What goes in and out of a module, call by call."""
    calls = []
    module.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
    return calls


def wrapped_by_compile(model):
    return torch.compile(model, backend="eager")


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def test_a_kept_module_computes_as_in_fp32_on_the_upcast_inputs(model, x):
    router, head = model.layers[1].router, model.head
    calls = {module: spied(module) for module in (router, head, model.embed)}
    with KEPT.apply(model):
        run(model, x)
    for module in (router, head):
        [(taken, given_back)] = calls[module]
        assert given_back.dtype is torch.float32
        assert torch.equal(given_back, module(taken.float()))
    assert calls[model.embed][0][1].dtype is BF16


def test_an_input_in_16_bits_is_cast(x):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    calls = spied(model[1])
    with Policy("bf16").keep("fp32", "1").apply(model):
        run(model, x)
    [(taken, given_back)] = calls
    assert taken.dtype is BF16  # hooks are outside
    assert torch.equal(given_back, model[1](taken.float()))


def test_gradients_have_the_types_of_what_they_belong_to(x):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    calls = spied(model[0])
    with Policy("bf16").keep("fp32", "1").apply(model):
        out = run(model, x)
    calls[0][1].retain_grad()
    out.sum().backward()
    assert calls[0][1].grad.dtype is BF16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_inner_rules_hold_inside_outer_ones(model, x):
    calls = {name: spied(model.get_submodule(name)) for name in ("layers.0", "layers.0.experts.1.up", "embed")}
    policy = Policy("bf16").keep("fp32", "layers.0").keep("fp16", "layers.0.experts.1")
    with policy.apply(model):
        run(model, x)
    assert calls["layers.0.experts.1.up"][0][1].dtype is torch.float16
    assert calls["layers.0"][0][1].dtype is torch.float32


def test_16_bits_in_a_model_that_has_no_autocast_around_it(model, x):
    calls = spied(model.head)
    with Policy("fp32").keep("bf16", "head").apply(model):
        assert model(x).dtype is BF16
    assert calls[0][0].dtype is torch.float32


def test_a_module_without_tensors_for_inputs_goes_by_its_parameters():
    class Prior(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self):
            return self.weight @ self.weight

    model = nn.ModuleDict({"prior": Prior()})
    with Policy("fp32").keep("bf16", "prior").apply(model):
        assert model["prior"]().dtype is BF16
    with autocast(), Policy("bf16").keep("fp32", "prior").apply(model):
        assert model["prior"]().dtype is torch.float32


# On and off


def forwards(model):
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


def test_taken_off_everything_is_as_before(model, x):
    before, plain, state = dict(vars(model.head)), run(model, x), list(model.state_dict())
    applied = KEPT.apply(model)
    assert "forward" in model.head.__dict__
    assert list(model.state_dict()) == state
    applied.remove()
    applied.remove()
    assert set(forwards(model).values()) == {None}
    assert vars(model.head) == before
    assert torch.equal(run(model, x), plain)


def test_a_forward_that_somebody_had_put_there_is_called_and_put_back(x):
    model = nn.Sequential(nn.Linear(16, 2))
    mine = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, model[0])
    model[0].forward = mine
    with Policy("bf16").keep("fp32", "0").apply(model):
        assert torch.equal(run(model, x), x @ model[0].weight.T * 2)
    assert model[0].__dict__["forward"] is mine


def test_the_signature_is_that_of_the_forward_before(model):
    with KEPT.apply(model):
        assert list(inspect.signature(model.head.forward).parameters) == ["input"]


def test_the_same_policy_twice_is_on_once(model, x):
    outer = KEPT.apply(model)
    before = forwards(model)
    with Policy("bf16").keep("fp32", "*.router").keep("fp32", "head").apply(model):
        assert forwards(model) == before
    assert forwards(model) == before
    outer.remove()
    assert set(forwards(model).values()) == {None}


def test_the_same_policy_on_a_larger_model_reaches_the_rest(model):
    policy = Policy("bf16").keep("fp32", "*router")
    policy.apply(model.layers[0])
    policy.apply(model).remove()
    assert set(forwards(model).values()) == {None}


def test_another_policy_is_refused_with_a_way_out_that_works(model):
    other = Policy("bf16").keep("fp32", "embed")
    KEPT.apply(model)
    before = forwards(model)
    with pytest.raises(BadInput) as error:
        other.apply(model)
    assert str(error.value) == (
        "Policy('bf16').keep('fp32', 'embed').apply(): another policy is applied to this model. "
        "Remove it first: Policy('bf16').keep('fp32', '*.router', 'head').apply(model).remove()"
    )
    assert forwards(model) == before
    Policy("bf16").keep("fp32", "*.router", "head").apply(model).remove()
    other.apply(model)


def test_a_forward_replaced_since_is_not_thrown_away(model):
    applied = KEPT.apply(model)
    model.head.forward = lambda x: x
    with pytest.raises(BadInput, match="forward of Linear was replaced"):
        applied.remove()
    assert "forward" in model.layers[0].router.__dict__


def test_a_module_of_two_names_is_wrapped_once_and_the_last_rule_wins(x):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model.append(model[0])
    policy = Policy("bf16").keep("fp16", "2").keep("fp32", "0")
    assert policy.modules(model) == {"0": "fp32", "2": "fp32"}
    with policy.apply(model):
        assert run(model, x).dtype is torch.float32
        assert model[0].forward.args[-1] is None
    assert set(forwards(model).values()) == {None}


# Copies, compilers, checkpoints


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_keeps_its_own_modules(model, x, copied):
    KEPT.apply(model)
    twin = copied(model)
    assert torch.equal(run(twin, x), run(model, x))
    with torch.no_grad():
        model.head.weight.zero_()
    assert run(twin, x).abs().sum() > 0
    assert run(twin, x).dtype is torch.float32
    KEPT.apply(twin).remove()
    assert set(forwards(twin).values()) == {None}
    assert "forward" in model.head.__dict__


@pytest.mark.half_by_day
@pytest.mark.parametrize(("before", "precision"), [(True, "fp32"), (False, "fp16")])
def test_compile_traces_it_whole(model, x, before, precision):
    torch._dynamo.reset()
    policy = Policy("bf16").keep(precision, "*.router", "head")
    if before:
        fast = compiled(model)
        plain = run(fast, x)
    applied = policy.apply(model)
    if not before:
        fast = compiled(model)
    expected = run(model, x)
    assert torch.equal(run(fast, x), expected)
    run(fast, x).float().sum().backward()
    applied.remove()
    if before:
        assert torch.equal(run(fast, x), plain)
        assert not torch.equal(plain, expected)


class ByHand(nn.Linear):
    """What a careful person writes instead."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight, self.bias)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_gradients_are_those_of_casts_by_hand(model, x, reentrant):
    model.reentrant = reentrant
    twin = copy.deepcopy(model)
    for module in (twin.head, *(layer.router for layer in twin.layers)):
        module.__class__ = ByHand
    KEPT.apply(model)
    outs = [run(one, x) for one in (model, twin)]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# Names


@pytest.mark.parametrize(
    "wrapped",
    [
        Wrapper,
        wrapped_by_compile,
        lambda model: Wrapper(wrapped_by_compile(model)),
        lambda model: wrapped_by_compile(Wrapper(model)),
        nn.DataParallel,
    ],
)
def test_a_wrapped_model_has_the_same_modules(model, wrapped):
    names = KEPT.modules(model)
    assert KEPT.modules(wrapped(model)) == names
    assert Policy().keep("fp32", "*").modules(wrapped(model)) == Policy().keep("fp32", "*").modules(model)
    assert names == {**{f"layers.{i}.router": "fp32" for i in range(3)}, "head": "fp32"}


def test_modules_wrapped_one_by_one(model, x):
    names = KEPT.modules(model)
    model.layers[0].router = wrapped_by_compile(model.layers[0].router)
    model.head = nn.DataParallel(model.head)
    assert KEPT.modules(model) == names
    KEPT.apply(model)
    assert "forward" in model.head.module.__dict__  # what is wrapped, not its wrapper
    assert "forward" not in model.head.__dict__


def test_a_module_called_module_is_no_wrapper_among_others():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert Policy().keep("fp32", "module").modules(model) == {"module": "fp32"}


def test_the_star_matches_all_but_the_root(model):
    matched = Policy().keep("fp32", "*").modules(model)
    called = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    assert list(matched) == called


def test_later_rules_win(model):
    policy = Policy().keep("fp32", "layers.*").keep("bf16", "*.router").keep("fp16", "layers.2.*")
    matched = policy.modules(model)
    assert (matched["layers.0.experts.0"], matched["layers.0.router"]) == ("fp32", "bf16")
    assert matched["layers.2.router"] == "fp16"


def test_a_rule_for_a_list_is_one_for_each_in_it(model, x):
    policy = Policy("bf16").keep("fp32", "layers.0.experts")
    assert policy.modules(model) == {"layers.0.experts.0": "fp32", "layers.0.experts.1": "fp32"}
    calls = spied(model.layers[0].experts[1].up)
    with policy.apply(model):
        run(model, x)
    assert calls[0][1].dtype is torch.float32


def test_a_glob_without_a_match_names_the_nearest(model):
    for method in (KEPT.keep("fp32", "*.ruoter").modules, KEPT.keep("fp32", "*.ruoter").apply):
        with pytest.raises(UnknownName) as error:
            method(model)
        assert str(error.value).startswith("unknown module '*.ruoter'. Did you mean *.router? ")
        assert str(error.value).endswith("model.named_modules(); * matches any part of a name, dots too.")
    assert set(forwards(model).values()) == {None}


def test_what_is_never_called_cannot_be_kept():
    model = nn.ModuleDict({"weights": nn.ParameterList([torch.ones(2)])})
    with pytest.raises(BadInput, match="'weights' matches only empty containers, which are never called"):
        Policy().keep("fp32", "weights").apply(model)


@for_each(
    ("build", "text"),
    [
        (
            lambda: Policy(16),
            "Policy(16): expected the name of a precision: 'auto', 'fp32', 'tf32', 'fp16', 'bf16', 'fp8', 'bf16-pure'.",
        ),
        (lambda: Policy("emulate:e8m0"), "e8m0 is an unsigned format"),
        (lambda: Policy("bf16", ["x"]), "Policy('bf16'): add rules with keep(precision, name)."),
        (lambda: KEPT.keep("fp32"), "Policy.keep('fp32'): expected names or globs"),
        (lambda: KEPT.keep("fp32", 3), "Policy.keep('fp32'): expected names of modules, got 3."),
        (lambda: KEPT.keep("fp32", ""), "Policy.keep('fp32'): '' is the model itself"),
        (lambda: KEPT.keep("tf32", "x"), "Policy.keep('tf32'): TF32 is switched for a whole device"),
        (lambda: KEPT.modules("model"), "expected a torch.nn.Module, got str."),
    ],
)
def test_arguments_that_make_no_sense(build, text):
    with pytest.raises(BadInput) as error:
        build()
    assert text in str(error.value)


def test_names_that_nobody_has_heard_of():
    with pytest.raises(UnknownName, match=r"unknown precision 'bf61'\. Did you mean bf16"):
        Policy("bf61")
    with pytest.raises(UnknownName, match=r"unknown format 'e4m4'\. Did you mean e4m3"):
        Policy("emulate:e4m4")
    with pytest.raises(UnknownName, match="unknown precision 'auto'"):
        KEPT.keep("auto", "x")


# Policies as values

patterns = st.text(min_size=1, max_size=8)
rules = st.tuples(st.sampled_from(["fp32", "fp16", "bf16"]), st.lists(patterns, min_size=1, max_size=3))


@st.composite
def policies(draw):
    policy = Policy(draw(st.sampled_from(["auto", "fp32", "tf32", "fp16", "bf16"])))
    for precision, globs in draw(st.lists(rules, max_size=4)):
        policy = policy.keep(precision, *globs)
    return policy


@given(policies())
def test_a_policy_survives_json_pickle_and_its_repr(policy):
    for same in (
        Policy.from_dict(json.loads(json.dumps(policy.as_dict()))),
        pickle.loads(pickle.dumps(policy)),
        eval(repr(policy)),
    ):
        assert same == policy
        assert hash(same) == hash(policy)


def test_the_shape_of_what_is_saved():
    assert Policy("bf16").keep("fp32", "head").as_dict() == {
        "version": 1,
        "base": "bf16",
        "keep": [{"pattern": "head", "precision": "fp32"}],
    }


@for_each(
    ("data", "text"),
    [
        (None, "expected a policy as a dict, got None."),
        ({"base": "bf16"}, "a policy has 'base', 'keep', 'version'; missing or unknown: 'keep', 'version'."),
        ({"version": 2, "base": "bf16", "keep": []}, "expected version 1, got 2."),
        ({"version": True, "base": "bf16", "keep": []}, "expected version 1, got True."),
        ({"version": 1, "base": "bf61", "keep": []}, "unknown precision 'bf61'."),
        ({"version": 1, "base": "bf16", "keep": "x"}, "expected a list of rules in 'keep', got 'x'."),
        ({"version": 1, "base": "bf16", "keep": ["x"]}, "expected a rule as a dict, got 'x'."),
        (
            {"version": 1, "base": "bf16", "keep": [{"pattern": 3, "precision": "fp32"}]},
            "expected names of modules, got 3.",
        ),
    ],
)
def test_what_cannot_be_read_says_why(data, text):
    with pytest.raises(BadInput) as error:
        Policy.from_dict(data)
    assert str(error.value).startswith("Policy.from_dict(): ")
    assert text in str(error.value)


def test_a_policy_does_not_change(model):
    one = Policy("bf16")
    assert one.keep("fp32", "head") != one
    assert one == Policy("bf16")
    with pytest.raises(AttributeError):
        one.base = "fp16"


# The text


def test_describe(model):
    assert KEPT.describe(model).splitlines() == [
        "bf16 base; parameters: 6.7 k in bf16, 182 in fp32",
        "module                            class   params      runs in  why",
        "embed                             Linear     272      bf16     base",
        "layers.{0..2}.router              Linear      34  ×3  fp32     kept by '*.router'",
        "layers.{0..2}.experts.{0,1}.up    Linear     544  ×6  bf16     base",
        "layers.{0..2}.experts.{0,1}.down  Linear     528  ×6  bf16     base",
        "head                              Linear      80      fp32     kept by 'head'",
    ]


def test_describe_splits_where_layers_differ(model):
    policy = Policy("bf16").keep("fp32", "layers.1").keep("fp16", "layers.1.experts.0.act")
    assert policy.describe(model).splitlines() == [
        "bf16 base; parameters: 4.7 k in bf16, 2.2 k in fp32",
        "module                           class   params      runs in  why",
        "embed                            Linear     272      bf16     base",
        "layers.{0,2}.router              Linear      34  ×2  bf16     base",
        "layers.{0,2}.experts.{0,1}.up    Linear     544  ×4  bf16     base",
        "layers.{0,2}.experts.{0,1}.down  Linear     528  ×4  bf16     base",
        "layers.1                         Block        -      fp32     kept by 'layers.1'",
        "layers.1.router                  Linear      34      fp32     inside layers.1",
        "layers.1.experts.{0,1}.up        Linear     544  ×2  fp32     inside layers.1",
        "layers.1.experts.0.act           GELU         -      fp16     kept by 'layers.1.experts.0.act'",
        "layers.1.experts.{0,1}.down      Linear     528  ×2  fp32     inside layers.1",
        "head                             Linear      80      bf16     base",
    ]


def test_describe_is_the_same_for_a_wrapped_model(model):
    assert KEPT.describe(Wrapper(wrapped_by_compile(model))) == KEPT.describe(model)


def test_describe_shows_parameters_of_the_model_itself_and_counts_shared_ones_in_each():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 100), "head": nn.Linear(100, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    model.scale = nn.Parameter(torch.ones(3))
    text = Policy("bf16").keep("fp32", "head").describe(model)
    assert text.splitlines()[0] == "bf16 base; parameters: 1.0 k in bf16, 1.0 k in fp32"
    assert "(the model itself)  ModuleDict" in text


def test_describe_of_nothing():
    assert Policy().describe(nn.ReLU()).splitlines()[0] == "auto base; parameters: none"


def names_in(text):
    """Every module that a description stands for."""
    for line in text.splitlines()[2:]:
        parts = re.split(r"(\{[^}]*\})", line.split()[0])
        spans = [_numbers(part) if part.startswith("{") else [part] for part in parts]
        yield from ("".join(choice) for choice in itertools.product(*spans))


def _numbers(span):
    for run in span.strip("{}").split(","):
        first, _, last = run.partition("..")
        yield from map(str, range(int(first), int(last or first) + 1))


@given(st.sets(st.sampled_from([f"layers.{i}.experts.{j}" for i in range(3) for j in range(2)] + ["layers.1", "head"])))
def test_describe_names_every_module_once(kept):
    model = Moe(width=2)
    policy = Policy("bf16").keep("fp32", *sorted(kept)) if kept else Policy("bf16")
    named = sorted(names_in(policy.describe(model)))
    own = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert named == sorted(own | kept)


def test_only_products_are_emulated():
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    first, _, *rows = Policy("emulate:e4m3").describe(model).splitlines()
    assert first == "emulate:e4m3 base; parameters: 72 in emulate:e4m3, 64 in fp32"
    assert [row.split()[3] for row in rows] == ["fp32", "fp32", "emulate:e4m3", "fp32"]
    assert [row.endswith("no matmuls") for row in rows] == [True, True, False, True]


def test_a_base_that_is_emulated_is_described_and_comes_back_from_a_checkpoint():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    policy = Policy("emulate:mxfp8").keep("fp32", "1")
    assert policy.describe(model).splitlines() == [
        "emulate:mxfp8 base; parameters: 72 in emulate:mxfp8, 18 in fp32",
        "module  class   params  runs in        why",
        "0       Linear      72  emulate:mxfp8  base",
        "1       Linear      18  fp32           kept by '1'",
    ]
    assert Policy.from_dict(policy.as_dict()) == policy
