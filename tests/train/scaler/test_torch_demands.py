"""What torch's own tests ask of a GradScaler, asked of torch's and of ours.

Each test passes on torch's class: that is the proof that the demand is torch's.
"""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.nn.functional import mse_loss

import ampwise

SCALERS = {"torch": torch.amp.GradScaler, "ampwise": ampwise.GradScaler}
WILD = [math.inf, -math.inf, math.nan]
IMPLEMENTATIONS = ["for-loop", "foreach", "fused"]
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.fixture(params=SCALERS)
def scaler_type(request):
    return SCALERS[request.param]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def network(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)


def batches(device, count=4):
    torch.manual_seed(1)
    return [(torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)) for _ in range(count)]


def one_weight(device="cpu", grad=(1.0, 2.0), optimizer=torch.optim.SGD, **options):
    """A parameter whose gradient is as given, and the optimizer that holds it."""
    weight = nn.Parameter(torch.zeros(len(grad), device=device))
    weight.grad = torch.tensor(grad, device=device)
    return weight, optimizer([weight], **{"lr": 1.0, **options})


def started(scaler_type, device="cpu", init_scale=4.0, **options):
    """A scaler whose scale tensor exists already."""
    scaler = scaler_type(device, init_scale=init_scale, **options)
    scaler.scale(torch.zeros(1, device=device))
    return scaler


def turn(scaler, device="cpu", grad=1.0):
    """One iteration with this gradient."""
    scaler.scale(torch.zeros(1, device=device))
    _, optimizer = one_weight(device, [grad])
    scaler.step(optimizer)
    scaler.update()


def fit(model, optimizer, data, scaler=None, spoil=None, loss_of=None, prepare=None, every=1):
    """Train; batch ``spoil`` has an inf in its gradients: the control, without a scaler, leaves out that step."""
    for i, (x, y) in enumerate(data):
        if i % every == 0:
            optimizer.zero_grad()
        loss = (loss_of or plain_loss)(model, x, y, scaler) / every
        (loss if scaler is None else scaler.scale(loss)).backward()
        if i == spoil and scaler is not None:
            list(model.parameters())[2].grad[0, 0] = math.inf
        if (i + 1) % every:
            continue
        if prepare is not None:
            prepare(model, optimizer, scaler)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif i != spoil:
            optimizer.step()


def plain_loss(model, x, y, scaler):
    return mse_loss(model(x), y)


def penalised_loss(model, x, y, scaler):
    loss = mse_loss(model(x), y)
    factor = 1.0 if scaler is None else scaler.get_scale()
    grads = torch.autograd.grad(loss if scaler is None else scaler.scale(loss), model.parameters(), create_graph=True)
    return loss + sum((grad / factor).square().sum() for grad in grads).sqrt()


def clip_true(model, optimizer, scaler):
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def clip_scaled(model, optimizer, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 0.2 * (1.0 if scaler is None else scaler.get_scale()))


def alike(model, control, optimizer, optimizer_control, rtol=1e-5, atol=1e-6, grads=False):
    """Parameters and optimizer state, and gradients too where asked, equal the control's."""
    for ours, theirs in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        if grads:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol)
        state, expected = optimizer.state[ours], optimizer_control.state[theirs]
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=rtol, atol=atol, check_device=False, msg=key)
    return True


def pair(device, kind=torch.optim.SGD, lr=0.5):
    """A model, its control, and the optimizer of each."""
    model, control = network(device), network(device)
    return model, control, kind(model.parameters(), lr=lr), kind(control.parameters(), lr=lr)


def build(name, implementation, parameters, lr=0.1):
    kind, options = OPTIMIZERS[name]
    return kind(parameters, lr=lr, foreach=implementation == "foreach", fused=implementation == "fused", **options)


# --- scale() -------------------------------------------------------------------------------------------------------


def test_scale_multiplies_and_keeps_the_shape_of_the_nest(scaler_type, device):
    scaler = scaler_type(device, init_scale=2.0)
    four = torch.full((1,), 4.0, device=device)
    assert scaler.scale(four).item() == 8.0
    assert scaler.scale([four, (four, [four])]) == [8.0, (8.0, [8.0])]
    assert scaler.scale((four, four)) == (8.0, 8.0)
    assert list(scaler.scale(four for _ in range(3))) == [8.0] * 3


@pytest.mark.parametrize("wrong", [3.0, None, [3.0]])
def test_scale_refuses_what_is_no_tensor(scaler_type, wrong):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler_type("cpu").scale(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_keeps_the_dtype_and_the_graph(scaler_type, device, dtype):
    x = torch.ones(2, dtype=dtype, device=device, requires_grad=True)
    scaled = scaler_type(device, init_scale=8.0).scale(x)
    scaled.sum().backward()
    assert scaled.dtype == dtype
    assert x.grad.tolist() == [8.0, 8.0]


def test_the_scale_tensor_is_made_at_the_first_scale(scaler_type, device):
    scaler = scaler_type(device, init_scale=2.0)
    assert scaler._scale is None
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0, 0)
    scaler.scale([torch.zeros(3, device=device)])
    assert (scaler._scale.device.type, scaler._scale.dtype, scaler._scale.shape) == (device, torch.float32, ())
    assert (scaler._growth_tracker.item(), scaler._growth_tracker.dtype) == (0, torch.int32)
    assert scaler._get_scale_async() is scaler._scale


# --- unscale_() ----------------------------------------------------------------------------------------------------


def storm(device, dtypes):
    """Gradients of many layouts, each 4.0 throughout."""
    views = [lambda g: g, torch.t, lambda g: g[:, :5], lambda g: g[::2], lambda g: g[:3, :1]]
    return [view(torch.full((20, 20), 4.0, dtype=dtype, device=device)) for dtype in dtypes for view in views]


def holding(grads):
    """An optimizer of two groups that holds these gradients, and a parameter without one."""
    weights = [torch.empty_like(grad) for grad in grads]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    return torch.optim.SGD([{"params": weights[:2]}, {"params": [*weights[2:], torch.zeros(3)]}], lr=1.0)


def dtypes_unscaled(scaler_type, device):
    """torch's kernel for CUDA has no BF16."""
    plain = [torch.float32, torch.float64]
    return plain if scaler_type is torch.amp.GradScaler and device == "cuda" else [*plain, torch.bfloat16]


def test_unscale_divides_every_layout_and_dtype(scaler_type, device):
    grads = storm(device, dtypes_unscaled(scaler_type, device))
    scaler = started(scaler_type, device)
    optimizer = holding(grads)
    scaler.unscale_(optimizer)
    assert all((grad == 1.0).all() for grad in grads)
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [0.0]
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


@pytest.mark.parametrize("value", WILD)
def test_unscale_finds_one_bad_element_anywhere(scaler_type, device, value):
    dtypes = dtypes_unscaled(scaler_type, device)
    for place in range(len(storm(device, dtypes))):
        grads = storm(device, dtypes)
        grads[place][2, 0] = value
        scaler, optimizer = started(scaler_type, device), holding(grads)
        scaler.unscale_(optimizer)
        assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [1.0], place


def test_the_private_unscaler_takes_fp16_when_reported_to(scaler_type, device):
    for place in range(-1, 10):
        grads = storm(device, [torch.float32, torch.float16])
        if place >= 0:
            grads[place][0] = math.inf
        inverse, found = torch.full((1,), 0.25, device=device), torch.zeros(1, device=device)
        result = scaler_type(device)._unscale_grads_(holding(grads), inverse, found, True)
        assert sum(each.item() for each in result.values()) == (place >= 0)
        assert place >= 0 or all((grad == 1.0).all() for grad in grads)


def test_fp16_gradients_are_refused(scaler_type, device):
    weight = torch.zeros(2, dtype=torch.float16, device=device)
    weight.grad = torch.ones_like(weight)
    for act in ("unscale_", "step"):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            getattr(started(scaler_type, device), act)(torch.optim.SGD([weight], lr=1.0))


def sparse(values, dtype=torch.float32, device="cpu", rows=(0, 1, 1)):
    indices = torch.tensor([rows, [2, 0, 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (2, 3), check_invariants=True).to(device, dtype)


@pytest.mark.parametrize("rows", [(0, 1, 1), (0, 1, 0)], ids=["distinct", "duplicate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_unscale_divides_sparse_gradients(scaler_type, device, dtype, rows):
    if dtype not in dtypes_unscaled(scaler_type, device):
        pytest.skip("torch's kernel for CUDA has no BF16")
    weight = torch.zeros(2, 3, dtype=dtype, device=device)
    weight.grad = sparse([16.0, 32.0, 64.0], dtype, device, rows)
    expected = weight.grad.to_dense() / 4
    started(scaler_type, device).unscale_(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad.is_sparse
    assert torch.equal(weight.grad.to_dense(), expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("value", WILD)
def test_a_bad_element_in_a_sparse_gradient_skips_the_step(scaler_type, device, value):
    weight = torch.zeros(2, 3, device=device)
    weight.grad = sparse([16.0, 32.0, value], device=device)
    scaler = started(scaler_type, device)
    assert scaler.step(torch.optim.SGD([weight], lr=1.0)) is None
    scaler.update()
    assert (scaler.get_scale(), weight.abs().sum().item()) == (2.0, 0.0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_fp16_duplicates_overflow_in_their_sum(scaler_type, device):
    weight = sparse([1.0, 1.0, 1.0], torch.float16, device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    inverse = torch.full((), 0.25, device=device)
    for values, bad in (([16.0, 32.0, 64.0], 0.0), ([64000.0, 32.0, 64000.0], 1.0)):
        weight.grad = sparse(values, torch.float16, device, rows=(0, 1, 0))
        expected = weight.grad.to_dense() / 4
        found = torch.zeros((), device=device)
        (found,) = scaler_type(device)._unscale_grads_(optimizer, inverse, found, True).values()
        assert found.item() == bad
        assert bad or torch.equal(weight.grad.to_dense(), expected)


# --- training equals the control -----------------------------------------------------------------------------------


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("prepare", [None, clip_true, clip_scaled])
@pytest.mark.parametrize("loss_of", [plain_loss, penalised_loss])
def test_training_equals_the_control(scaler_type, device, enabled, every, prepare, loss_of):
    model, control, optimizer, plain = pair(device)
    data = batches(device, 4 * every)
    scaler = scaler_type(device, init_scale=128.0, growth_interval=1, enabled=enabled)
    spoil = 3 * every - 1 if enabled else None
    fit(model, optimizer, data, scaler, spoil, loss_of, prepare, every)
    fit(control, plain, data, None, spoil, loss_of, prepare, every)
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    assert alike(model, control, optimizer, plain, grads=True)


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("separate", [True, False], ids=["unscale_ first", "step alone"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_the_control_through_a_skip(scaler_type, device, name, implementation, separate):
    if (name, implementation, device) == ("Adagrad", "fused", "cuda"):
        pytest.skip("most versions of torch have no such kernel")
    model, control, data = network(device), network(device), batches(device)
    optimizer = build(name, implementation, model.parameters())
    plain = build(name, "for-loop", control.parameters())
    scaler = scaler_type(device, init_scale=128.0, growth_interval=1)
    prepare = (lambda m, o, s: s.unscale_(o)) if separate else None
    fit(model, optimizer, data[:2], scaler, prepare=prepare)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))
    fit(model, optimizer, data[2:3], scaler, spoil=0, prepare=prepare)
    assert all(map(torch.equal, model.parameters(), before[0]))
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in before[1][index].items():
            assert value is None or torch.equal(state[key], value), key
    fit(model, optimizer, data[3:], scaler, prepare=prepare)
    fit(control, plain, data, spoil=2)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5
    assert alike(model, control, optimizer, plain, 2e-5, 2e-5, grads=True)  # fused kernels unscale .grad too


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_training_under_autocast_stays_near_fp32(scaler_type, device, enabled, pickled):
    model, control, optimizer, plain = pair(device)
    scaler = scaler_type(device, init_scale=128.0, growth_interval=1, enabled=enabled)
    spoil = 2 if enabled else None

    def mixed(model, x, y, scaler):
        with torch.autocast(device, dtype=torch.float16):
            return mse_loss(model(x), y)

    for i, batch in enumerate(batches(device)):
        fit(model, optimizer, [batch], scaler, 0 if i == spoil else None, mixed)
        scaler = pickle.loads(pickle.dumps(scaler)) if pickled else scaler
    fit(control, plain, batches(device), None, spoil)
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    assert alike(model, control, optimizer, plain, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("enabled", [True, False])
def test_two_models_two_losses_and_one_skip(scaler_type, device, enabled):
    scaler = scaler_type(device, init_scale=128.0, growth_interval=1, enabled=enabled)
    models, controls = ([network(device, seed) for seed in (0, 1)] for _ in range(2))
    first, second = optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    plains = [torch.optim.SGD(model.parameters(), lr=0.5) for model in controls]

    def losses(a, b, x, y):
        return mse_loss(0.3 * a(x) + 0.7 * b(x), y), mse_loss(0.6 * a(x) - 0.4 * b(x), y)

    for i, (x, y) in enumerate(batches(device)):
        spoilt = enabled and i == 2
        for each in (*optimizers, *plains):
            each.zero_grad()
        for loss in scaler.scale(losses(*models, x, y)):
            loss.backward()
        sum(losses(*controls, x, y)).backward()
        if spoilt:
            models[1][1].weight.grad.fill_(math.inf)
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        if enabled:
            found = [[each.item() for each in scaler._found_inf_per_device(o).values()] for o in optimizers]
            assert found == [[0.0], [float(spoilt)]]
        scaler.update()
        for plain in plains[: 1 if spoilt else 2]:
            plain.step()
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    assert all(map(alike, models, controls, optimizers, plains))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_gradients_broken_after_unscale_reach_the_weights(scaler_type, device, name, implementation):
    model = network(device)
    optimizer = build(name, implementation, model.parameters())

    def ruin(model, optimizer, scaler):
        scaler.unscale_(optimizer)
        for i, weight in enumerate(model.parameters()):
            weight.grad.fill_(WILD[i % 3])

    fit(model, optimizer, batches(device, 1), scaler_type(device, init_scale=128.0), prepare=ruin)
    assert not any(weight.isfinite().all() for weight in model.parameters())


# --- the scale's bookkeeping ---------------------------------------------------------------------------------------


def test_growth_and_backoff_are_counted_exactly(scaler_type, device):
    scaler = scaler_type(device, init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    seen = []
    for grad in (1.0, 1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0):
        turn(scaler, device, grad)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(4, 1), (12, 0), (12, 1), (3, 0), (3, 1), (0.75, 0), (0.75, 1), (2.25, 0)]


def test_the_scale_never_grows_to_inf(scaler_type, device):
    scaler = scaler_type(device, init_scale=2.0**127, growth_factor=2.0**4, growth_interval=1)
    turn(scaler, device, 1.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**127, 0)


def test_setters_act_from_the_next_update_on(scaler_type, device):
    scaler = started(scaler_type, device)
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.125)
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (1, 8.0, 0.125)
    turn(scaler, device, 1.0)
    assert scaler.get_scale() == 32.0
    turn(scaler, device, math.inf)
    assert scaler.get_scale() == 4.0


def test_the_defaults_are_torchs(scaler_type):
    scaler = scaler_type("cpu")
    assert scaler.is_enabled()
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (65536.0, 2.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.5, 2000)


def test_factors_on_the_wrong_side_of_one_are_refused(scaler_type):
    with pytest.raises(AssertionError, match=r"The growth factor must be > 1\.0"):
        scaler_type("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match=r"The backoff factor must be < 1\.0"):
        scaler_type("cpu", backoff_factor=1.0)
    assert not scaler_type("cpu", growth_factor=1.0, backoff_factor=1.0, enabled=False).is_enabled()


def test_update_takes_a_new_scale(scaler_type, device):
    scaler = started(scaler_type, device)
    turn(scaler, device)
    scaler.update(32.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    new = torch.full((), 16.0, device=device)
    scaler.update(new)
    new.fill_(99.0)
    assert scaler.get_scale() == 16.0
    _, optimizer = one_weight(device, [math.inf])
    scaler.step(optimizer)
    scaler.update(8.0)  # ends the iteration, and forgets its inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")])
def test_update_refuses_other_tensors(scaler_type, wrong):
    scaler = started(scaler_type)
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(wrong)
    assert scaler.get_scale() == 4.0


def test_the_scale_tensor_stays_the_same_tensor(scaler_type, device):
    scaler = started(scaler_type, device, growth_interval=1)
    scale, tracker = scaler._scale, scaler._growth_tracker
    for act in (lambda: turn(scaler, device), lambda: turn(scaler, device, math.inf), lambda: scaler.update(2.0)):
        act()
    scaler.load_state_dict(scaler_type(device, init_scale=16.0).state_dict())
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert scale.item() == 16.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*stream")
def test_a_captured_graph_follows_the_scale(scaler_type):
    scaler = scaler_type("cuda", init_scale=4.0)
    weight = torch.ones(100, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scaler.scale((weight.half() * x).sum()).backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale((weight.half() * x).sum()).backward()
    for value, grad, scale, tracker in ((5, 20, 4, 1), (20000, math.inf, 2, 0), (5, 10, 2, 1), (40000, math.inf, 1, 0)):
        x.fill_(value)
        graph.replay()
        assert (weight.grad == grad).all()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler._scale.item(), scaler._growth_tracker.item()) == (scale, tracker)


# --- what is saved -------------------------------------------------------------------------------------------------

NUMBERS = {"init_scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
FIVE = {"scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}


other_type = scaler_type


@pytest.mark.parametrize("lazy", [True, False])
def test_a_state_dict_travels_between_the_classes(scaler_type, other_type, device, lazy):
    source = scaler_type(device, **NUMBERS)
    assert {key: source.state_dict()[key] for key in FIVE} == {**FIVE, "_growth_tracker": 0}
    turn(source, device)
    state = source.state_dict()
    assert {key: state[key] for key in FIVE} == FIVE
    assert all(not isinstance(value, torch.Tensor) for value in state.values())
    target = other_type(device, init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    target._init_growth_tracker = 7
    if not lazy:
        target.scale(torch.zeros(1, device=device))
    target.load_state_dict(copy.deepcopy(state))
    assert {key: target.state_dict()[key] for key in FIVE} == FIVE
    assert target.scale(torch.ones(1, device=device)).item() == 3.0
    turn(target, device)
    assert (target.get_scale(), target._get_growth_tracker()) == (12.0, 0)


def test_a_disabled_scaler_saves_nothing_and_loads_nothing(scaler_type):
    disabled = scaler_type("cpu", enabled=False)
    assert disabled.state_dict() == {}
    disabled.load_state_dict(scaler_type("cpu").state_dict())
    disabled.load_state_dict({})
    assert (disabled.is_enabled(), disabled.get_scale()) == (False, 1.0)
    assert not pickle.loads(pickle.dumps(disabled)).is_enabled()
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        scaler_type("cpu").load_state_dict(disabled.state_dict())


@pytest.mark.parametrize("lazy", [True, False])
def test_pickling_restores_the_numbers(scaler_type, device, lazy):
    scaler = scaler_type(device, **NUMBERS)
    if not lazy:
        turn(scaler, device)
    twin = pickle.loads(pickle.dumps(scaler))
    assert type(twin) is scaler_type
    assert twin.state_dict() == scaler.state_dict()
    assert (twin._scale, twin._growth_tracker, twin._init_growth_tracker) == (None, None, int(not lazy))
    assert twin._per_optimizer_states["any"] == _refresh_per_optimizer_state()
    assert twin.scale(torch.full((1,), 4.0, device=device)).item() == 12.0


def test_pickling_is_refused_inside_an_iteration(scaler_type, device):
    scaler = started(scaler_type, device)
    _, optimizer = one_weight(device)
    for act in (scaler.unscale_, scaler.step):
        act(optimizer)
        with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
            pickle.dumps(scaler)
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 4.0


# --- order and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["unscale_", "step", "update"])
def test_nothing_works_before_the_first_scale(scaler_type, act):
    arguments = () if act == "update" else one_weight()[1:]
    with pytest.raises(AssertionError, match=f"Attempted {act} but _scale is None"):
        getattr(scaler_type("cpu"), act)(*arguments)


@pytest.mark.parametrize(
    ("acts", "words"),
    [
        (["unscale_", "unscale_"], r"unscale_\(\) has already been called on this optimizer since the last update\(\)"),
        (["step", "unscale_"], r"unscale_\(\) is being called after step\(\)"),
        (["step", "step"], r"step\(\) has already been called since the last update\(\)"),
        (["unscale_", "step", "step"], r"step\(\) has already been called since the last update\(\)"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_acts_out_of_order_are_refused(scaler_type, device, acts, words, fused):
    scaler = started(scaler_type, device)
    _, optimizer = one_weight(device, fused=fused)
    for act in acts[:-1]:
        getattr(scaler, act)(optimizer)
    with pytest.raises(RuntimeError, match=words):
        getattr(scaler, acts[-1])(optimizer)
    if acts[0] == "step":
        scaler.update()
        getattr(scaler, acts[-1])(optimizer)


def test_without_gradients_nothing_was_checked(scaler_type):
    scaler = started(scaler_type)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))


def test_closures_need_a_disabled_scaler(scaler_type):
    weight, optimizer = one_weight()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
        started(scaler_type).step(optimizer, closure=lambda: 5.0)
    assert weight.abs().sum() == 0
    assert scaler_type("cpu", enabled=False).step(optimizer, closure=lambda: 5.0) == 5.0


def test_disabled_every_act_lets_through(scaler_type, device):
    scaler = scaler_type(device, enabled=False)
    weight, optimizer = one_weight(device)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(3.0)
    assert weight.tolist() == [-2.0, -4.0]
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1.0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("arguments", [("cuda",), ()])
def test_cuda_without_cuda_warns_and_disables(scaler_type, arguments):
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling."):
        scaler = scaler_type(*arguments)
    assert not scaler.is_enabled()
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
    scaler_type("cuda", enabled=False)


@pytest.mark.gpu
def test_one_optimizer_may_hold_several_devices(scaler_type):
    if scaler_type is torch.amp.GradScaler:
        pytest.skip("torch copies the scale to the CPU without waiting, and may read it before it is there")
    for bad in (None, "cpu", "cuda"):
        weights = {place: nn.Parameter(torch.zeros(2, device=place)) for place in ("cuda", "cpu")}
        for place, weight in weights.items():
            weight.grad = torch.full_like(weight, math.inf if place == bad else 4.0)
        scaler, optimizer = started(scaler_type, "cuda"), torch.optim.SGD(weights.values(), lr=1.0)
        scaler.step(optimizer)
        assert len(scaler._found_inf_per_device(optimizer)) == 2
        scaler.update()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        assert all(weight.tolist() == ([0.0, 0.0] if bad else [-1.0, -1.0]) for weight in weights.values())


@pytest.mark.gpu
def test_scale_reaches_every_device(scaler_type):
    # Not the CPU: torch copies the scale there without a sync, and multiplies with what it finds.
    places = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]
    scaler = scaler_type("cuda", init_scale=2.0)
    scaled = scaler.scale([torch.ones(1, device=place) for place in places])
    assert [(str(each.device), each.item()) for each in scaled] == [(place, 2.0) for place in places]
    assert str(scaler._scale.device) == places[0]


# --- what the optimizer is given -----------------------------------------------------------------------------------


class Echo(torch.optim.SGD):
    def step(self, *args, **kwargs):
        super().step()
        return args, kwargs


def test_step_forwards_its_arguments_and_returns_the_result(scaler_type, device):
    weight, optimizer = one_weight(device, optimizer=Echo)
    scaler = started(scaler_type, device)
    assert scaler.step(optimizer, 3, word="x") == ((3,), {"word": "x"})
    scaler.update()
    weight.grad = torch.full_like(weight, math.nan)
    assert scaler.step(optimizer, 3, word="x") is None
    weight.grad = torch.ones_like(weight)
    assert scaler_type(device, enabled=False).step(optimizer, 3) == ((3,), {})


class Probe(torch.optim.SGD):
    """Scales for itself, by the present contract: reads ``grad_scale`` and ``found_inf``."""

    _step_supports_amp_scaling = True

    def step(self, *args, **kwargs):
        scale = self.grad_scale if self.grad_scale is None else self.grad_scale.item()
        return scale, self.found_inf.item(), self.param_groups[0]["params"][0].grad.tolist(), args, kwargs


@pytest.mark.parametrize("value", [4.0, math.inf])
def test_an_optimizer_that_scales_for_itself_is_given_scale_and_verdict(scaler_type, device, value):
    _, optimizer = one_weight(device, [8.0, value], Probe)
    scaler = started(scaler_type, device)
    bad = float(value == math.inf)
    assert scaler.step(optimizer, 3, word="x") == (4.0, bad, [8.0, value], (3,), {"word": "x"})
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    scaler.update()
    assert scaler.get_scale() == (2.0 if bad else 4.0)


def test_after_unscale_there_is_no_scale_left_to_undo(scaler_type, device):
    _, optimizer = one_weight(device, [8.0, 4.0], Probe)
    scaler = started(scaler_type, device)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer)[:3] == (None, 0.0, [2.0, 1.0])


@pytest.mark.parametrize(("separate", "seen"), [(False, 12.0), (True, 3.0)])
def test_the_users_own_grad_scale_is_multiplied_in(scaler_type, device, separate, seen):
    _, optimizer = one_weight(device, optimizer=Probe)
    optimizer.grad_scale = torch.tensor(3.0, device=device)
    scaler = started(scaler_type, device)
    if separate:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer)[0] == seen
    assert not hasattr(optimizer, "grad_scale")


def test_the_users_own_grad_scale_reaches_the_fused_kernel(scaler_type, device):
    weight, optimizer = one_weight(device, [24.0, 12.0], fused=True)
    optimizer.grad_scale = torch.tensor(3.0, device=device)
    started(scaler_type, device).step(optimizer)
    assert weight.tolist() == [-2.0, -1.0]
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_that_scales_for_itself_may_have_fp16_gradients(scaler_type, device):
    weight = torch.zeros(2, dtype=torch.float16, device=device)
    for value, bad in ((8.0, 0.0), (math.inf, 1.0)):
        weight.grad = torch.full_like(weight, value)
        assert started(scaler_type, device).step(Probe([weight], lr=1.0))[:2] == (4.0, bad)


class OldProbe(torch.optim.SGD):
    """Scales for itself, by the contract of old: is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        assert not hasattr(self, "grad_scale")
        assert not hasattr(self, "found_inf")
        grad_scaler.unscale_(self)
        bad = sum(each.item() for each in grad_scaler._found_inf_per_device(self).values())
        if not bad:
            super().step()
        return grad_scaler, bad


@pytest.mark.parametrize("value", [4.0, math.inf])
def test_the_contract_of_old_still_passes_the_scaler(scaler_type, device, value):
    weight, optimizer = one_weight(device, [value], OldProbe)
    scaler = started(scaler_type, device)
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        given, bad = scaler.step(optimizer)
    assert given is scaler
    scaler.update()
    outcome = (bad, scaler.get_scale(), weight.item())
    assert outcome == ((1.0, 2.0, 0.0) if value == math.inf else (0.0, 4.0, -1.0))


# --- sharded gradients ---------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(torch.cpu.current_stream(), "record_event"), reason="this version cannot run FSDP2 on a CPU"
)
@pytest.mark.parametrize("bad", [True, False])
def test_fully_sharded_gradients_are_checked_and_unscaled(scaler_type, mesh, bad):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network("cpu"), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = scaler_type("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(4, 8)).sum()).backward()
    grad = optimizer.param_groups[0]["params"][0].grad.to_local()
    if bad:
        grad[0, 0] = math.inf
    expected = grad / 2
    scaler.unscale_(optimizer)
    assert [float(found) for found in scaler._found_inf_per_device(optimizer).values()] == [float(bad)]
    assert torch.equal(grad, expected)
    scaler.step(optimizer)
    scaler.update()
    assert (len(optimizer.state) == 0) == bad
    assert scaler.get_scale() == (1.0 if bad else 2.0)
