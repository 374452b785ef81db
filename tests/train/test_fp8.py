"""An engine in FP8, on a CPU that is taken for a device that has it: the products are then those of the same values."""

import copy
import io
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ampwise import Engine, Fp8, Policy
from ampwise.errors import BadInput, MissingDependency, PrecisionUnavailable
from ampwise.train import engine as engines
from ampwise.train.float8 import recipe_timing as measuring
from ampwise.train.float8.layer_choice import torchao_layers
from ampwise.train.float8.layer_forward import has_fp8_forward
from ampwise.train.float8.recipe import MATMULS
from ampwise.train.float8.recipe_timing import TimedRecipe
from ampwise.train.float8.torchao_backend import prepare
from ampwise.train.precision.precision import EXTRA_PRECISIONS, ChosenPrecision

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

BLOCKS = ("blocks.*",)
NAMES = [f"blocks.{place}.{name}" for place in range(2) for name in ("up", "down")]


@pytest.fixture(autouse=True)
def has_fp8(monkeypatch):
    real = engines.choose_precision
    fp8 = ChosenPrecision(EXTRA_PRECISIONS["fp8"], "in a test")
    monkeypatch.setattr(
        engines, "choose_precision", lambda asked, device: fp8 if asked == "fp8" else real(asked, device)
    )


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, checkpointed=False):
        super().__init__()
        self.inside, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def training(fp8=None, precision="fp8", *, seed=0, checkpointed=False, **settings):
    torch.manual_seed(seed)
    model = Net(checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if fp8 is not None:
        precision = fp8 if precision == "fp8" else Policy("fp8", precision.rules, fp8)
    engine = Engine(model, optimizer, precision, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, engine=engine)


def measured_as(monkeypatch, recipe):
    """Whatever their times: all layers by this recipe."""
    monkeypatch.setattr(
        "ampwise.train.fp8_plugin.time_recipes",
        lambda shapes, *_, **__: {each: TimedRecipe(recipe=recipe, why="it is") for each in shapes},
    )


def train(run, steps, model=None):
    generator = torch.Generator().manual_seed(1)
    called = run.model if model is None else model

    def loss(x, y):
        return F.cross_entropy(called(x).flatten(0, 1).float(), y.flatten())

    losses = []
    for _ in range(steps):
        x = torch.randint(16, (4, 6), generator=generator)
        losses.append(run.engine.step(loss, x, (3 * x + 1) % 16).loss)
    return losses


def fitted(model):
    return [name for name, module in model.named_modules() if has_fp8_forward(module)]


@pytest.mark.half_by_day
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_it_trains_as_bf16_does(recipe):
    narrow, wide = training(Fp8(recipe, narrow=BLOCKS)), training(precision="bf16")
    assert sorted(fitted(narrow.model)) == sorted(narrow.engine.fp8_layers) == sorted(NAMES)
    ours, theirs = train(narrow, 30), train(wide, 30)
    assert ours != theirs
    assert ours[0] == pytest.approx(theirs[0], rel=0.02)
    assert ours[-1] == pytest.approx(theirs[-1], abs=0.05 * theirs[0])
    assert narrow.engine.skipped_steps == 0
    assert wide.engine.fp8_layers == []


@pytest.mark.half_by_day
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_checkpointed_it_is_the_same(recipe):
    runs = [training(Fp8(recipe, narrow=BLOCKS), checkpointed=each) for each in (False, True)]
    assert train(runs[0], 6) == train(runs[1], 6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
@pytest.mark.parametrize("matmuls", [("forward",), ("dgrad", "wgrad"), ("forward", "dgrad")])
def test_some_matmuls_are_in_bf16_also_checkpointed_and_compiled(matmuls):
    fp8 = Fp8(narrow=BLOCKS, matmuls=matmuls)
    runs = [training(fp8), training(fp8, checkpointed=True), training(fp8)]
    compiled = torch.compile(runs[2].model, backend="aot_eager", fullgraph=True)
    losses = train(runs[0], 4)
    assert losses == train(runs[1], 4)
    assert losses == pytest.approx(train(runs[2], 4, compiled), rel=1e-4)
    assert losses != train(training(Fp8(narrow=BLOCKS)), 4) != train(training(precision="bf16"), 4)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
def test_compiled_it_is_the_same_and_is_compiled_once():
    runs = [training(Fp8("delayed", narrow=BLOCKS)) for _ in range(2)]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(runs[1].model, backend=backend, fullgraph=True)
    assert train(runs[0], 5) == pytest.approx(train(runs[1], 5, compiled), rel=1e-5)
    assert len(graphs) == 1  # not in the first step, from which magnitudes are learned
    torch._dynamo.reset()


def test_delayed_scales_follow_the_magnitudes_of_the_steps_before():
    run = training(Fp8("delayed", narrow=BLOCKS, history=3))
    train(run, 1)
    report = {(each.layer, each.operand): each for each in run.engine.fp8_report().operands}
    weight = report["blocks.0.up", "weight"]
    assert (len(weight.amaxes), weight.fmt, weight.steps) == (1, "e4m3", 1)
    assert 224 < weight.amaxes[0] * weight.scale <= 448
    gradient = report["blocks.1.down", "gradient"]
    assert gradient.fmt == "e5m2"
    assert 28672 < gradient.amaxes[0] * gradient.scale <= 57344
    train(run, 4)
    assert {len(each.amaxes) for each in run.engine.fp8_report().operands} == {3}


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(recipe):
    run = training(Fp8(recipe, narrow=BLOCKS), trace=False)
    train(run, 3)
    before = copy.deepcopy([run.model.state_dict(), run.engine.state_dict()["fitting"]])
    step = run.engine.step(lambda: run.model(torch.zeros(1, 2, dtype=torch.long)).sum() * torch.inf)
    assert step.skipped
    assert all(torch.equal(value, before[0][name]) for name, value in run.model.state_dict().items())
    if recipe == "delayed":
        after = run.engine.state_dict()["fitting"]["delayed"]
        assert torch.equal(after["scales"][:, 2], before[1]["delayed"]["scales"][:, 2])
    assert all(loss < 10 for loss in train(run, 3))
    assert run.engine.skipped_steps == 1


def test_accumulated_micro_batches_have_one_scale():
    run = training(Fp8("delayed", narrow=BLOCKS), accumulate=3)
    train(run, 6)
    state = run.engine.state_dict()["fitting"]["delayed"]
    assert state["steps"] == 2
    assert (state["history"][..., :2] > 0).all()
    assert not state["history"][..., 2:].any()


def test_a_state_goes_on_where_it_was():
    whole, first = training(Fp8("delayed", narrow=BLOCKS)), training(Fp8("delayed", narrow=BLOCKS))
    train(whole, 4)
    train(first, 4)
    states = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict(), first.engine.state_dict()])
    second = training(Fp8("delayed", narrow=BLOCKS), seed=5)
    for part, state in zip((second.model, second.optimizer, second.engine), states, strict=True):
        part.load_state_dict(state)
    assert train(second, 4) == train(whole, 4)


def put_back(run, states):
    for part, state in zip((run.model, run.optimizer, run.engine), states, strict=True):
        part.load_state_dict(state)


def states_of(run):
    return copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict(), run.engine.state_dict()])


def test_a_state_from_before_the_first_step_begins_anew():
    run = training(Fp8("delayed", narrow=BLOCKS))
    beginning = states_of(run)
    first = train(run, 5)
    put_back(run, beginning)
    assert [run.model.get_submodule(name).fp8_scales for name in NAMES] == [None] * 4
    assert train(run, 5) == first


def test_a_state_from_before_layers_were_measured_begins_its_scales_anew(monkeypatch):
    measured_as(monkeypatch, "delayed")
    run = training(Fp8("measured", narrow=BLOCKS))
    beginning = states_of(run)
    train(run, 4)
    put_back(run, beginning)
    state = run.engine.state_dict()["fitting"]["delayed"]
    assert state["steps"] == 0
    assert not state["history"].any()
    assert sorted(fitted(run.model)) == sorted(NAMES)  # what was measured holds


def test_a_state_that_is_loaded_changes_no_layer_where_nothing_has_changed(monkeypatch):
    measured_as(monkeypatch, "delayed")
    run = training(Fp8("measured", narrow=BLOCKS))
    train(run, 3)
    before = run.engine._plugin.graph_version
    run.engine.load_state_dict(run.engine.state_dict())
    assert run.engine._plugin.graph_version == before  # a graph that was captured can go on


def test_a_state_of_another_format_brings_magnitudes_and_no_scales():
    first, second = training(Fp8("delayed", narrow=BLOCKS)), training(Fp8("delayed", narrow=BLOCKS, gradients="e4m3"))
    train(first, 3)
    put_back(second, states_of(first))
    for operand in second.engine.fp8_report().operands:
        assert operand.fmt == "e4m3"
        assert 224 < max(operand.amaxes) * operand.scale <= 448


def test_it_can_be_left_for_another_precision_and_come_back_to():
    run = training(Fp8("delayed", narrow=BLOCKS))
    train(run, 2)
    run.engine.change_precision("bf16")
    assert not fitted(run.model)
    train(run, 2)
    run.engine.change_precision(Policy("fp8").keep("bf16", "blocks.0"))
    assert run.engine.fp8_layers == ["blocks.1.up", "blocks.1.down"]
    train(run, 2)
    run.engine.change_precision("fp8")
    assert sorted(fitted(run.model)) == sorted(NAMES)


@pytest.mark.parametrize("before", [
    Policy("fp8").keep("bf16", "blocks.0.up"),
    Policy("fp8").keep("bf16", *NAMES),
    Policy("bf16").keep("fp32", "blocks.0.up", "blocks.1"),
])  # fmt: skip
def test_what_was_kept_becomes_fp8_when_it_is_kept_no_more(before):
    run = training(Fp8(narrow=BLOCKS))
    run.engine.change_precision(before)
    train(run, 1)
    run.engine.change_precision(Policy("fp8"))
    assert sorted(run.engine.fp8_layers) == sorted(fitted(run.model)) == sorted(NAMES)
    train(run, 1)
    run.engine.change_precision(before)
    train(run, 1)


def test_describe_says_what_runs_how():
    run = training(Fp8("delayed", narrow=BLOCKS, wide=("*.down",)))
    text = run.engine.policy.describe(run.model)
    assert "fp8      delayed scaling" in text
    assert "bf16     wide by '*.down'" in text
    run.engine.change_precision("bf16")
    assert "small: casting 2048 weights" in Policy("fp8").describe(run.model)


# Measured


@pytest.mark.nightly
def test_measured_layers_are_those_that_win(monkeypatch):
    asked = []

    def timer(works, device):
        asked.append(list(works))
        wins = len(asked) == 1
        return {name: [1e-3] if name == "bf16" else [5e-4 if wins else 2e-3] for name in works}

    monkeypatch.setattr(measuring, "time_in_turns", timer)
    run = training(Fp8("measured", narrow=BLOCKS, backend="ampwise"))
    first, wide = train(run, 1), train(training(precision="bf16"), 1)
    assert first == wide  # before it is measured, all is as it was
    assert fitted(run.model) == run.engine.fp8_layers == ["blocks.0.up", "blocks.1.up"]
    assert asked == [["bf16", "current", "delayed"]] * 2
    text = run.engine.policy.describe(run.model)
    assert "fp8      measured: 250 µs in bf16, 125 µs current, 24×32→64" in text
    assert "bf16     measured: 250 µs in bf16, 500 µs current, 24×64→32" in text
    train(run, 2)
    assert len(asked) == 2
    resumed = training(Fp8("measured", narrow=BLOCKS, backend="ampwise"))
    resumed.engine.load_state_dict(run.engine.state_dict())
    assert resumed.engine.fp8_layers == ["blocks.0.up", "blocks.1.up"]
    train(resumed, 1)
    assert len(asked) == 2


def test_measured_with_delayed_scaling(monkeypatch):
    measured_as(monkeypatch, "delayed")
    run = training(Fp8("measured", narrow=BLOCKS))
    train(run, 6)
    assert run.engine.state_dict()["fitting"]["delayed"]["steps"] == 5
    again = training(Fp8("measured", narrow=BLOCKS))
    again.engine.load_state_dict(run.engine.state_dict())
    train(again, 1)
    assert again.engine.state_dict()["fitting"]["delayed"]["steps"] == 6


def test_a_measurement_that_fails_is_made_again(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("the device is gone")

    run = training(Fp8("measured", narrow=BLOCKS, backend="ampwise"))
    with monkeypatch.context() as broken:
        broken.setattr("ampwise.train.fp8_plugin.time_recipes", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            train(run, 1)
    assert run.engine.fp8_layers == []
    measured_as(monkeypatch, "current")
    train(run, 1)
    assert fitted(run.model) == run.engine.fp8_layers == NAMES


def test_layers_that_only_run_in_fp32_are_not_waited_for():
    run = training(Fp8("measured", narrow=BLOCKS, backend="ampwise"))

    def wide(x):
        with torch.autocast("cpu", enabled=False):
            return run.model(x)

    train(run, 7, wide)
    assert fitted(run.model) == NAMES  # and what they are given would be noted
    train(run, 1, wide)
    assert fitted(run.model) == run.engine.fp8_layers == []
    assert "or in FP32 only" in run.engine.policy.describe(run.model)


def test_a_sample_and_then_a_state_of_other_choices(monkeypatch):
    def made(recipes):
        monkeypatch.setattr(
            "ampwise.train.fp8_plugin.time_recipes",
            lambda shapes, *_, **__: {
                each: TimedRecipe(recipe=recipe, why="it is") for each, recipe in zip(shapes, recipes, strict=True)
            },
        )
        run = training(Fp8("measured", narrow=BLOCKS, backend="ampwise"))
        train(run, 1)
        return run

    run, other = made(["current", None, None, None]), made([None, "current", "current", None])
    run.engine.sample_fp8()
    run.engine.load_state_dict(other.engine.state_dict())
    train(run, 1)
    assert run.engine.fp8_layers == NAMES[1:3]
    assert all(each.flushed_share is not None for each in run.engine.fp8_report().operands)


@pytest.mark.parametrize("way", ["eager", "wrapped", "in place"])
def test_a_compiled_model_is_measured_compiled(monkeypatch, way):
    asked = []

    def noted(shapes, fp8, device, compiled, graphed):
        asked.append((compiled, graphed))
        return {each: TimedRecipe(recipe=None, why="no") for each in shapes}

    monkeypatch.setattr("ampwise.train.fp8_plugin.time_recipes", noted)
    run = training(Fp8("measured", narrow=BLOCKS))
    model = run.model
    if way == "wrapped":
        model = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    train(run, 1, model)
    assert asked == [(way != "eager", False)]


# Auto


@pytest.fixture
def timed(monkeypatch):
    """Times by a rule: the more matmuls are in FP8, the faster; and a list of what was timed."""
    asked = []

    def timer(works, device):
        asked.append(list(works))
        counts = {name: 0 if name == "bf16" else len(name.partition(" ")[2].split("+")) for name in works}
        counts["current"] = 3
        return {name: [1e-3 - 2e-4 * counts[name]] * 3 for name in works}

    monkeypatch.setattr(measuring, "time_in_turns", timer)
    return asked


def auto(**settings):
    return training(Fp8("auto", narrow=BLOCKS, **settings.pop("fp8", {})), **settings)


def narrow_matmuls(run):
    return {choice.name: choice.matmuls for choice in run.engine.fp8_choices().layers}


@pytest.fixture
def decides_after_3_and_6(monkeypatch):
    monkeypatch.setattr("ampwise.train.fp8_plugin.DECIDE_AFTER", (1, 3, 6))


def test_auto_decides_after_the_first_step_which_is_in_bf16(timed):
    run = auto()
    assert "not decided yet" in str(run.engine.fp8_choices())
    assert train(run, 1) == train(training(precision="bf16"), 1)
    assert narrow_matmuls(run) == dict.fromkeys(NAMES, MATMULS)
    assert run.engine.fp8_layers == NAMES
    assert len(timed) == 2, "shapes"
    assert len(timed[0]) == 8, "BF16 and each combination of three matmuls"
    train(run, 1)  # which measures again
    assert fitted(run.model) == NAMES
    by_current = training(Fp8(narrow=BLOCKS))
    weights, moments, _ = states_of(run)
    by_current.model.load_state_dict(weights)
    by_current.optimizer.load_state_dict(moments)
    assert train(run, 3) == train(by_current, 3)
    told = str(run.engine.fp8_choices())
    assert "blocks.{0,1}.up    ×2  forward+dgrad+wgrad  2.50x" in told
    assert "current" in run.engine.policy.describe(run.model)


def test_auto_leaves_a_matmul_in_bf16_whose_error_is_above_the_limit(timed):
    run = auto(fp8={"limit": 0.05})
    train(run, 1)
    assert set(narrow_matmuls(run).values()) == {("forward",)}, "gradients in E5M2 are off by 0.06"
    assert "dgrad, wgrad not: error above 0.05" in run.engine.policy.describe(run.model)
    none = auto(fp8={"limit": 0.001})
    train(none, 3)
    assert none.engine.fp8_layers == fitted(none.model) == []
    assert all(max(choice.errors) < 0.1 for choice in none.engine.fp8_choices().layers)


def test_auto_measures_errors_again_and_installs_other_layers_only_where_the_choice_changes(
    timed, decides_after_3_and_6
):
    run = auto()
    train(run, 2)
    plugin = run.engine._plugin
    assert plugin.bypass_graphs, "the third step is measured"
    version, forwards = plugin.graph_version, dict(plugin._layers)
    train(run, 1)
    assert not plugin.bypass_graphs
    assert (plugin.graph_version, plugin._layers) == (version, forwards), "nothing has changed"
    assert run.engine.fp8_choices().decided_after == 3
    train(run, 2)
    with torch.no_grad():  # values beside which all others become zero
        run.model.blocks[0].norm.weight.mul_(1e-6)
        run.model.blocks[0].norm.weight[0] = 1e4
        run.model.blocks[0].up.weight[:, 0] = 0.0
    train(run, 1)
    assert run.engine.fp8_choices().decided_after == 6
    chosen = narrow_matmuls(run)
    assert "forward" not in chosen["blocks.0.up"]
    assert chosen["blocks.1.up"] == chosen["blocks.1.down"] == MATMULS
    assert plugin.graph_version == version + 1
    assert "of the input's values become zero" in str(run.engine.fp8_choices())
    train(run, 3)
    assert plugin.graph_version == version + 1
    assert len(timed) == 2, "times are measured once"


def test_auto_resumes_with_its_choices_and_at_its_step(timed, decides_after_3_and_6):
    whole, first = auto(fp8={"limit": 0.05}), auto(fp8={"limit": 0.05})
    train(whole, 5)
    train(first, 2)
    states = states_of(first)
    resumed = auto(fp8={"limit": 0.05})
    put_back(resumed, states)
    assert narrow_matmuls(resumed) == narrow_matmuls(first)
    assert resumed.engine.fp8_choices().decided_after == 1
    in_bf16, untouched = auto(fp8={"limit": 0.05}), copy.deepcopy(states[2])
    untouched["fitting"]["auto"]["steps"] = 4
    in_bf16.engine.load_state_dict(untouched)
    assert fitted(in_bf16.model) == NAMES
    assert not in_bf16.engine._plugin.bypass_graphs, "nothing is measured in the fifth step"
    assert len(timed) == 2
    assert train(resumed, 3) == train(first, 3)
    assert resumed.engine.fp8_choices().decided_after == 3
    other = auto(fp8={"limit": 0.9})
    put_back(other, states)
    assert set(narrow_matmuls(other).values()) == {MATMULS}, "the same errors, by this engine's limit"
    assert torch.load(saved_in_memory(states[2]), weights_only=True)["fitting"]["auto"]["steps"] == 2


def saved_in_memory(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def test_auto_waits_for_a_step_that_is_not_skipped(timed):
    run = auto(trace=False)
    assert run.engine.step(lambda: run.model(torch.zeros(1, 2, dtype=torch.long)).sum() * torch.inf).skipped
    assert run.engine.fp8_choices().decided_after is None
    train(run, 1)
    assert run.engine.fp8_choices().decided_after == 2
    assert set(narrow_matmuls(run).values()) == {MATMULS}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
def test_auto_is_compiled_once_for_each_choice(monkeypatch, timed, decides_after_3_and_6):
    run, graphs = auto(), []
    monkeypatch.setattr(
        "ampwise.train.fp8_plugin.time_layers",
        lambda *given, **settings: measuring.time_layers(*given, **{**settings, "compiled": False}),
    )

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(run.model, backend=backend, fullgraph=True)
    train(run, 1, compiled)
    assert not graphs, "the first step, which measures, is not compiled"
    train(run, 4, compiled)
    assert len(graphs) == 1, "nor the third; and nothing has changed"
    run.engine._plugin._auto._limit = 0.01  # as if errors had grown
    train(run, 4, compiled)
    assert set(narrow_matmuls(run).values()) == {()}
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as a linear layer does
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_auto_decides_in_wrapped_models_as_by_itself(one_rank, timed, wrapper):
    alone, wrapped = auto(), Net()
    torch.manual_seed(0)
    model = Net()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    engine = Engine(wrapped, optimizer, Fp8("auto", narrow=BLOCKS))
    run = SimpleNamespace(model=wrapped, engine=engine)
    assert train(run, 3) == pytest.approx(train(alone, 3), rel=1e-4)
    assert narrow_matmuls(run) == narrow_matmuls(alone)


def test_choices_are_for_auto():
    with pytest.raises(BadInput, match=r"Fp8\('current'\) does not choose matmuls; Fp8\('auto'\) does"):
        training(Fp8(narrow=BLOCKS)).engine.fp8_choices()


@pytest.mark.parametrize("backend", ["torchao", "transformer-engine"])
def test_a_backend_to_be_measured_that_is_missing_is_missed_at_once(monkeypatch, backend):
    for name in ("torchao.float8", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingDependency,
        match=rf"^Fp8\('measured', backend='{backend}'\) takes Fp8\('.*not installed.*Install it: pip ",
    ) as error:
        training(Fp8("measured", narrow=BLOCKS, backend=backend))
    assert "\n" not in str(error.value)
    training(Fp8("measured", narrow=BLOCKS))  # where none is asked for by name, whoever is there


# Ranks


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as a linear layer does
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models_train_as_they_do_by_themselves(one_rank, recipe, wrapper):
    if wrapper == "fsdp2" and torch.__version__ < "2.7":
        pytest.skip("FSDP2 needs a GPU before")
    plain = train(training(Fp8(recipe, narrow=BLOCKS)), 4)
    torch.manual_seed(0)
    model = Net()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, Fp8(recipe, narrow=BLOCKS))
    assert sorted(engine.fp8_layers) == sorted(NAMES)
    assert train(SimpleNamespace(model=model, engine=engine), 4) == pytest.approx(plain, rel=1e-3)


def test_ranks_have_the_same_scales(one_rank, monkeypatch):
    def with_another(table, op, group=None):
        assert op is dist.ReduceOp.MAX
        table[0, 0, 0] = torch.maximum(table[0, 0, 0], torch.tensor(4096.0))

    model = DistributedDataParallel(training(precision="bf16").model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), Fp8("delayed", narrow=BLOCKS))
    monkeypatch.setattr("ampwise.train.float8.delayed_scaling.dist.all_reduce", with_another)
    train(SimpleNamespace(model=model, engine=engine), 1)
    first = engine.fp8_report().operands[0]
    assert (first.amaxes, first.scale) == ((4096.0,), 0.0625)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_torchaos_layers_for_fsdp2_are_found(one_rank):
    pytest.importorskip("torchao")
    if torch.__version__ < "2.7":
        pytest.skip("FSDP2 needs a GPU before")
    torch.manual_seed(0)
    model = prepare(Net(), Fp8("tensorwise", narrow=BLOCKS), emulate=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "fp8")
    assert sorted(engine.fp8_layers) == sorted(NAMES)
    losses = train(SimpleNamespace(model=model, engine=engine), 20)
    assert losses[-1] < 0.5 * losses[0]
    assert "by torchao, converted before" in engine.policy.describe(model)


# Layers that were torchao's before


def prepared(policy="fp8", *, all_gather=False):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = prepare(Net(), Fp8("tensorwise", narrow=BLOCKS), all_gather=all_gather, emulate=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return SimpleNamespace(model=model, optimizer=optimizer, engine=Engine(model, optimizer, policy))


def outputs(run):
    with torch.no_grad(), run.engine.autocast():
        return run.model(torch.arange(8).reshape(2, 4))


def test_torchaos_layers_can_be_kept_left_and_come_back_to():
    wide, run = training(precision="bf16"), prepared()
    narrow = outputs(run)
    assert not torch.equal(narrow, outputs(wide))
    assert sorted(run.engine.fp8_layers) == sorted(NAMES)
    assert {each for each, _ in torchao_layers(run.model).values()} == {"fp8"}
    run.engine.change_precision("bf16")
    assert torchao_layers(run.model) == {}
    assert torch.equal(outputs(run), outputs(wide))
    run.engine.change_precision(Policy("bf16").keep("fp32", "blocks.0.up"))
    wide.engine.change_precision(Policy("bf16").keep("fp32", "blocks.0.up"))
    assert torch.equal(outputs(run), outputs(wide))
    run.engine.change_precision("fp8")
    assert torch.equal(outputs(run), narrow)
    assert sorted(run.engine.fp8_layers) == sorted(NAMES)
    train(run, 2)


@pytest.mark.parametrize("kept", [("blocks.0",), ("blocks.0.up", "blocks.0.down")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_torchaos_layers_that_are_kept_are_wide(kept, precision):
    run, others = prepared(Policy("fp8").keep(precision, *kept)), ["blocks.1.up", "blocks.1.down"]
    assert run.engine.fp8_layers == others
    block, x = run.model.blocks[0], torch.randn(4, 32)
    wide = training(precision=Policy("bf16").keep(precision, *kept)).model.blocks[0]
    with torch.no_grad(), run.engine.autocast():
        assert torch.equal(block(x), wide(x))
    text = run.engine.policy.describe(run.model)
    assert f"kept by '{kept[0]}'" in text
    train(run, 2)
    run.engine.change_precision("fp8")
    assert sorted(run.engine.fp8_layers) == sorted(NAMES)
    assert "forward" not in block.up.__dict__
    run.engine.change_precision(Policy("fp8").keep(precision, *kept))
    run.engine.change_precision("bf16")
    with torch.no_grad(), run.engine.autocast():
        assert block.up(x).dtype == torch.bfloat16
    train(run, 1)


def test_weights_that_are_gathered_in_fp8_cannot_be_wide():
    with pytest.raises(
        BadInput,
        match=r"^Engine\(precision='fp8'\): blocks\.0\.up is kept by 'blocks\.0', but FSDP2 gathers its weights in FP8"
        r".* Prepare the model with prepare\(model, all_gather=False\), or not at all\.$",
    ):
        prepared(Policy("fp8").keep("bf16", "blocks.0"), all_gather=True)
    run = prepared(all_gather=True)
    with pytest.raises(
        BadInput, match=r"^change_precision\(\): not with blocks\.0\.up: FSDP2 gathers its weights in FP8"
    ):
        run.engine.change_precision("bf16")
    assert (run.engine.precision, sorted(run.engine.fp8_layers)) == ("fp8", sorted(NAMES))


# What is lost


def test_a_sampled_step_counts_what_vanishes():
    run = training(Fp8(narrow=BLOCKS))
    train(run, 2)
    assert {each.flushed_share for each in run.engine.fp8_report().operands} == {None}
    assert run.engine.findings == []
    with torch.no_grad():
        weight = run.model.blocks[0].up.weight
        weight.mul_(2.0**-30)
        weight[0, 0] = 1.0  # beside which all others are nothing
    run.engine.sample_fp8()
    train(run, 1)
    (found,) = [each for each in run.engine.findings if each.rule.name == "fp8-underflows"]
    assert found.place.module == "blocks.0.up"
    assert found.message == "100% of the nonzero values of its weight become zero in E4M3 at its scale"
    table = str(run.engine.fp8_report()).splitlines()
    assert table[0].split() == ["layer", "operand", "format", "scale", "largest", "saturated", "in", "to", "zero"]
    assert table[2].split()[:5] == ["blocks.0.up", "weight", "e4m3", "256", "1"]
    assert sorted(fitted(run.model)) == sorted(NAMES)


def test_a_sampled_step_leaves_layers_as_they_were():
    run = training(Fp8("delayed", narrow=BLOCKS), accumulate=2)
    train(run, 4)
    layer, plugin = run.model.blocks[0].up, run.engine._plugin
    before = (layer.fp8_layer, layer.fp8_slot, layer.fp8_scales.data_ptr(), plugin.graph_version)
    assert not plugin.bypass_graphs
    run.engine.sample_fp8()
    assert plugin.bypass_graphs  # in all of its micro-batches: none of them is for a graph
    train(run, 1)
    assert plugin.bypass_graphs
    train(run, 1)
    assert not plugin.bypass_graphs
    assert (layer.fp8_layer, layer.fp8_slot, layer.fp8_scales.data_ptr(), plugin.graph_version) == before
    assert {each.flushed_share for each in run.engine.fp8_report().operands} != {None}


def test_a_step_that_is_to_be_sampled_is_so_after_a_rollback():
    run = training(Fp8("delayed", narrow=BLOCKS))
    beginning = states_of(run)
    train(run, 3)
    run.engine.sample_fp8()
    put_back(run, beginning)
    train(run, 1)
    assert None not in {each.flushed_share for each in run.engine.fp8_report().operands}


def test_layers_of_different_recipes_are_reported_in_their_own_formats(monkeypatch):
    pytest.importorskip("torchao")
    recipes = {"blocks.0.up": "rowwise", "blocks.0.down": "tensorwise", "blocks.1.up": "delayed"}
    run = training(Fp8("measured", narrow=BLOCKS))
    modules = {run.model.get_submodule(name): recipe for name, recipe in recipes.items()}
    monkeypatch.setattr(
        "ampwise.train.fp8_plugin.time_recipes",
        lambda *_, **__: {each: TimedRecipe(recipe=recipe, why="") for each, recipe in modules.items()},
    )
    train(run, 3)
    run.engine.sample_fp8()
    train(run, 1)
    report = {(each.layer, each.operand): each for each in run.engine.fp8_report().operands}
    assert {name: report[name, "gradient"].fmt for name in recipes} == {
        "blocks.0.up": "e4m3", "blocks.0.down": "e5m2", "blocks.1.up": "e5m2"
    }  # fmt: skip
    assert report["blocks.0.up", "input"].scale is None  # one for each row
    assert None not in {each.flushed_share for each in report.values()}
    assert None not in {each.scale for (name, _), each in report.items() if name != "blocks.0.up"}


def test_values_cut_off_again_and_again_are_a_finding():
    run = training(Fp8("delayed", narrow=BLOCKS))
    train(run, 2)
    for _ in range(6):
        with torch.no_grad():
            run.model.blocks[1].down.weight.mul_(4.0)  # faster than past steps can know
        train(run, 1)
    names = {each.place.module for each in run.engine.findings if each.rule.name == "fp8-saturates"}
    assert "blocks.1.down" in names
    assert "blocks.0.up" not in names


# Refused


def test_a_device_without_fp8_is_reported_what_it_can_do(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(PrecisionUnavailable, match=r"has no FP8 tensor cores. It runs .*precision='emulate:e4m3'"):
        training()


def test_fp8_is_for_the_precision_fp8():
    with pytest.raises(BadInput, match=r"^Policy\('bf16', fp8=Fp8\(.*expected Policy\('fp8', fp8=ampwise.Fp8\(...\)\)"):
        Policy("bf16", fp8=Fp8("delayed"))
    with pytest.raises(BadInput, match=r"^Policy\('fp8', fp8='delayed'\): expected"):
        Policy("fp8", fp8="delayed")
    assert repr(Policy("fp8", fp8=Fp8("delayed")).keep("fp32", "head")).startswith("Policy('fp8', fp8=Fp8(recipe='del")


def test_a_model_none_of_whose_layers_become_fp8_is_refused():
    with pytest.raises(
        BadInput, match=r"no linear layer of this model can run in FP8 \(.*small: casting 2048 weights .*; and 2 m"
    ):
        training()
    model = nn.Conv1d(16, 16, 3)
    with pytest.raises(BadInput, match=r"the model has no linear layer, and FP8 is only for those\. Use 'bf16'"):
        Engine(model, torch.optim.SGD(model.parameters()), "fp8")


def test_nothing_is_left_of_an_engine_that_was_refused():
    torch.manual_seed(0)
    model = Net()
    with pytest.raises(BadInput):
        Engine(model, torch.optim.SGD(model.parameters()), Fp8(narrow=BLOCKS), callbacks=[3])
    assert not fitted(model)


def test_reports_are_for_fp8():
    run = training(precision="bf16")
    for call in (run.engine.sample_fp8, run.engine.fp8_report):
        with pytest.raises(BadInput, match=r"needs precision='fp8'; this engine trains in bf16"):
            call()
