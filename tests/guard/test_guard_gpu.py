"""A guard on a GPU: copies are made beside the training, and a step is judged when the next is under way."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampwise import BadInput, Engine, Guard, Ladder, Stopped
from ampwise.guard.snapshots import MemorySnapshots
from ampwise.guard.state import TrainingState
from ampwise.train.callback import Callback

pytestmark = pytest.mark.gpu

NAN = float("nan")


class Net(nn.Module):
    def __init__(self, seed, width):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1))
        self.scale = nn.Parameter(torch.ones(()))  # of no dimension, as Adam's count is, which lies on the CPU

    def forward(self, x):
        return self.body(x) * self.scale


def data(count=20, bad=()):
    made = torch.Generator(device="cuda").manual_seed(0)
    batches = [torch.randn(32, 16, device="cuda", generator=made) for _ in range(count)]
    return [batch * NAN if number in bad else batch for number, batch in enumerate(batches)]


def training(directory, *, seed=1, width=64, precision="bf16", fused=True, **options):
    model = Net(seed, width).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    engine = Engine(model, optimizer, precision)
    ladder = Ladder(skips=2, healthy=3)
    guard = Guard(engine, directory, **{"snapshot_every": 5, "every": "1000 steps", "ladder": ladder, **options})

    def loss(x):
        return F.mse_loss(model(x).float(), x.sum(1, keepdim=True))

    return SimpleNamespace(model=model, optimizer=optimizer, engine=engine, guard=guard, loss=loss)


def train(run, batches):
    with run.guard:
        for batch in run.guard.batches(batches):
            run.guard.step(run.loss, batch)
    return run


def told(run):
    return [event.name for event in run.guard.events]


def weights(run):
    return torch.cat([each.detach().double().flatten() for each in run.model.state_dict().values()])


# Snapshots


@pytest.mark.parametrize("place", ["host", "device"])
def test_copies_are_those_of_the_moment_though_training_goes_on_at_once(tmp_path, place):
    """Large enough that the copies still run when the next forward pass does, and its update waits for them."""
    run = training(tmp_path, width=8192)
    for batch in data(2):
        run.engine.step(run.loss, batch)
    whole, snapshots = TrainingState(run.engine, {}), MemorySnapshots(run.engine.device, place)

    class CopyFirst(Callback):
        def before_update(self, number, loss):
            snapshots.before_update()

    run.engine.add_callback(CopyFirst())
    live = whole.live()
    expected = {name: tensor.detach().clone() for name, tensor in live.tensors.items()}
    torch.cuda.synchronize()
    taken = snapshots.take(2, live)
    for batch in data(4):
        run.engine.step(run.loss, batch)
    torch.cuda.synchronize()
    taken.wait()
    for name, value in taken.values.items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name
        on_device = expected[name].is_cuda and place == "device"
        assert value.is_cuda == on_device
        assert value.is_pinned() == (expected[name].is_cuda and not on_device)


def test_what_the_user_writes_to_after_the_step_is_copied_before(tmp_path):
    run = training(tmp_path, width=4096)
    average = nn.Linear(4096, 4096).cuda()
    whole, snapshots = TrainingState(run.engine, {"average": average}), MemorySnapshots(run.engine.device, "host")
    live = whole.live()
    expected = average.weight.detach().clone()
    torch.cuda.synchronize()
    taken = snapshots.take(0, live)
    with torch.no_grad():
        average.weight.fill_(NAN)  # at once, with nothing to wait for the copies
    torch.cuda.synchronize()
    taken.wait()
    assert torch.equal(taken.values["other.average.weight"], expected.cpu())


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_put_back_it_goes_on_as_it_went(tmp_path, place, fused):
    run = training(tmp_path, fused=fused)
    for batch in data(3):
        run.engine.step(run.loss, batch)
    whole = TrainingState(run.engine, {})
    taken = MemorySnapshots(run.engine.device, place).take(3, whole.live())
    taken.wait()
    ended = []
    for _ in range(2):
        for batch in data(6)[3:]:
            run.engine.step(run.loss, batch)
        ended.append(weights(run))
        whole.restore(taken.values, taken.plain)
    assert torch.equal(*ended)


# The guard


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_that_ends_and_goes_on_is_an_unbroken_one(tmp_path, precision, fused):
    options = {"precision": precision, "fused": fused}
    unbroken = train(training(tmp_path / "unbroken", **options), data())
    first = training(tmp_path / "run", **options)
    with first.guard:
        for number, batch in enumerate(first.guard.batches(data())):
            first.guard.step(first.loss, batch)
            if number == 8:
                break
    second = train(training(tmp_path / "run", seed=2, **options), data())
    assert torch.equal(weights(second), weights(unbroken))


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("bad", [(2, 3), (10, 11), (18, 19)], ids=["at the start", "in the middle", "at the end"])
def test_batches_that_fail_are_passed_over_and_nothing_else_is_lost(tmp_path, bad, place):
    run = train(training(tmp_path / "run", snapshots_on=place), data(20, bad))
    assert told(run) == ["step-skipped", "rolled-back"]
    assert run.guard.passed_over == [(0, number) for number in bad]
    without = training(tmp_path / "without")
    train(without, [batch for number, batch in enumerate(data()) if number not in bad])
    assert torch.equal(weights(run), weights(without))


def test_where_nothing_helps_it_stops_with_a_capsule(tmp_path):
    run = training(tmp_path)
    with pytest.raises(Stopped) as stopped:
        train(run, data(60, bad=range(20, 60)))
    assert stopped.value.code == 70
    assert run.guard.events[-1].fields["capsule"]
    assert list((tmp_path / "capsules").iterdir())


def test_checkpoints_beside_the_training_are_whole(tmp_path):
    run = train(training(tmp_path, every="3 steps", keep=9), data())
    assert run.guard.events == []
    newest = run.guard.last_checkpoint
    assert newest.step == 20
    fresh = training(tmp_path, seed=2)
    fresh.guard.begin()
    assert torch.equal(weights(fresh), weights(run))
    fresh.guard.close()


def test_a_batch_that_has_no_room_is_cut(tmp_path):
    run = training(tmp_path, split=True)
    free, _ = torch.cuda.mem_get_info()

    def loss(x):
        torch.empty(int(free * len(x) / 20), dtype=torch.uint8, device="cuda")  # no room for more than 16 rows or so
        return run.loss(x)

    with run.guard:
        assert run.guard.step(loss, data(1)[0]).closed
    assert "out-of-memory" in told(run)
    assert run.engine.applied_steps == 1


def test_graphs_have_their_precision_in_them():
    model = nn.Linear(4, 1).cuda()
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", graph=True)
    with pytest.raises(BadInput, match=r"^change_precision\(\): not with graph=True"):
        engine.change_precision("fp32")
