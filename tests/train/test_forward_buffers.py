"""A skipped step leaves no trace in any buffer, however a forward pass has changed it."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from ampwise import Engine
from ampwise.train import buffer_snapshot as forward_buffers
from ampwise.train.buffer_snapshot import BufferSnapshot, OtherBuffers

YES, NO = torch.tensor(1.0), torch.tensor(0.0)


class Writes(nn.Module):
    """A layer that notes something about what it is given."""

    def __init__(self, write, start=None, **buffers):
        super().__init__()
        self.linear, self.write = nn.Linear(3, 3), write
        self.register_buffer("seen", torch.zeros(3) if start is None else start())
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x):
        self.write(self, x.detach().mean(0))
        return self.linear(x)


def grows(module, mean):
    module.seen = torch.cat([module.seen, mean])


def registers(module, mean):
    if not hasattr(module, "more"):
        module.register_buffer("more", mean.clone())
    module.more.add_(1)


def starts_when_it_is_full(module, mean):
    module.seen.add_(1)
    if module.seen[0] > 2:
        module.late.add_(mean)


def first_in_place_then_replaced(module, mean):
    module.seen.add_(mean)
    module.seen = module.seen * 2


def keeps_the_batch(module, mean):
    module.seen = mean


def in_place(module, mean):
    module.seen.mul_(0.9).add_(mean, alpha=0.1)


def by_data(module, mean):
    module.seen.data.mul_(0.9).add_(mean, alpha=0.1)


def replaced(module, mean):
    module.seen = module.seen * 0.9 + mean * 0.1


def other_memory(module, mean):
    module.seen.data = module.seen.data + mean


def of_dtype(dtype):
    def write(module, mean):
        module.seen.view(torch.uint8).bitwise_xor_(1)

    return lambda: Writes(write, lambda: torch.zeros(4, dtype=dtype))


def sparse(module, mean):
    module.seen.mul_(2)


def tied():
    layer = Writes(in_place)
    layer.register_buffer("again", layer.seen)
    return layer


def view_of_another():
    layer = Writes(in_place)
    layer.register_buffer("part", layer.seen[:2])
    return layer


KINDS = {
    "in place": lambda: Writes(in_place),
    "by data": lambda: Writes(by_data),
    "replaced": lambda: Writes(replaced),
    "replaced by the batch": lambda: Writes(keeps_the_batch),
    "written to and replaced": lambda: Writes(first_in_place_then_replaced),
    "other memory": lambda: Writes(other_memory),
    "grows": lambda: Writes(grows),
    "from none": lambda: Writes(keeps_the_batch, lambda: None),
    "to none": lambda: Writes(lambda module, mean: setattr(module, "seen", None)),
    "to another dtype": lambda: Writes(lambda module, mean: setattr(module, "seen", mean.double())),
    "registered": lambda: Writes(registers),
    "registered without a value": lambda: Writes(lambda module, mean: module.register_buffer("none", None)),
    "not persistent": lambda: Writes(lambda module, mean: module.cache.add_(mean), cache=torch.zeros(3)),
    "late": lambda: Writes(starts_when_it_is_full, late=torch.zeros(3)),
    "counter": lambda: Writes(lambda module, mean: module.seen.add_(1), lambda: torch.tensor(2**40)),
    "flag": lambda: Writes(lambda module, mean: module.seen.logical_not_(), lambda: torch.tensor(False)),
    "strided": lambda: Writes(in_place, lambda: torch.zeros(6)[::2]),
    "expanded": lambda: Writes(lambda module, mean: setattr(module, "seen", module.seen + 1), lambda: YES.expand(3)),
    "conjugated": lambda: Writes(
        lambda module, mean: module.seen.mul_(1j), lambda: torch.tensor([1 + 2j, 3j, 4.0]).conj()
    ),
    "sparse": lambda: Writes(sparse, lambda: torch.eye(3).to_sparse()),
    "tied": tied,
    "view": view_of_another,
    "complex": of_dtype(torch.complex128),
    "uint16": of_dtype(torch.uint16),
    "float8": of_dtype(torch.float8_e4m3fn),
    "spectral norm": lambda: spectral_norm(nn.Linear(3, 3)),
    "spectral norm by hooks": lambda: old_spectral_norm(nn.Linear(3, 3)),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "beside batch norm": lambda: nn.Sequential(Writes(in_place), nn.BatchNorm1d(3)),
}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
every_kind = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))


def bits(tensor):
    if tensor is None:
        return None
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).tolist()


def buffers_of(model):
    return {
        f"{path}.{name}": bits(buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


def batch(number, device="cpu"):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(device)


def started(make, device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(3, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    engine = Engine(model, optimizer, "fp32", **{"trace": False, **options})
    return model, engine, lambda x, factor: (model(x) * factor).mean()


@pytest.fixture(params=["host", "device"])
def decided_by(request, monkeypatch):
    """As on a GPU, whose host does not know whether a step is skipped, and as on a CPU."""
    if request.param == "device":

        def by_the_flag(kept, skipped):
            with torch.no_grad():
                kept._others.learn()
                kept._restore_if(skipped)

        monkeypatch.setattr(BufferSnapshot, "end_window", by_the_flag)


def train(make, factors, device="cpu", **options):
    """The buffers after each step."""
    model, engine, loss = started(make, device, **options)
    after = []
    for number, factor in enumerate(factors):
        step = engine.step(loss, batch(number, device), torch.tensor(factor, device=device))
        if step.closed:
            after.append(buffers_of(model))
    return after, engine


@pytest.mark.few_by_day(3)
@every_kind
@pytest.mark.parametrize("trace", [False, True])
def test_a_skipped_step_changes_no_buffer_and_another_does(make, trace, decided_by, capsys):
    before = buffers_of(started(make)[0])
    after, engine = train(make, [math.nan, 1.0, 1.0, math.inf, math.nan, 1.0, 1.0, math.nan], trace=trace)
    assert engine.skipped_steps == 4
    assert after[0] == before
    assert after[2] == after[3] == after[4]
    assert after[6] == after[7]
    if make is not KINDS["spectral norm"]:  # which has converged
        assert after[1] != before or after[2] != before


@pytest.mark.half_by_day
@every_kind
def test_in_a_window_of_micro_batches_too(make, decided_by):
    before = buffers_of(started(make)[0])
    after, engine = train(make, [1.0, math.nan, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0], accumulate=2)
    assert engine.skipped_steps == 2
    assert after[0] == before
    assert after[2] == after[3]


@pytest.mark.half_by_day
@every_kind
def test_a_step_that_is_applied_leaves_what_the_model_made_of_it(make, decided_by):
    """To the bit what a loop without an engine has."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    expected = []
    for number in range(5):
        optimizer.zero_grad()
        model(batch(number)).mean().backward()
        optimizer.step()
        expected.append(buffers_of(model))
    assert train(make, [1.0] * 5)[0] == expected


@every_kind
def test_a_forward_pass_that_fails_changes_no_buffer(make):
    model, engine, loss = started(make, accumulate=2)

    def fails(x, factor):
        loss(x, factor)
        raise ValueError("no such batch")

    for number in range(3):
        engine.step(loss, batch(number), YES)
        before = buffers_of(model)
        with pytest.raises(ValueError, match="no such batch"):
            engine.step(fails, batch(9), YES)
        assert buffers_of(model) == before
        engine.step(loss, batch(number), YES)


def test_the_batch_itself_is_not_written_to(decided_by):
    """A buffer that is the batch is replaced: the memory is the user's."""
    model, engine, loss = started(lambda: Writes(lambda module, mean: None))
    model[0].write = lambda module, mean: setattr(module, "seen", x)
    given = [batch(number) for number in range(4)]
    for number, x in enumerate(given):
        engine.step(loss, x, torch.tensor(math.nan if number % 2 else 1.0))
        assert torch.equal(model[0].seen, given[number - number % 2])
    assert all(torch.equal(x, batch(number)) for number, x in enumerate(given))


def test_dropping_a_window_that_is_not_open_changes_nothing():
    model, engine, loss = started(lambda: nn.Sequential(Writes(in_place), nn.BatchNorm1d(3)))
    engine.step(loss, batch(0), YES)
    before = buffers_of(model)
    engine.drop_window()
    assert buffers_of(model) == before


def test_what_is_changed_between_steps_stays_when_the_next_is_skipped():
    model, engine, loss = started(lambda: Writes(by_data, temperature=torch.ones(())))
    for number in range(6):
        model[0].temperature.mul_(0.5)
        model[0].seen.fill_(number)
        engine.step(loss, batch(number), torch.tensor(math.nan))
        assert model[0].temperature == 0.5 ** (number + 1)
        assert model[0].seen.tolist() == [number] * 3


def test_an_open_window_that_is_saved_is_undone_by_the_run_that_goes_on():
    model, engine, loss = started(KINDS["in place"], accumulate=2)
    before = buffers_of(model)
    engine.step(loss, batch(0), torch.tensor(math.nan))
    assert buffers_of(model) != before
    state = engine.state_dict()
    other, resumed, its_loss = started(KINDS["in place"], accumulate=2)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    resumed.step(its_loss, batch(1), YES)
    assert resumed.skipped_steps == 1
    assert buffers_of(other) == before


def test_buffers_that_never_change_are_copied_once():
    kept = OtherBuffers([Writes(in_place, mask=torch.ones(4))])
    copied = []

    def copy_all(pairs):
        found = list(pairs)
        copied.append(len(found))
        for target, source in found:
            target.copy_(source)

    original, forward_buffers._copy_all = forward_buffers._copy_all, copy_all
    try:
        for number in range(3):
            kept.remember()
            with torch.no_grad():
                next(iter(kept._held)).module(batch(number))
            kept.learn()
    finally:
        forward_buffers._copy_all = original
    assert copied == [2, 1, 1]


def test_copies_of_large_buffers_wait_in_memory_of_the_host(monkeypatch):
    """Of those on a GPU; here the rule, for what is on none."""
    monkeypatch.setattr(forward_buffers, "MAX_BYTES_ON_DEVICE", 20)
    layer = Writes(in_place, small=torch.zeros(2, device="meta"))
    kept = OtherBuffers([layer])
    kept.remember()
    (seen, small) = kept._held.values()
    assert not kept._goes_to_host(seen)
    assert not kept._goes_to_host(small)  # it has no values to copy


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@every_kind
def test_on_a_gpu_a_skipped_step_changes_no_buffer(make, accumulate):
    if make in (KINDS["sparse"], KINDS["conjugated"], KINDS["view"], KINDS["tied"]):
        pytest.skip("moving a model to the GPU makes another kind of it")
    before = buffers_of(started(make, "cuda")[0])
    factors = [math.nan, 1.0, 1.0, math.inf, math.nan, 1.0, 1.0, math.nan]
    after, engine = train(make, [f for f in factors for _ in range(accumulate)], "cuda", accumulate=accumulate)
    assert engine.skipped_steps == 4
    assert after[0] == before
    assert after[2] == after[3] == after[4]
    assert after[6] == after[7]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["in place", "by data", "replaced", "counter", "flag", "spectral norm"])
def test_on_a_gpu_nothing_waits(name):
    _, engine, loss = started(KINDS[name], "cuda")
    given = [(batch(n, "cuda"), torch.tensor(math.nan if n % 3 == 2 else 1.0, device="cuda")) for n in range(12)]
    for x, factor in given[:6]:
        engine.step(loss, x, factor)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for x, factor in given[6:]:
            engine.step(loss, x, factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.skipped_steps == 4


@pytest.mark.gpu
def test_on_a_gpu_a_large_buffer_that_begins_to_change_is_put_back(monkeypatch):
    monkeypatch.setattr(forward_buffers, "MAX_BYTES_ON_DEVICE", 8)
    after, _ = train(KINDS["late"], [1.0, 1.0, math.nan, 1.0, math.nan], "cuda")
    assert after[1] == after[2]
    assert after[3] == after[4] != after[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["in place", "by data", "counter"])
def test_on_a_gpu_in_graphs(name):
    factors = [1.0] * 5 + [math.nan, 1.0, math.nan, 1.0]
    after, engine = train(KINDS[name], factors, "cuda", graph=True)
    expected, _ = train(KINDS[name], factors, "cuda")
    assert engine.skipped_steps == 2
    assert after[4] == after[5]
    assert after[6] == after[7]
    assert after == expected
