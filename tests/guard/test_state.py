"""The whole state of a training: put back, what comes after is what came after it, to the bit."""

import copy
import random
import tempfile
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampwise import Engine, Guard
from ampwise.errors import BadInput
from ampwise.guard.checkpointing import GuardedRun
from ampwise.guard.disk.writing import write_checkpoint
from ampwise.guard.rank_agreement import RankAgreement
from ampwise.guard.reporter import EventReporter
from ampwise.guard.resuming import CheckpointLoader
from ampwise.guard.script_changes import ScriptChanges
from ampwise.guard.snapshots import MemorySnapshots
from ampwise.guard.state import TrainingState, _allocate, _form
from ampwise.runs.plain_data import from_json, to_json

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def small_operations_are_cheap():
    """oneDNN sets up for a millisecond where the multiplication takes ten microseconds."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(onednn)


class Net(nn.Module):
    """All that a state has: tied weights, statistics, random numbers, buffers to save and others, a frozen weight."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))  # as a logit scale: of no dimension
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, ids):
        if self.training:
            self.seen += len(ids)
            self.cache += 1
        return self.head(self.body(self.embed(ids))) * self.scale


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(7, (6,), generator=generator), torch.randint(7, (6,), generator=generator)


def training(make, *, seed=1, wrap=None, schedule=None, precision="fp32", state=None, net=Net, **options):
    """A training that draws from every source of random numbers."""
    inner = net(seed)
    model = inner if wrap is None else wrap(inner)
    made = make(inner)
    optimizers = made if isinstance(made, list) else [made]
    scheduler = None if schedule is None else schedule(optimizers[0])
    engine = Engine(model, optimizers, precision, scheduler=scheduler, **options)

    def loss(ids, labels):
        return F.cross_entropy(model(ids).float(), labels) * (1 + random.random() + np.random.rand())

    run = SimpleNamespace(
        inner=inner, model=model, optimizers=optimizers, engine=engine, loss=loss, scheduler=scheduler, others={}
    )
    run.others = {} if state is None else state(run)
    run.whole = TrainingState(engine, run.others)
    return run


def train(run, *numbers):
    return [run.engine.step(run.loss, *batch(number)) for number in numbers]


def everything(run):
    """What two trainings that are alike have alike."""
    return copy.deepcopy(
        {
            "model": run.inner.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
            "scaler": run.engine.scaler.state_dict(),
            "counts": (run.engine.applied_steps, run.engine.skipped_steps),
            "lr": run.engine.lr,
            "others": {name: other.state_dict() for name, other in run.others.items()},
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1:3],
        }
    )


def same(one, other):
    """To the last bit, and of the same kind, in whatever is nested how."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return (
            type(one) is type(other) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other or one is other


def in_memory(run):
    snapshot = MemorySnapshots(CPU, "host").take(0, run.whole.live())
    return lambda: run.whole.restore(snapshot.values, snapshot.plain)


def onto_disk(run, folder):
    live = run.whole.live()
    live.plain["data"] = None
    values = {name: tensor.detach().clone() for name, tensor in live.tensors.items()}
    write_checkpoint(
        folder, step=3, live=live.tensors, staged=values, plain=to_json(live.plain, "the state"), about={}, group=None
    )


def resuming(run, folder, *, prints=False):
    reporter, agreement = EventReporter(None, prints=prints), RankAgreement(run.engine.ranks, 10.0)
    changes = ScriptChanges(run.engine, run.whole._others, ())
    changes.begin()
    return CheckpointLoader(GuardedRun(folder, run.engine, run.whole, agreement, reporter), changes)


def from_disk(run, folder):
    """As Guard does."""
    checkpoint, plain = resuming(run, folder).newest()
    assert checkpoint.step == 3
    return plain


def goes_on_as_it_went(run, fresh, steps, folder, train=train):
    """Put back in memory, twice, and read from disk by another training, it takes the same steps again."""
    put_back = in_memory(run)
    onto_disk(run, folder)
    at = everything(run)
    train(run, *steps)
    ended = everything(run)
    for _ in range(2):
        put_back()
        assert same(everything(run), at)
        train(run, *steps)
        assert same(everything(run), ended)
    from_disk(fresh, folder)
    assert same(everything(fresh), at)
    train(fresh, *steps)
    assert same(everything(fresh), ended)


# Every optimizer


def of(kind, **options):
    return lambda model: kind([each for each in model.parameters() if each.requires_grad], **{"lr": 0.05, **options})


def muon_and_adam(model):
    matrices = [model.body[0].weight]
    rest = [each for each in model.parameters() if each.requires_grad and each is not matrices[0]]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


class OwnState(torch.optim.SGD):
    """An optimizer that saves itself in a way of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.mean = [torch.zeros_like(each) for each in self.param_groups[0]["params"]]
        self.steps, self.names, self.norms = 0, ["a", ("b", 1)], torch.zeros(0)

    def step(self, closure=None):
        self.steps += 1
        with torch.no_grad():
            self.norms = torch.cat([self.norms, self.mean[0].norm().reshape(1)])  # longer each time
            for mean, parameter in zip(self.mean, self.param_groups[0]["params"], strict=True):
                mean.lerp_(parameter.grad, 0.1)
                parameter.add_(mean, alpha=-self.param_groups[0]["lr"] * self.steps)

    def state_dict(self):
        own = {"mean": list(self.mean), "steps": self.steps, "names": self.names, "norms": self.norms}
        return {"own": own, 3: "a key that is no text"}

    def load_state_dict(self, state):
        assert state[3] == "a key that is no text"
        own = state["own"]
        self.mean, self.steps, self.names, self.norms = own["mean"], own["steps"], own["names"], own["norms"]


OPTIMIZERS = {
    "sgd": of(torch.optim.SGD),
    "momentum": of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "sgd-fused": of(torch.optim.SGD, momentum=0.9, fused=True),
    "adam": of(torch.optim.Adam, foreach=False),
    "adam-amsgrad": of(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "adamw-fused": of(torch.optim.AdamW, fused=True),
    "adamw-foreach": of(torch.optim.AdamW, foreach=True),
    "adamw-maximize": of(torch.optim.AdamW, maximize=True, differentiable=False),
    "adam-lr-tensor": lambda model: of(torch.optim.Adam, lr=torch.tensor(0.05), foreach=False)(model),
    "adagrad": of(torch.optim.Adagrad),
    "adagrad-fused": of(torch.optim.Adagrad, fused=True),
    "adafactor": of(torch.optim.Adafactor),
    "adadelta": of(torch.optim.Adadelta, lr=1.0),
    "adamax": of(torch.optim.Adamax),
    "asgd": of(torch.optim.ASGD),
    "nadam": of(torch.optim.NAdam),
    "radam": of(torch.optim.RAdam),
    "rmsprop": of(torch.optim.RMSprop, centered=True, momentum=0.5),
    "rprop": of(torch.optim.Rprop),
    "own": of(OwnState),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [model.embed.weight], "lr": 0.1, "weight_decay": 0.0},
            {"params": model.body.parameters(), "betas": (0.8, 0.9)},
        ],
        lr=0.01,
    ),
    "named": lambda model: torch.optim.AdamW(model.body.named_parameters(), lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon and adam"] = muon_and_adam
every_optimizer = pytest.mark.parametrize("make", list(OPTIMIZERS.values()), ids=list(OPTIMIZERS))


def test_no_optimizer_of_torch_is_left_out():
    """But two: LBFGS, which an engine refuses, and SparseAdam, which has a test of its own."""
    known = {each.__name__ for each in torch.optim.__dict__.values() if isinstance(each, type)}
    known -= {"Optimizer", "LBFGS", "SparseAdam"}
    tested = {type(each).__name__ for make in OPTIMIZERS.values() for each in training(make).optimizers}
    assert known <= tested


@pytest.mark.half_by_day
@every_optimizer
@pytest.mark.parametrize("begun", [True, False], ids=["", "before the first step"])
def test_put_back_it_goes_on_as_it_went_and_more_than_once(make, begun):
    run = training(make)
    train(run, *((1, 2, 3) if begun else ()))
    put_back = in_memory(run)
    at = everything(run)
    train(run, 4, 5)
    ended = everything(run)
    for _ in range(2):
        train(run, 8)
        put_back()
        assert same(everything(run), at)
        train(run, 4, 5)
        assert same(everything(run), ended)


@pytest.mark.few_by_day(4)
@every_optimizer
@pytest.mark.parametrize("begun", [True, False], ids=["", "before the first step"])
def test_read_from_disk_into_a_new_training_it_goes_on_as_it_went(make, begun, tmp_path):
    run = training(make)
    train(run, *((1, 2, 3) if begun else ()))
    onto_disk(run, tmp_path)
    at = everything(run)
    train(run, 4, 5)
    ended = everything(run)
    for already in (0, 2):  # steps that it has taken by then, so that it has another state
        fresh = training(make, seed=2)
        train(fresh, *range(already))
        from_disk(fresh, tmp_path)
        assert same(everything(fresh), at)
        train(fresh, 4, 5)
        assert same(everything(fresh), ended)


def test_sparse_gradients(tmp_path):
    class Sparse(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed = nn.Embedding(7, 7, sparse=True)

        def forward(self, ids):
            return self.embed(ids)

    def make(model):
        return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    run = training(make, net=Sparse)
    train(run, 1, 2)
    goes_on_as_it_went(run, training(make, seed=2, net=Sparse), (3,), tmp_path)


def test_the_form_of_a_state_beside_a_parameter_of_no_dimension_keeps_its_device():
    """Adam counts on the CPU, in a tensor of the shape that a scale has on the device."""
    parameter, count = torch.zeros((), device="meta"), torch.zeros(())
    assert _allocate(_form(count, parameter), parameter).device == CPU
    assert _allocate(_form(torch.zeros((), device="meta"), parameter), parameter).device.type == "meta"


# Schedules and scales


class Remembering(LRScheduler):
    """It keeps a list that it writes to."""

    def __init__(self, optimizer):
        self.rates = []
        super().__init__(optimizer)

    def get_lr(self):
        self.rates.append(self.last_epoch)
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),  # which moves momenta, too
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 1, 0.9)], milestones=[3]
    ),
    "remembering": Remembering,
}


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("make", ["momentum", "adam-lr-tensor"])
@pytest.mark.parametrize("schedule", list(SCHEDULES.values()), ids=list(SCHEDULES))
def test_schedules_move_on_from_where_they_were(schedule, make, tmp_path):
    run = training(OPTIMIZERS[make], schedule=schedule)
    train(run, 1, 2)
    goes_on_as_it_went(run, training(OPTIMIZERS[make], seed=2, schedule=schedule), (4, 5, 6), tmp_path)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scales_skips_and_accumulation_are_part_of_it(precision, tmp_path):
    def started(seed):
        options = {"scaling": {"init_scale": 2.0**8, "growth_interval": 2}} if precision == "fp16" else {}
        weight = {"weight": lambda ids, labels: (labels > 1).sum() + 1}
        return training(OPTIMIZERS["adamw-fused"], seed=seed, precision=precision, accumulate=2, **options, **weight)

    run = started(1)
    train(run, 1, 2, 3, 4)
    run.engine.step(lambda ids, labels: run.model(ids).sum() * torch.nan, *batch(1))
    train(run, 5)
    assert run.engine.skipped_steps == 1
    goes_on_as_it_went(run, started(2), (6, 7, 8, 9), tmp_path)


def test_what_is_kept_does_not_change_when_the_training_goes_on():
    run = training(OPTIMIZERS["momentum"], schedule=Remembering, state=ema_and_module)
    train(run, 1)
    live = run.whole.live()
    plain, kept = live.plain, to_json(live.plain, "the state")
    train(run, 2)
    assert to_json(plain, "the state") == kept
    run.whole.restore(live.tensors, plain)
    train(run, 2)
    assert to_json(plain, "the state") == kept


# Modules


def test_names_are_those_of_a_plain_model_and_each_tensor_is_there_once():
    run = training(OPTIMIZERS["sgd"])
    live = run.whole.live()
    assert list(live.tensors) == [
        "model.scale",
        "model.frozen",
        "model.seen",
        "model.cache",
        "model.embed.weight",
        "model.body.0.weight",
        "model.body.0.bias",
        "model.body.1.weight",
        "model.body.1.bias",
        "model.body.1.running_mean",
        "model.body.1.running_var",
        "model.body.1.num_batches_tracked",
    ]
    buffers = {
        "model.seen",
        "model.cache",
        *(name for name in live.tensors if ".running_" in name or name.endswith("tracked")),
    }
    assert live.moving == buffers
    assert live.transient == {"model.cache"}
    assert live.plain["buffers"] == {"transient": ["model.cache"], "empty": ["model.nothing"]}
    assert live.tensors["model.embed.weight"] is run.inner.head.weight


def test_buffers_are_put_back_persistent_or_not(tmp_path):
    run = training(OPTIMIZERS["sgd"])
    train(run, 1)
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    mean = run.inner.body[1].running_mean.clone()
    train(run, 2)
    put_back()
    fresh = training(OPTIMIZERS["sgd"], seed=2)
    from_disk(fresh, tmp_path)
    for each in (run, fresh):
        assert each.inner.seen == 6
        assert torch.equal(each.inner.body[1].running_mean, mean)
        assert each.inner.cache.tolist() == [1.0] * 3


def test_tensors_are_put_back_in_the_memory_that_they_have():
    run = training(OPTIMIZERS["adam"])
    train(run, 1)
    places = {name: tensor.data_ptr() for name, tensor in run.whole.live().tensors.items()}
    put_back = in_memory(run)
    train(run, 2)
    put_back()
    assert {name: tensor.data_ptr() for name, tensor in run.whole.live().tensors.items()} == places


class Buffered(nn.Module):
    """A layer with one more buffer, of any kind."""

    def __init__(self, buffer, *, persistent):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("extra", buffer, persistent=persistent)


def buffered(buffer, *, persistent=False, state=None):
    model = Buffered(buffer, persistent=persistent)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    return SimpleNamespace(
        model=model, engine=engine, whole=TrainingState(engine, state or {}), optimizers=engine.optimizers
    )


OTHER_BUFFERS = {
    "of another shape": (torch.ones(3), torch.zeros(5)),
    "of one value": (torch.ones(1), torch.zeros(5)),  # which a copy would spread over all
    "of another dtype": (torch.ones(3), torch.zeros(3, dtype=torch.int64)),
    "of pairs": (torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.complex128)),
    "of none": (None, torch.zeros(3)),
    "once none": (torch.ones(3), None),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("then", "now"), list(OTHER_BUFFERS.values()), ids=list(OTHER_BUFFERS))
def test_a_buffer_that_was_replaced_by_another_is_rolled_back(then, now, persistent):
    run = buffered(then, persistent=persistent)
    put_back = in_memory(run)
    for _ in range(2):
        run.model.extra = now
        put_back()
        assert same(run.model.extra, then)


@pytest.mark.parametrize(("then", "now"), list(OTHER_BUFFERS.values()), ids=list(OTHER_BUFFERS))
def test_a_buffer_that_is_not_persistent_and_does_not_fit_is_no_obstacle_to_resume(then, now, tmp_path, capsys):
    onto_disk(buffered(then), tmp_path)
    fresh = buffered(now)
    plain = from_disk(fresh, tmp_path)
    fits = then is None or now is None
    assert same(fresh.model.extra, then if fits else now)
    assert plain["buffers"]["transient"] == ["model.extra"]


def test_it_is_said_in_a_line_that_a_model_keeps_its_own(tmp_path, capsys):
    onto_disk(buffered(torch.ones(3)), tmp_path)
    fresh = buffered(torch.zeros(5))
    resuming(fresh, tmp_path, prints=True).newest()
    assert capsys.readouterr().err == (
        "ampwise: model.extra: different in step-00000003 in shape or dtype, or missing there or here. These buffers "
        "are not persistent, so the model keeps its own\n"
    )


@pytest.mark.parametrize("name", ["of another shape", "of one value", "of another dtype", "of pairs"])
def test_a_persistent_buffer_that_does_not_fit_is_refused(name, tmp_path):
    then, now = OTHER_BUFFERS[name]
    onto_disk(buffered(then, persistent=True), tmp_path)
    with pytest.raises(BadInput, match=r"'model.extra' is .* in the checkpoint, and .* here"):
        from_disk(buffered(now, persistent=True), tmp_path)


def test_a_model_with_one_buffer_more_or_less_that_is_not_persistent_goes_on(tmp_path):
    for with_it, there in ((True, False), (False, True)):
        run = buffered(torch.ones(3))
        run.model.register_buffer("more", torch.ones(2), persistent=False) if with_it else None
        onto_disk(run, tmp_path / str(there))
        fresh = buffered(torch.zeros(3))
        fresh.model.register_buffer("more", torch.zeros(2), persistent=False) if there else None
        from_disk(fresh, tmp_path / str(there))
        assert fresh.model.extra.tolist() == [1.0] * 3
        assert not there or fresh.model.more.tolist() == [0.0] * 2


def test_a_buffer_that_is_registered_after_a_snapshot_is_gone_after_a_rollback():
    run = buffered(torch.ones(3))
    put_back = in_memory(run)
    run.model.register_buffer("more", torch.ones(2))
    put_back()
    assert not hasattr(run.model, "more")


def test_a_cache_may_hold_anything(tmp_path):
    """Memory that was never written to may look like NaN."""
    run = buffered(torch.full((3,), torch.nan))
    with Guard(run.engine, tmp_path, every="1 steps") as guard:
        guard.step(lambda: run.model.linear.weight.sum())
    assert guard.events == []
    fresh = buffered(torch.zeros(3))
    Guard(fresh.engine, tmp_path).begin()
    assert fresh.model.extra.isnan().all()


# Every dtype, and tensors that lie otherwise

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def raw(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain if plain.dtype in (torch.bool,) or plain.itemsize > 1 else plain.view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.contiguous().reshape(-1).view(torch.uint8).tolist()


def of_dtype(dtype):
    """Of one dimension, of two and of none, and without values."""
    values = torch.arange(48, dtype=torch.uint8)  # none of which is a NaN, which is refused in weights
    line = (values % 2 if dtype is torch.bool else values).view(dtype)
    return [line, line[:0], line[0], line.reshape(1, -1), line.reshape(-1, 1)[:0]]


class Keeps:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each not in QUANTISED], ids=str)
def test_tensors_of_every_dtype_that_torch_has_are_saved(dtype, tmp_path):
    for number, tensor in enumerate(of_dtype(dtype)):
        run = buffered(tensor, persistent=bool(number % 2), state={"kept": Keeps({"t": [tensor]})})
        put_back = in_memory(run)
        onto_disk(run, tmp_path / str(number))
        other = torch.zeros_like(tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8))
        other = other.view(dtype).reshape(tensor.shape)
        run.model.extra, run.whole._others["kept"].state = other, {}
        put_back()
        fresh = buffered(other, persistent=bool(number % 2), state={"kept": Keeps({})})
        from_disk(fresh, tmp_path / str(number))
        for each in (run, fresh):
            assert raw(each.model.extra) == raw(tensor)
            assert raw(each.whole._others["kept"].state["t"][0]) == raw(tensor)


ODD = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "strided": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conjugated, double": lambda: torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "channels last": lambda: torch.arange(16.0).reshape(1, 4, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("make", list(ODD.values()), ids=list(ODD))
def test_tensors_that_lie_otherwise_are_saved(make, tmp_path):
    expected = raw(make())
    run = buffered(make(), state={"kept": Keeps({"t": make()})})
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    run.model.extra = torch.zeros_like(make())
    put_back()
    assert raw(run.model.extra) == expected
    fresh = buffered(make() * 2 if "expanded" not in str(make) else make(), state={"kept": Keeps({})})
    from_disk(fresh, tmp_path)
    assert raw(fresh.model.extra) == expected
    assert raw(fresh.whole._others["kept"].state["t"]) == expected


def test_buffers_that_are_one_stay_one():
    run = buffered(torch.ones(3))
    run.model.register_buffer("again", run.model.extra)
    assert [name for name in run.whole.live().tensors if "extra" in name or "again" in name] == ["model.extra"]
    put_back = in_memory(run)
    run.model.extra = run.model.again = torch.zeros(5)
    put_back()
    assert run.model.extra.tolist() == [1.0] * 3
    assert run.model.again is run.model.extra


def test_parameters_and_gradients_of_a_state_come_back_as_such(tmp_path):
    state = {"p": nn.Parameter(torch.ones(2)), "f": nn.Parameter(torch.ones(1), requires_grad=False)}
    state["t"] = torch.ones(2, requires_grad=True)
    run = buffered(None, state={"kept": Keeps(state)})
    onto_disk(run, tmp_path)
    fresh = buffered(None, state={"kept": Keeps({})})
    from_disk(fresh, tmp_path)
    back = fresh.whole._others["kept"].state
    assert {name: (type(each), each.requires_grad) for name, each in back.items()} == {
        "p": (nn.Parameter, True),
        "f": (nn.Parameter, False),
        "t": (torch.Tensor, True),
    }


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: buffered(torch.eye(2).to_sparse()), "Guard cannot save model.extra is not dense"),
        (
            lambda: buffered(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
            "Guard cannot save model.extra: it is quantised (torch.qint8)",
        ),
        (
            lambda: buffered(None, state={"kept": Keeps({"t": torch.ones(2).as_subclass(Tagged)})}),
            "other.kept['t'] is a Tagged, which would be restored as a plain tensor. Save a plain one: "
            ".as_subclass(Tensor).",
        ),
        (lambda: buffered(None, state={"kept": Keeps({"t": object()})}), "is a object"),
        (lambda: buffered(None, state={"kept": Keeps({"t": (x for x in ())})}), "is a generator. Supported: "),
        (
            lambda: buffered(None, state={"kept": Keeps({"t": ITSELF})}),
            "is nested more than 50 deep, or contains itself",
        ),
    ],
    ids=["sparse", "quantised", "subclass", "object", "generator", "itself"],
)
def test_what_cannot_be_saved_is_refused_when_the_training_begins(make, words, tmp_path):
    with pytest.raises(BadInput) as refused:
        begun(make(), tmp_path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


ITSELF = []
ITSELF.append(ITSELF)


def begun(run, folder):
    guard = Guard(run.engine, folder, state=run.whole._others)
    try:
        guard.begin()
    finally:
        guard.close()


def test_a_buffer_of_a_subclass_is_written_to_and_stays_what_it_is(tmp_path):
    run = buffered(torch.ones(2).as_subclass(Tagged))
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    with torch.no_grad():
        run.model.extra.zero_()
    put_back()
    fresh = buffered(torch.zeros(2).as_subclass(Tagged))
    from_disk(fresh, tmp_path)
    for each in (run, fresh):
        assert type(each.model.extra) is Tagged
        assert each.model.extra.tolist() == [1.0, 1.0]


# Nested

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
keys |= st.sampled_from(["x", "x.y", "x/y", "x~1y", "~0", "0", "", "ampwise tensor", "ampwise literal", "on", "a\nb"])
tensors = st.integers(0, 1000).map(lambda number: torch.tensor([number, number + 1]))
leaves = tensors | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
states = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
    ),
    max_leaves=10,
)


def identical(one, other):
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return type(one) is type(other) and all(identical(a, b) and identical(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple | deque):
        return type(one) is type(other) and len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return same(one, other) and type(one) is type(other)


@given(states)
def test_any_nesting_comes_back_from_files_as_it_was(state):
    with tempfile.TemporaryDirectory() as folder:
        run = buffered(None, state={"kept": Keeps(state)})
        onto_disk(run, Path(folder))
        fresh = buffered(None, state={"kept": Keeps(None)})
        from_disk(fresh, Path(folder))
        assert identical(fresh.whole._others["kept"].state, state)


@pytest.mark.parametrize(
    "state",
    [
        {"x": {"y": torch.zeros(1)}, "x.y": torch.ones(1)},
        {0: torch.zeros(1), "0": torch.ones(1)},
        {"x": {"y": torch.zeros(1)}, "x/y": torch.ones(1), "x~1y": torch.full((1,), 2.0)},
        {"ampwise tensor": "x", "on": "cpu", "x": torch.ones(1)},
        {"ampwise literal": {"ampwise tensor": torch.ones(1)}},
        {"": torch.zeros(1), "value": torch.ones(1)},
        {"x" * 5000: torch.zeros(1), "\n": torch.ones(1)},
        torch.ones(2),
    ],
    ids=str,
)
def test_keys_that_look_alike_are_distinguished(state, tmp_path):
    run = buffered(None, state={"kept": Keeps(state)})
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    run.whole._others["kept"].state = None
    put_back()
    fresh = buffered(None, state={"kept": Keeps(None)})
    from_disk(fresh, tmp_path)
    for each in (run, fresh):
        assert identical(each.whole._others["kept"].state, state)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.calls = {"count": 0, "history": []}

    def forward(self, x):
        self.calls["count"] += 1
        self.calls["history"].append(self.calls["count"])
        return super().forward(x)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def test_what_modules_save_besides_tensors_is_put_back_and_copied_each_time(tmp_path):
    def started():
        model = nn.Sequential(Counting())
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
        return SimpleNamespace(
            model=model, engine=engine, whole=TrainingState(engine, {}), optimizers=engine.optimizers
        )

    run = started()
    run.model(torch.ones(2))
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    for _ in range(2):
        run.model(torch.ones(2))
        assert run.model[0].calls == {"count": 2, "history": [1, 2]}
        put_back()
        assert run.model[0].calls == {"count": 1, "history": [1]}
    fresh = started()
    from_disk(fresh, tmp_path)
    assert fresh.model[0].calls == {"count": 1, "history": [1]}


def test_two_models_and_two_optimizers_each_by_its_number(tmp_path):
    def started(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(2, 2), nn.Linear(2, 1)]
        models[1].tied = models[0].weight  # one model's weight in the other
        optimizers = [
            torch.optim.Adam(models[0].parameters(), 0.1),
            torch.optim.SGD([models[1].weight, models[1].bias], 0.1, momentum=0.9),
        ]
        engine = Engine(models, optimizers, "fp32")

        def loss(x):
            return models[1](models[0](x)).square().mean() + models[1].tied.sum()

        return SimpleNamespace(engine=engine, loss=loss, whole=TrainingState(engine, {}), models=models)

    def weights(run):
        return [parameter.detach().clone() for model in run.models for parameter in model.parameters()]

    run, x = started(1), torch.ones(3, 2)
    run.engine.step(run.loss, x)
    names = list(run.whole.live().tensors)
    assert names[:4] == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    assert {name for name in names if name.startswith("optimizer.1.")} == {
        f"optimizer.1.state.model.1.{name}.momentum_buffer" for name in ("weight", "bias")
    }
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    run.engine.step(run.loss, x)
    ended = weights(run)
    put_back()
    run.engine.step(run.loss, x)
    assert same(weights(run), ended)
    fresh = started(2)
    from_disk(fresh, tmp_path)
    fresh.engine.step(fresh.loss, x)
    assert same(weights(fresh), ended)


# Wrapped


class Wrapper(nn.Module):
    """Around one module, with tensors of its own: one of them of a name that is in there, too."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.temperature, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return self.module(ids) * self.scale * self.temperature.mean()


def test_what_a_wrapper_has_of_its_own_is_part_of_it(tmp_path):
    def started(seed):
        return training(OPTIMIZERS["adam"], net=lambda seed: Wrapper(Net(seed)), seed=seed)

    run = started(1)
    train(run, 1)
    ours = [name for name in run.whole.live().tensors if name.startswith("model.") and name.count(".") == 1]
    assert ours == ["model.temperature", "model.scale", "model.scale'", "model.frozen", "model.seen", "model.cache"]
    put_back = in_memory(run)
    onto_disk(run, tmp_path)
    train(run, 2)
    ended = everything(run)
    put_back()
    train(run, 2)
    assert same(everything(run), ended)
    fresh = started(2)
    from_disk(fresh, tmp_path)
    train(fresh, 2)
    assert same(everything(fresh), ended)


@pytest.fixture
def a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_ddp(model):
    return DistributedDataParallel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_ddp(model):
    return torch.compile(DistributedDataParallel(model), backend="eager")


def compiled_inside(model):
    model.body = torch.compile(model.body, backend="eager")
    return model


WRAPPERS = [in_ddp, compiled, compiled_ddp, compiled_inside]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_are_not_in_the_names(wrap, a_group):
    def state(wrapped):
        run = training(OPTIMIZERS["adam"], wrap=wrapped)
        for parameter in run.inner.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizers[0].step()
        live = run.whole.live()
        return {name: tuple(tensor.shape) for name, tensor in live.tensors.items()}, list(live.plain["modules"])

    assert state(wrap) == state(None)


def test_a_state_of_a_plain_model_fits_in_ddp_and_back(a_group, tmp_path):
    for way in ((None, in_ddp), (in_ddp, None)):
        folder = tmp_path / str(way[0])
        run = training(OPTIMIZERS["adam"], wrap=way[0])
        train(run, 1, 2)
        onto_disk(run, folder)
        fresh = training(OPTIMIZERS["adam"], seed=2, wrap=way[1])
        from_disk(fresh, folder)
        for each in (run, fresh):
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
            train(each, 3, 4)
        assert same(run.inner.state_dict(), fresh.inner.state_dict())


# Others


class Ema:
    """Weights that follow, as one writes it oneself."""

    def __init__(self, model):
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.updates, self.recent = 0, []

    def update(self, model):
        self.updates += 1
        self.recent.append(self.updates)
        for name, each in model.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(each.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates, "recent": self.recent}

    def load_state_dict(self, state):
        self.shadow, self.updates, self.recent = state["shadow"], state["updates"], state["recent"]


def ema_and_module(run):
    return {"ema": Ema(run.inner), "swa": AveragedModel(run.inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))}


def train_both(run, *numbers):
    for number in numbers:
        train(run, number)
        run.others["ema"].update(run.inner)
        run.others["swa"].update_parameters(run.inner)


def test_what_the_user_names_is_put_back_too(tmp_path):
    run = training(OPTIMIZERS["adam"], state=ema_and_module)
    train_both(run, 1, 2)
    fresh = training(OPTIMIZERS["adam"], seed=2, state=ema_and_module)
    goes_on_as_it_went(run, fresh, (3, 4), tmp_path, train=train_both)


def test_a_state_of_something_that_is_not_named_any_more_is_refused(tmp_path):
    onto_disk(training(OPTIMIZERS["sgd"], state=ema_and_module), tmp_path)
    with pytest.raises(BadInput, match=r"it has the state of 'ema', and Guard\(state=\.\.\.\) does not name it\."):
        from_disk(training(OPTIMIZERS["sgd"]), tmp_path)


def test_what_the_user_names_may_change_at_any_time():
    """On a GPU it is copied at once: nobody knows when it is written to."""
    run = training(OPTIMIZERS["adam"], state=ema_and_module)
    live = run.whole.live()
    others = {name for name in live.tensors if name.startswith("other.")}
    assert {"other.ema['shadow']['scale']", "other.swa.scale", "other.swa.n_averaged"} <= others
    assert others <= live.moving


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"ema": object()}, "Guard(state={'ema': ...}): object has no state_dict and load_state_dict."),
        (
            {"my ema": nn.Linear(1, 1)},
            "Guard(state=...): 'my ema' is not a valid name: expected a Python identifier.",
        ),
        ({3: nn.Linear(1, 1)}, "Guard(state=...): 3 is not a valid name: expected a Python identifier."),
    ],
)
def test_what_cannot_be_named_or_saved_is_refused(state, words):
    with pytest.raises(BadInput) as refused:
        TrainingState(training(OPTIMIZERS["sgd"]).engine, state)
    assert str(refused.value) == words


def test_fsdp1_is_refused():
    FullyShardedDataParallel = type("FullyShardedDataParallel", (nn.Sequential,), {})  # noqa: N806
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(1, 1)))
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    with pytest.raises(BadInput, match=r"FSDP1 models are not supported\. Use fully_shard \(FSDP2\), or DDP\."):
        TrainingState(engine, {})


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_weights_that_have_no_values_yet_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(1))
    engine = Engine(model, torch.optim.SGD(model[0].parameters(), 0.1), "fp32")
    with pytest.raises(BadInput) as refused:
        TrainingState(engine, {}).live()
    assert str(refused.value) == "1.weight is not initialized yet: run the model once before the guard starts."


# Other trainings


def changed(model):
    model.extra = nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: training(lambda model: [OPTIMIZERS["adam"](model.body), of(torch.optim.SGD)(model.embed)]),
            "1 optimizers; this engine has 2",
        ),
        (lambda: training(OPTIMIZERS["groups"]), "1 parameter groups; AdamW has 2"),
        (lambda: training(OPTIMIZERS["adam"], wrap=changed), "model.extra.weight"),
    ],
    ids=["optimizers", "groups", "model"],
)
def test_a_state_of_another_training_is_refused_in_a_line(other, words, tmp_path):
    run = training(OPTIMIZERS["adam"])
    train(run, 1)
    onto_disk(run, tmp_path)
    stranger = other()
    before = copy.deepcopy(stranger.inner.state_dict())
    with pytest.raises(BadInput) as refused:
        from_disk(stranger, tmp_path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert same(stranger.inner.state_dict(), before)


def test_plain_data_survives_json():
    run = training(OPTIMIZERS["groups"], schedule=SCHEDULES["one cycle"], state=ema_and_module)
    train_both(run, 1)
    plain = run.whole.live().plain
    assert to_json(from_json(to_json(plain, "the state")), "the state") == to_json(plain, "the state")
