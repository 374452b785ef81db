"""An engine in bf16-pure: BF16 weights and gradients, trained as FP32 weights are."""

import copy
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ampwise import Engine, Guard, Policy, PrecisionUnavailable
from ampwise.errors import BadInput
from ampwise.train.precision.precision import choose_from, other_precisions

from ..for_each import for_each

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

KINDS = ["bf16-pure", "bf16-pure,kahan", "bf16-pure,bf16-states", "bf16-pure,kahan,bf16-states"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x)))) * self.table


def run(precision="bf16-pure", fused=True, make=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters(), lr=1e-3, fused=fused)
    return Engine(model, optimizer, precision, **options)


def train(engine, *numbers):
    """None: a batch that makes gradients NaN."""
    (model,) = engine.models
    steps = []
    for number in numbers:
        torch.manual_seed(number or 0)
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        steps.append(engine.step(lambda x, y: F.cross_entropy(model(x).float(), y), x * (number or torch.nan), y))
    return steps


def everything(engine):
    return copy.deepcopy(
        [engine.models[0].state_dict(), engine.optimizers[0].state_dict(), engine.state_dict()["fitting"]["rests"]]
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# What it makes of a model


def test_weights_are_bf16_in_the_same_parameters_and_normalisations_and_buffers_are_not():
    torch.manual_seed(0)
    model = Net()
    before = dict(model.named_parameters())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-pure")
    assert {name: each.dtype for name, each in model.state_dict().items()} == {
        "table": torch.float32,
        "first.weight": torch.bfloat16,
        "first.bias": torch.bfloat16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
        "norm.running_mean": torch.float32,
        "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
        "head.weight": torch.bfloat16,
        "head.bias": torch.bfloat16,
    }
    assert all(each is before[name] for name, each in model.named_parameters())
    model(torch.randn(4, 6).bfloat16()).sum().backward()
    assert model.first.weight.grad.dtype == torch.bfloat16
    train(engine, 1)


def test_what_a_policy_keeps_has_fp32_weights():
    engine = run(Policy("bf16-pure").keep("fp32", "head"))
    model = engine.models[0]
    assert model.head.weight.dtype == torch.float32
    train(engine, 1, 2)
    assert model.head.weight.dtype == torch.float32 != model.first.weight.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_changes_nothing(kind, fused):
    engine = run(kind, fused, clip_norm=1.0, trace=False)
    train(engine, 1, 2)
    before = everything(engine)
    (step,) = train(engine, None)
    assert step.skipped
    after = everything(engine)
    assert same(before, after)
    train(engine, 3)
    assert not same(before, everything(engine))


@for_each("kind", KINDS)
def test_fused_and_plain_optimizers_agree(kind):
    one, other = run(kind, fused=True), run(kind, fused=False)
    train(one, 1, 2, 3)
    train(other, 1, 2, 3)
    for a, b in zip(one.models[0].parameters(), other.models[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-8)


@for_each("kind", KINDS)
def test_a_run_that_was_saved_goes_on_as_if_it_had_not(kind):
    """Model, optimizer and engine in either order; what the optimizer keeps comes back as wide as it was."""
    whole, first = run(kind), run(kind)
    train(whole, 1, 2, 3, 4, 5)
    train(first, 1, 2, 3)
    state = saved([first.models[0].state_dict(), first.optimizers[0].state_dict(), first.state_dict()])
    for order in ((0, 1, 2), (2, 1, 0)):
        again = run(kind)
        loads = (again.models[0].load_state_dict, again.optimizers[0].load_state_dict, again.load_state_dict)
        for place in order:
            loads[place](copy.deepcopy(state[place]))
        train(again, 4, 5)
        assert same(everything(again), everything(whole))
        assert again.state_dict()["fitting"]["drawn"] == whole.state_dict()["fitting"]["drawn"]


def test_the_same_random_numbers_everywhere_and_none_of_the_users():
    one, other = run(), run()
    train(one, 1, 2)
    torch.rand(1000)
    train(other, 1, 2)
    assert same(everything(one), everything(other))
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with one._plugin.step_context(one.optimizers[0]):
        one.optimizers[0].step()
    assert torch.equal(torch.rand(2), expected)


def test_hooks_and_schedulers_work_as_ever():
    torch.manual_seed(0)
    model, seen = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = Engine(model, optimizer, "bf16-pure", scheduler=scheduler, accumulate=2)
    train(engine, 1, 2, 3, 4)
    assert len(seen) == 2
    assert engine.lr == pytest.approx(2.5e-4)


# From one precision to another


def test_with_the_rest_kept_fp32_weights_come_back_to_the_bit():
    engine = run("bf16-pure,kahan")
    train(engine, 1, 2, 3)
    model = engine.models[0]
    narrow = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine.change_precision("fp32")
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    wide = {name: each.detach().clone() for name, each in model.named_parameters()}
    assert not torch.equal(wide["first.weight"], narrow["first.weight"].float())
    assert torch.equal(wide["first.weight"].bfloat16(), narrow["first.weight"])
    engine.change_precision("bf16-pure,kahan")
    assert same({name: each.detach() for name, each in model.named_parameters()}, narrow)
    train(engine, 4)


def test_the_rest_is_kept_from_the_start():
    """Put on and taken off, nothing has happened; and steps are those on FP32 weights, to the bit."""
    engine, oracle = run("bf16-pure,kahan"), Net()
    model = engine.models[0]
    torch.manual_seed(0)
    oracle.load_state_dict(Net().state_dict())
    engine.change_precision("fp32")
    assert same(model.state_dict(), oracle.state_dict())
    engine.change_precision("bf16-pure,kahan")
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-3, fused=True)
    for number in range(3):
        for mine, its in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.manual_seed(number)
            mine.grad = torch.randn(mine.shape).bfloat16().to(mine.dtype)
            its.grad = mine.grad.float()
        with engine._plugin.step_context(engine.optimizers[0]):
            engine.optimizers[0].step()
        optimizer.step()
    engine.change_precision("fp32")
    assert same([*model.parameters()], [*oracle.parameters()])


def test_weights_that_nobody_trains_are_rounded_once():
    """To keep what BF16 does not hold of them would cost what it saves."""
    model = Net()
    before = model.first.weight.detach().clone()
    engine = Engine(model, torch.optim.SGD(model.head.parameters(), lr=0.1), "bf16-pure,kahan")
    engine.change_precision("fp32")
    assert torch.equal(model.first.weight, before.bfloat16().float())
    assert not torch.equal(model.first.weight, before)


def test_weights_that_someone_sets_to_zero_are_zero():
    """Whatever was kept of what they were."""
    engine = run("bf16-pure,kahan")
    train(engine, 1)
    weight = engine.models[0].first.weight
    assert (engine._plugin._update.rests[weight] < 0).any()
    weight.data.zero_()
    (step,) = train(engine, 2)
    assert not step.skipped
    assert weight.isfinite().all()
    weight.data.fill_(-0.0)
    engine.change_precision("fp32")
    assert weight.isfinite().all()
    assert weight.abs().max() < 1e-40


def test_a_state_that_was_given_does_not_change_any_more():
    engine = run("bf16-pure,kahan")
    train(engine, 1)
    state = engine.state_dict()
    before = copy.deepcopy(state["fitting"])
    train(engine, 2)
    assert same(state["fitting"], before)


def test_what_was_kept_of_other_weights_is_forgotten():
    """A state of another precision has nothing of the kind."""
    engine, other = run("bf16-pure,kahan"), run("fp32")
    train(engine, 1)
    engine.models[0].load_state_dict(other.models[0].state_dict())
    engine.load_state_dict(other.state_dict(), other_precision=True)
    assert not engine._plugin.rests
    train(engine, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["bf16", "fp32"])
def test_a_model_that_was_bf16_before_is_fp32_afterwards(kind, after):
    """With what was kept of its weights; else its small updates would be lost from there on."""
    torch.manual_seed(0)
    model = Net().bfloat16()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), kind)
    train(engine, 1, 2, 3)
    narrow = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine.change_precision(after)
    assert {each.dtype for each in model.state_dict().values() if each.is_floating_point()} == {torch.float32}
    assert torch.equal(model.first.weight.bfloat16(), narrow["first.weight"])
    assert torch.equal(model.first.weight, narrow["first.weight"].float()) == ("kahan" not in kind)
    assert engine.optimizers[0].state[model.first.weight]["exp_avg"].dtype == torch.float32
    engine.optimizers[0].param_groups[0]["lr"] = 1e-5
    before = model.first.weight.detach().clone()
    assert not any(step.skipped for step in train(engine, 4, 5))
    assert (model.first.weight != before).float().mean() > 0.9
    engine.change_precision(kind)
    assert model.first.weight.dtype == torch.bfloat16
    train(engine, 6)


def test_a_buffer_that_the_model_has_replaced_is_fp32_afterwards_too():
    model = Net().bfloat16()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16-pure")
    first = weakref.ref(model.table)
    model.table = model.table.clone()
    assert first() is None  # which nothing holds on to
    engine.change_precision("bf16")
    assert model.table.dtype == torch.float32


def test_tables_that_were_bf16_of_a_model_that_was_not_stay_so():
    model = Net()
    model.table = model.table.bfloat16()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16-pure")
    engine.change_precision("bf16")
    assert model.table.dtype == torch.bfloat16


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_from_one_kind_of_it_to_another(given):
    """A guard does so: it keeps a module in FP32, and goes on."""
    torch.manual_seed(0)
    model = Net().to(given)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), "bf16-pure,kahan")
    train(engine, 1, 2)
    rests = engine.state_dict()["fitting"]["rests"]
    engine.change_precision(Policy("bf16-pure,kahan").keep("fp32", "head"))
    assert (model.first.weight.dtype, model.head.weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(engine.state_dict()["fitting"]["rests"][0], rests[0])
    train(engine, 3)
    engine.change_precision("bf16-pure")
    assert model.first.weight.dtype == model.head.weight.dtype == torch.bfloat16
    train(engine, 4)
    engine.change_precision("bf16")
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(kind):
    engine = run("bf16")
    for precision in (kind, "fp32", "bf16-pure", "bf16"):
        train(engine, 1, 2)
        engine.change_precision(precision)
        (step,) = train(engine, 3)
        assert not step.skipped
        assert step.precision == precision
    assert {each.dtype for each in engine.models[0].parameters()} == {torch.float32}
    state = engine.optimizers[0].state[engine.models[0].first.weight]
    assert state["exp_avg"].dtype == torch.float32


def test_a_state_of_another_rounding_is_refused():
    one, other = run("bf16-pure"), run("bf16-pure,kahan")
    train(one, 1)
    train(other, 1)
    with pytest.raises(
        BadInput, match=r"saved in bf16-pure,kahan, but this engine trains in bf16-pure. Create it with"
    ):
        one.load_state_dict(other.state_dict())


@for_each(
    ("fault", "said"),
    [
        (lambda state: state["rests"].pop(), "belongs to a different set of weights"),
        (lambda state: state["rests"].__setitem__(0, torch.zeros(3, dtype=torch.int16)), "belongs to a different set"),
        (lambda state: state["rests"].__setitem__(0, torch.zeros(16, 6)), "is damaged"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_has_changed(fault, said):
    engine = run("bf16-pure,kahan")
    train(engine, 1)
    before, state = everything(engine), copy.deepcopy(engine.state_dict())
    fault(state["fitting"])
    with pytest.raises(BadInput, match=said):
        engine.load_state_dict(state)
    assert same(everything(engine), before)


# With others


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_ddp_is_made_for_bf16_weights_or_refused():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    wrapped = DistributedDataParallel(plain)
    with pytest.raises(BadInput, match=r"DistributedDataParallel was created for FP32 weights\. Convert"):
        Engine(wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True), "bf16-pure")
    assert plain[0].weight.dtype == torch.float32
    twin = copy.deepcopy(plain)
    wrapped = DistributedDataParallel(plain.bfloat16())
    engines = [Engine(each, torch.optim.AdamW(each.parameters(), fused=True), "bf16-pure") for each in (wrapped, twin)]
    for engine in engines:
        train(engine, 1, 2, 3)
    assert same([*plain.parameters()], [*twin.parameters()])
    refuses_to_leave(engines[0], "DistributedDataParallel")


def refuses_to_leave(engine, wrapper):
    """And nothing has changed."""
    before = everything(engine)
    for other in ("bf16", "fp32", "bf16-pure", Policy("bf16-pure").keep("fp32", "0")):
        with pytest.raises(BadInput) as refused:
            engine.change_precision(other)
        assert str(refused.value) == (
            f"change_precision(): {wrapper} was created for BF16 weights, which cannot become FP32 inside it. Save a "
            "checkpoint, and resume with FP32 weights in a new process."
        )
    assert same(everything(engine), before)
    assert engine.precision.startswith("bf16-pure")
    train(engine, 4)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 needs a GPU before")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["bf16-pure,kahan", "bf16-pure,bf16-states"])
def test_shards_are_stepped_as_the_whole_is(kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    engines = [Engine(each, torch.optim.AdamW(each.parameters(), fused=True), kind) for each in (plain, sharded)]
    for engine in engines:
        train(engine, 1, 2, 3)
    shards = [each.to_local() for each in sharded.parameters()]
    assert same([each.detach() for each in plain.parameters()], [each.detach() for each in shards])
    state = engines[1].optimizers[0].state[next(sharded.parameters())]
    assert hasattr(state["exp_avg"], "placements")
    refuses_to_leave(engines[1], "fully_shard")


@pytest.mark.parametrize("kind", KINDS[1:3])
def test_a_guard_saves_it_and_goes_on(kind, tmp_path):
    first, second = run(kind), run(kind)
    with Guard(first, tmp_path, every=2):
        train(first, 1, 2, 3, 4)
    with Guard(second, tmp_path, every=2):
        assert same(everything(second), everything(first))
        assert second.state_dict()["fitting"]["drawn"] == first.state_dict()["fitting"]["drawn"]


# What is refused


def test_an_optimizer_that_keeps_the_graph_is_refused_and_the_model_left_alone():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(BadInput, match=r"does not work with SGD\(differentiable=True\)"):
        Engine(model, optimizer, "bf16-pure")
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_a_device_without_bf16_is_refused_whatever_the_options():
    with pytest.raises(PrecisionUnavailable, match=r"Engine\(precision='bf16-pure,kahan'\): torch's autocast does not"):
        choose_from("bf16-pure,kahan", other_precisions("mps", (torch.float16,)))


def test_weights_without_a_shape_are_refused():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(BadInput, match=r"parameters have no shape yet. Run it once on a batch first"):
        Engine(model, optimizer, "bf16-pure")
