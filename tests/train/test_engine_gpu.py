"""The Engine on a GPU: what it gives is what a loop by hand gives, and nothing waits for the device."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ampwise import Engine
from ampwise.hardware.torch_info import read_fp32_switches

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = 12


def build(*, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(64)] if norm else []
    return nn.Sequential(nn.Linear(32, 64), *middle, nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)).cuda()


def batches(count=BATCHES):
    made = torch.Generator(device="cuda").manual_seed(1)
    return [
        (
            torch.randn(16, 32, device="cuda", generator=made),
            torch.randint(0, 8, (16,), device="cuda", generator=made),
        )
        for _ in range(count)
    ]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **options)


def by_hand(model, precision, data, *, accumulate=1, clip=None, init_scale=2.0**16):
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=init_scale, enabled=precision == "fp16")
    dtype = DTYPES[precision]
    for number, (x, y) in enumerate(data, 1):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = cross_entropy(model(x), y)
            if accumulate > 1:
                loss = loss / accumulate
        scaler.scale(loss).backward()
        if number % accumulate == 0:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def no_waiting():
    """From its call on, whatever waits for the device raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def by_engine(model, data, **options):
    engine = Engine(model, adamw(model), **options)

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    for x, y in engine.batches(data):
        engine.step(loss_fn, x, y)
    return engine, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_clipping_it_equals_the_loop_by_hand_to_the_bit(precision, accumulate):
    expected = by_hand(build(), precision, batches(), accumulate=accumulate)
    _, weights = by_engine(build(), batches(), precision=precision, accumulate=accumulate)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_with_clipping_it_equals_the_loop_by_hand(precision, accumulate):
    expected = by_hand(build(), precision, batches(), accumulate=accumulate, clip=0.05)
    engine, weights = by_engine(build(), batches(), precision=precision, accumulate=accumulate, clip_norm=0.05)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert min(engine.history["grad_norm"]) > 0.05


def test_an_overflow_is_skipped_and_the_scale_found():
    expected = by_hand(build(), "fp16", batches(40), init_scale=2.0**30)
    engine, weights = by_engine(build(), batches(40), precision="fp16", scaling={"init_scale": 2.0**30})
    assert all(map(torch.equal, weights, expected))
    assert engine.skipped_steps > 0
    assert engine.applied_steps + engine.skipped_steps == 40
    assert engine.history["scale"][-1] == engine.scaler.get_scale()


@pytest.mark.parametrize("precision", list(DTYPES))
def test_nothing_waits(precision, no_waiting):
    model = build(norm=True)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = Engine(model, optimizer, precision, clip_norm=1.0, accumulate=2, scheduler=scheduler)

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    data = batches(30)
    for x, y in data[:10]:
        engine.step(loss_fn, x, y)
    no_waiting()
    for x, y in data[10:]:
        engine.step(loss_fn, x, y)
    torch.cuda.set_sync_debug_mode("default")
    assert engine.applied_steps == 15
    assert engine.history["loss"][-1] > 0


def test_token_weights_do_not_wait(no_waiting):
    model = build()
    engine = Engine(model, adamw(model), "bf16", accumulate=2, weight=lambda x, y: (y != 0).sum())

    def loss_fn(x, y):
        return cross_entropy(model(x), y, ignore_index=0)

    data = batches(12)
    for x, y in data[:4]:
        engine.step(loss_fn, x, y)
    no_waiting()
    for x, y in data[4:]:
        step = engine.step(loss_fn, x, y)
    torch.cuda.set_sync_debug_mode("default")
    assert step.closed
    assert step.loss > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_skipped_step_leaves_nothing_behind(precision):
    model = build(norm=True)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = Engine(model, optimizer, precision, clip_norm=1.0, scheduler=scheduler)
    data = batches(4)

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    engine.step(loss_fn, *data[0])
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    bad = data[1][0].clone()
    bad[0, 0] = torch.nan
    step = engine.step(loss_fn, bad, data[1][1])
    after = model.state_dict(), optimizer.state_dict()["state"]
    assert step.skipped
    assert all(torch.equal(after[0][key], before[0][key]) for key in before[0])
    for index, state in before[1].items():
        assert all(torch.equal(after[1][index][key], state[key]) for key in state)
    good = engine.step(loss_fn, *data[2])
    assert (step.lr, good.lr) == (5e-3, 5e-3)
    assert not good.skipped


def test_the_rate_of_a_tensor_is_that_of_its_step():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = Engine(model, optimizer, "bf16", scheduler=scheduler)
    for x, y in batches(4):
        engine.step(lambda x, y: cross_entropy(model(x), y), x, y)
    assert engine.history["lr"] == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])


def test_tf32_and_fp32_differ_inside_and_nothing_stays_switched():
    switches = read_fp32_switches(torch)
    model = nn.Linear(512, 512).cuda()
    x = torch.randn(512, 512, device="cuda")
    exact = torch.nn.functional.linear(x.double(), model.weight.double(), model.bias.double())
    errors = {}
    for precision in ("fp32", "tf32"):
        with Engine(model, adamw(model), precision).autocast():
            errors[precision] = float((model(x) - exact).detach().abs().max())
        assert read_fp32_switches(torch) == switches
    assert errors["tf32"] > 20 * errors["fp32"]


def test_auto_says_what_it_chose(capsys):
    model = build()
    engine = Engine(model, adamw(model))
    assert engine.precision in ("bf16", "fp16", "fp32")
    said = capsys.readouterr().err.splitlines()
    assert said == [f"ampwise: {engine.why}"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_compiled():
    model = build()
    compiled = torch.compile(model)
    engine = Engine(compiled, adamw(model), "bf16", clip_norm=1.0)
    losses = [engine.step(lambda x, y: cross_entropy(compiled(x), y), *batches(1)[0]).loss for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


# Graphs


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_gives_the_same(precision, accumulate):
    options = {"precision": precision, "accumulate": accumulate, "clip_norm": 0.05}
    plain, expected = by_engine(build(norm=True), batches(21), **options)
    captured, weights = by_engine(build(norm=True), batches(21), graph=True, **options)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert captured.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-3)
    assert captured.applied_steps == plain.applied_steps


def test_a_graph_finds_the_scale_and_holds_statistics():
    model = build(norm=True)
    engine = Engine(model, adamw(model), "fp16", graph=True, scaling={"init_scale": 2.0**30})

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    for x, y in batches(40):
        engine.step(loss_fn, x, y)
    assert 0 < engine.skipped_steps < 30
    assert int(model[1].num_batches_tracked) == engine.applied_steps


def test_a_graph_returns_extras_that_stay():
    model = build()
    engine = Engine(model, adamw(model), "bf16", graph=True)

    def loss_fn(x, y):
        logits = model(x)
        return cross_entropy(logits, y), logits.argmax(-1)

    steps = [engine.step(loss_fn, x, y) for x, y in batches(8)]
    assert steps[5].extra.data_ptr() != steps[6].extra.data_ptr()
    assert not steps[5].extra.requires_grad


def test_parameters_without_gradients_stay_without_in_a_graph():
    model = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)]).cuda()
    engine = Engine(model, adamw(model, weight_decay=0.5), "bf16", graph=True)
    unused = model[1].weight.detach().clone()

    def loss_fn(x, y):
        return cross_entropy(model[0](x), y)

    for x, y in batches(8):
        engine.step(loss_fn, x, y)
    assert torch.equal(model[1].weight, unused)


def test_what_graphs_cannot_take():
    model = build()
    engine = Engine(model, adamw(model), "bf16", graph=True)
    (x, y), *_ = batches(1)
    with pytest.raises(ValueError, match="not on the GPU"):
        engine.step(lambda x, y: cross_entropy(model(x.cuda()), y), x.cpu(), y)
    for width in range(2, 10):
        engine.step(lambda x, y: cross_entropy(model(x), y), x[:width], y[:width])
    with pytest.raises(ValueError, match="Define the loss function once"):
        engine.step(lambda x, y: cross_entropy(model(x), y), x, y)


WAITING = """
import torch
from torch import nn
from ampwise import Engine

model = nn.Linear(4, 1).cuda()
engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16", graph=True)
x = torch.ones(2, 4, device="cuda")

def waits(x):
    loss = model(x).square().mean()
    float(loss)
    return loss

for _ in range(3):
    engine.step(waits, x)
try:
    engine.step(waits, x)
except RuntimeError as error:
    print(error.__notes__)
torch.randn(3, device="cuda")
print(engine.step(lambda x: model(x).square().mean(), x).applied)
"""


def test_a_wait_in_a_graph_is_refused_and_training_goes_on():
    """In a process of its own: a capture that fails may leave others' random numbers unusable."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    note, applied = done.stdout.splitlines()
    assert "syncs with the GPU" in note
    assert applied == "True"
