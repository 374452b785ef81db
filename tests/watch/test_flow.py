"""Dtypes of modules: recorded in one step, without an effect on numbers, graphs or saved files."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.numbers.formats.catalog import find_format
from ampwise.watch import module_hooks as flow
from ampwise.watch.inspection import dtype_name, tensors_in
from ampwise.watch.models import Hook, name_without_wrappers
from ampwise.watch.watch import Watch


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.frozen = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *, extra=None):
        with torch.no_grad():
            kept = self.frozen(x)
        return {"out": [self.up(self.norm(x)) + kept], "extra": extra}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(4, 8), Block(), nn.Linear(8, 1)

    def forward(self, tokens):
        inside = self.block(self.embed(tokens), extra=torch.ones(1, dtype=torch.float64))["out"][0]
        with torch.autocast("cpu", enabled=False):
            return self.head(inside.float())


def train(model, steps=3, run=None, optimizer=None, between=None, inputs=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(4) if inputs is None else inputs
    run = model if run is None else run
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        if between is not None:
            between(step)
    return model


def watched(script):
    with Watch(timing=False) as watch:
        result = script()
    assert not watch.failures
    return watch.facts(), result


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
        if isinstance(hook, Hook)
    ]


def said(facts):
    return [sentence for sentence in facts["not_measured"] if sentence.startswith("Dtypes of modules")]


def names(facts):
    return [row["module"] for row in facts["dtype_flow"]]


def test_each_module_says_what_it_took_and_gave():
    facts, _ = watched(lambda: train(Net()))
    own = {"model": "Net", "autocast": "bf16", "device": "cpu", "calls": 1}
    fp32, bf16, fp64 = ["fp32"], ["bf16"], ["fp64"]
    assert facts["dtype_flow"] == [
        {"module": "Net", "kind": "Net", "takes": [], "gives": fp32, "parameters": [], **own},
        {"module": "embed", "kind": "Embedding", "takes": [], "gives": fp32, "parameters": fp32, **own},
        {"module": "block", "kind": "Block", "takes": fp32 + fp64, "gives": bf16 + fp64, "parameters": [], **own},
        {"module": "block.frozen", "kind": "Linear", "takes": fp32, "gives": bf16, "parameters": fp32, **own},
        {"module": "block.norm", "kind": "LayerNorm", "takes": fp32, "gives": fp32, "parameters": fp32, **own},
        {"module": "block.up", "kind": "Linear", "takes": fp32, "gives": bf16, "parameters": fp32, **own},
        {"module": "head", "kind": "Linear", "takes": fp32, "gives": fp32, "parameters": fp32, **own, "autocast": None},
    ]  # fmt: skip
    assert not said(facts)


def test_only_the_second_step_is_looked_at_and_hooks_are_gone_after_it():
    model, counts = Net(), []
    facts, _ = watched(lambda: train(model, 4, between=lambda step: counts.append(len(hooks_of(model)))))
    before, within, after, _ = counts
    assert (within, before, after) == (2, 2 + 2 * 7, 2)  # two of them tell when the model runs
    assert {row["calls"] for row in facts["dtype_flow"]} == {1}
    assert not hooks_of(model)


def test_calls_are_counted_and_evaluation_is_not():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared, nn.Linear(4, 1))

    def evaluate(step):
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=torch.float64).float())

    facts, _ = watched(lambda: train(model, inputs=torch.ones(2, 4), between=evaluate))
    assert {row["module"]: row["calls"] for row in facts["dtype_flow"]} == {"Sequential": 1, "0": 2, "2": 1}


def test_a_module_in_two_precisions_says_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.layer(x)
            return self.layer(x)

    facts, _ = watched(lambda: train(Twice(), inputs=torch.ones(2, 4)))
    (row,) = [row for row in facts["dtype_flow"] if row["module"] == "layer"]
    assert (row["takes"], row["gives"], row["autocast"]) == (["fp32"], ["fp32", "bf16"], "off and bf16")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_stays_in_its_order(reentrant):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    facts, _ = watched(lambda: train(Recomputed(), inputs=torch.ones(2, 4, requires_grad=True)))
    assert names(facts) == ["Recomputed", "layers.0", "layers.1", "layers.2"]
    assert [row["calls"] for row in facts["dtype_flow"]] == [1, 2, 2, 2]


def test_wrappers_leave_no_trace_in_names():
    facts, _ = watched(lambda: train(nn.DataParallel(Net())))
    assert names(facts)[:3] == ["DataParallel", "Net", "embed"]
    assert name_without_wrappers("module.submodule.weight") == "submodule.weight"
    assert name_without_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"


def test_models_of_two_optimizers():
    one, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))

    def script():
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
        for _ in range(3):
            other(one(torch.ones(2, 4))).sum().backward()
            first.step()
            second.step()

    facts, _ = watched(script)
    assert {(row["model"], row["module"]) for row in facts["dtype_flow"]} == {
        ("Linear", "Linear"),
        ("Sequential", "Sequential"),
        ("Sequential", "0"),
    }


def test_two_models_of_one_optimizer_are_distinguished():
    one, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
    optimizer = lambda: torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)  # noqa: E731
    facts, _ = watched(lambda: train(None, run=lambda x: other(one(x)), optimizer=optimizer(), inputs=torch.ones(2, 4)))
    assert sorted(names(facts)) == ["Linear", "Sequential", "Sequential.0"]


def test_there_is_an_end_to_the_rows(monkeypatch):
    monkeypatch.setattr(flow, "MOST", 3)
    facts, _ = watched(lambda: train(Net()))
    assert names(facts) == ["Net", "embed", "block"]
    assert said(facts) == ["Dtypes of modules: only the first 3 modules were recorded."]


# What is not looked at, and why

SHORT = "Dtypes of modules were not recorded: the run ended before an optimizer's second step did."


def compiled_function(model):
    return torch.compile(lambda x: model(x).sum(), backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def inner_compiled(model):
    model.block.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "expected", "why"),
    [
        (lambda model: torch.compile(model, backend="eager"), [], "Net left out; it is compiled"),
        (compiled_in_place, [], "Net left out; it is compiled"),
        (inner_compiled, ["Net", "embed", "head"], "Block left out; it is compiled"),
        (compiled_function, [], "the script has a compiled function"),
    ],
)
def test_what_is_compiled_is_left_alone(make, expected, why):
    def script():
        model = Net()
        return train(model, run=make(model))

    facts, _ = watched(script)
    assert names(facts) == expected
    (sentence,) = said(facts)
    assert why in sentence


@pytest.mark.filterwarnings("ignore")
def test_compiling_takes_the_hooks_off_first():
    model, seen = Net(), []

    def between(step):
        if step == 1:
            seen.append(len(hooks_of(model)))
            model.block.compile(backend="eager")
            seen.append(len(hooks_of(model)))

    facts, _ = watched(lambda: train(model, between=between))
    assert seen == [16, 2]
    assert "the modules of Net were about to be compiled" in said(facts)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["a part", "a function", "late"])
def test_a_watched_run_compiles_as_often(way):
    from torch._dynamo.testing import CompileCounter

    def script():
        torch._dynamo.reset()
        torch.manual_seed(0)
        counter, model = CompileCounter(), nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
        run = model
        if way == "a part":
            model[0] = torch.compile(model[0], backend=counter, fullgraph=True)
        elif way == "a function":  # which meets the modules for the first time while they might be looked at
            compiled = torch.compile(lambda x: model(x), backend=counter, fullgraph=True)
            calls = []
            run = lambda x: (calls.append(1), (compiled if len(calls) > 1 else model)(x))[1]  # noqa: E731

        def between(step):
            if way == "late" and step == 1:
                model[0] = torch.compile(model[0], backend=counter, fullgraph=True)

        train(model, 5, run=run, between=between, inputs=torch.ones(3, 4))
        return counter.frame_count, [each.sum().item() for each in model.parameters()]

    plain = script()
    assert plain[0] == 1
    assert watched(script)[1] == plain


def test_a_run_that_is_too_short_says_so():
    for steps in (0, 1):
        facts, _ = watched(lambda steps=steps: train(Net(), steps))
        assert (facts["dtype_flow"], said(facts)) == ([], [SHORT])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_takes_no_hooks_and_is_watched_all_the_same():
    with Watch(timing=False) as watch:
        train(torch.jit.script(nn.Sequential(nn.Linear(4, 1))), inputs=torch.ones(2, 4))
    assert not watch.failures
    assert watch.steps == 3
    (sentence,) = said(watch.facts())
    assert sentence.endswith("left out; TorchScript modules take no hooks.")


def test_what_would_compute_otherwise_is_left_out():
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    facts, _ = watched(lambda: train(nn.Sequential(layer, nn.Linear(8, 1)), inputs=torch.ones(2, 3, 8)))
    assert names(facts) == ["Sequential", "1"]
    assert said(facts) == [
        "Dtypes of modules: TransformerEncoderLayer left out; a hook would switch off its fast path."
    ]


def test_parameters_of_no_model():
    weight = nn.Parameter(torch.ones(4, 1))
    facts, _ = watched(
        lambda: train(None, run=lambda x: x @ weight, optimizer=torch.optim.SGD([weight]), inputs=torch.ones(2, 4))
    )
    assert said(facts) == ["Dtypes of modules were not recorded: no model was found with the parameters of SGD."]


def test_modules_that_are_never_called():
    model = nn.Linear(4, 1)
    facts, _ = watched(lambda: train(model, run=lambda x: x @ model.weight.t() + model.bias, inputs=torch.ones(2, 4)))
    assert said(facts) == ["Dtypes of modules were not recorded: the modules of Linear never ran."]


# Nothing of it is left


def bits(model):
    return [each.detach().double().sum().item().hex() for each in model.state_dict().values()]


def test_the_run_is_the_same_to_the_last_bit():
    def script():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        train(model, 5, inputs=torch.randn(4, 8), optimizer=torch.optim.AdamW(model.parameters()))
        return bits(model), torch.randn(1).item()

    plain = script()
    facts, result = watched(script)
    assert facts["dtype_flow"]
    assert result == plain


def test_what_is_saved_while_it_looks_has_nothing_of_ours():
    def script():
        model, saved = Net(), []

        def between(step):
            for save in (torch.save, pickle.dump):
                file = io.BytesIO()
                save(model if save is torch.save else copy.deepcopy(model), file)
                saved.append(file.getvalue())

        train(model, 3, between=between)
        return saved

    plain = script()
    _, saved = watched(script)
    assert [len(each) for each in saved[::2]] == [len(each) for each in plain[::2]]
    assert not any(b"ampwise" in each for each in saved)
    for each in saved[::2]:
        loaded = torch.load(io.BytesIO(each), weights_only=False)
        assert not any(
            vars(module)[marks] for module in loaded.modules() for marks in vars(module) if "_forward_" in marks
        )
    for each in saved[1::2]:
        pickle.loads(each)(torch.arange(4))


def test_a_copy_made_while_it_looks_says_nothing_later():
    model, copies = Net(), []

    def between(step):
        copies.append(copy.deepcopy(model))
        if step == 2:  # the first copy has the hooks for good
            copies[0](torch.arange(4)).sum().backward()

    facts, _ = watched(lambda: train(model, between=between))
    assert len(hooks_of(copies[0])) > len(hooks_of(copies[1]))
    assert {row["calls"] for row in facts["dtype_flow"]} == {1}


def test_a_forward_that_fails_does_not_seem_to_go_on():
    class Fails(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return super().forward(x)

    model = nn.Sequential(Fails(4, 1))

    def between(step):
        if step == 1:
            with pytest.raises(ValueError, match="three"):
                model(torch.ones(3, 4))
            with torch.no_grad():
                model(torch.ones(2, 4))

    facts, _ = watched(lambda: train(model, inputs=torch.ones(2, 4), between=between))
    assert {row["module"]: row["calls"] for row in facts["dtype_flow"]} == {"Sequential": 2, "0": 2}


# Names and parts


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_names_of_formats_are_those_of_the_formats(name):
    dtype = getattr(torch, name)
    assert find_format(dtype_name(dtype)) is find_format(dtype)
    assert dtype_name(dtype).startswith(("fp", "bf"))


def test_tensors_are_found_in_what_modules_take():
    one = torch.ones(1)
    assert list(tensors_in({"a": [one, (one, {"b": one})], "c": 3, "d": None})) == [one, one, one]
    endless = []
    endless.append(endless)
    assert list(tensors_in(endless)) == []


def test_of_many_optimizers_the_models_of_the_first_are_recorded():
    def script():
        models = [nn.Linear(2, 2) for _ in range(flow.MOST_OPTIMIZERS + 3)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    facts, _ = watched(script)
    assert len(facts["dtype_flow"]) == flow.MOST_OPTIMIZERS
    assert said(facts) == [f"Dtypes of modules were recorded for the first {flow.MOST_OPTIMIZERS} optimizers only."]
