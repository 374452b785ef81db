"""The scaler on a real GPU: the compiled kernels against their definitions, no waiting, graphs, memory."""

import copy
import math

import pytest
import torch
from torch import nn

import ampwise
from ampwise.train.scaler.grad_stats import decide_step
from ampwise.train.scaler.loss_scale import ScaleLimits, new_counters, update_scale_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:.*capturable"),
]


def training(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **options)


def one_step(model, optimizer, scaler, *, clip=1.0, bad=False, seed=0):
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = model(data).square().mean()
    scaler.scale(loss).backward()
    if bad:
        model[0].weight.grad[3, 5] = math.inf
    if clip is not None:
        scaler.clip_(optimizer, clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("max_norm", [math.inf, 1.0, 1e-3])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("scale", [None, 65536.0, 1000.0])
def test_the_kernel_judges_as_defined(max_norm, bad, scale):
    from ampwise.numbers.census.launch import launch_census
    from ampwise.train.scaler.kernel import launch_check, launch_totals

    torch.manual_seed(0)
    gradients = [torch.randn(n, device="cuda") for n in (7, 40_000, 1_000_003)]
    if bad is not None:
        gradients[1][17] = bad
    there = None if scale is None else torch.tensor(scale, device="cuda")
    counted = launch_census(gradients, there)
    totals = launch_totals(counted, None)
    assert totals[0].item() == pytest.approx(sum(census.sum_squares for census in counted.fetch()), rel=1e-12)
    right = decide_step(totals, there, max_norm).numbers
    for to_host in (False, True):
        again, found = launch_check(gradients, there, max_norm, to_host=to_host)
        torch.testing.assert_close(found.numbers, right, rtol=1e-6, atol=0, equal_nan=True)
        assert again.fetch() == counted.fetch()
        assert (found.on_host is not None) == to_host
    torch.testing.assert_close(found.on_host, found.numbers.cpu(), rtol=0, atol=0, equal_nan=True)
    weighted = launch_totals(counted, (0.5, 0.25, 1.0))
    parts = [census.sum_squares for census in counted.fetch()]
    assert weighted[0].item() == pytest.approx(0.5 * parts[0] + 0.25 * parts[1] + parts[2], rel=1e-12)


@pytest.mark.parametrize("move", [True, False])
def test_the_kernel_moves_the_scale_as_defined(move):
    from ampwise.train.scaler.kernel import launch_update_scale_

    limits = ScaleLimits(growth=1.7, backoff=0.3, interval=3, floor=0.5, ceiling=300.0, hysteresis=2)
    generator = torch.Generator().manual_seed(0)
    state = [torch.tensor(64.0, device="cuda"), torch.tensor(0, dtype=torch.int32, device="cuda"), new_counters("cuda")]
    mirror = [tensor.cpu() for tensor in state]
    for _ in range(200):
        found = (torch.rand(3, generator=generator) < 0.2).float()
        outcomes = torch.stack([torch.rand(3, generator=generator), found], dim=1)
        facts = launch_update_scale_(*state, outcomes.cuda(), 2, limits, move=move)
        torch.cuda.synchronize()  # the facts are in pinned memory
        assert torch.equal(facts, update_scale_(*mirror, outcomes, 2, limits, move=move))
        assert all(torch.equal(one.cpu(), other) for one, other in zip(state, mirror, strict=True))


def test_a_step_waits_for_nothing_and_its_facts_are_right_when_asked_for():
    model, optimizer = training()
    scaler = ampwise.GradScaler("cuda", init_scale=1024.0)
    for seed in range(3):
        one_step(model, optimizer, scaler, seed=seed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(20):
            data = torch.randn(16, 64, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = model(data).square().mean()
            scaler.scale(loss).backward()
            if seed % 5 == 2:
                model[0].weight.grad[0].fill_(math.nan)
            scaler.clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            census = scaler.census(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (scaler.applied_steps, scaler.skipped_steps, scaler.skipped) == (3 + 16, 4, False)
    assert census["0.weight"].count == 64 * 128
    assert math.isfinite(scaler.grad_norm)


@pytest.mark.parametrize("way", ["clip_", "unscale_", "neither"])
def test_true_units_whatever_the_order(way):
    model, optimizer = training()
    oracle, _ = training()
    data = torch.randn(16, 64, device="cuda")
    oracle(data).square().mean().backward()
    scaler = ampwise.GradScaler("cuda", init_scale=1000.0)
    scaler.scale(model(data).square().mean()).backward()
    if way == "clip_":
        scaler.clip_(optimizer, 1e9)
    if way == "unscale_":
        scaler.unscale_(optimizer)
        for ours, right in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, right.grad, rtol=1e-5, atol=1e-9)
    scaler.step(optimizer)
    scaler.update()
    counted = scaler.census(model)
    for name, parameter in oracle.named_parameters():
        assert counted[name].norm == pytest.approx(parameter.grad.norm().item(), rel=1e-5)


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_skipped_step_leaves_every_bit(optimizer_type, enabled):
    model, _ = training()
    options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}
    optimizer = optimizer_type(model.parameters(), lr=1e-3, fused=True, **options)
    scaler = ampwise.GradScaler("cuda", init_scale=1024.0, enabled=enabled)
    for step in range(6):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        one_step(model, optimizer, scaler, bad=step in (0, 3), seed=step)
        after = (model.state_dict(), optimizer.state_dict()["state"])
        same = all(torch.equal(after[0][name], value) for name, value in before[0].items())
        assert same is (step in (0, 3)) is scaler.skipped
        if step == 3:
            for key, state in before[1].items():
                assert all(
                    torch.equal(torch.as_tensor(after[1][key][name]), torch.as_tensor(v)) for name, v in state.items()
                )
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3}, {"maximize": True}, {"betas": (0.0, 0.9), "eps": 1e-4}, {"lr": torch.tensor(3e-3)}],
    ids=str,
)
def test_our_adam_is_torchs(optimizer_type, options):
    def run(scaler_type):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (1_000_003, 40_000, 7, 0)]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
        given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        optimizer = optimizer_type(groups, fused=True, **{"lr": 1e-3, **given})
        scaler = scaler_type("cuda", init_scale=1024.0)
        scaler.scale(torch.zeros((), device="cuda"))
        for step in range(12):
            for parameter in params:
                parameter.grad = torch.randn_like(parameter) * 1024.0
            if step == 5:
                params[1].grad[9] = math.nan
            if scaler_type is ampwise.GradScaler:
                scaler.clip_(optimizer, 30.0)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 30.0)
            scaler.step(optimizer)
            scaler.update()
        return params, [optimizer.state[parameter] for parameter in params]

    (ours, our_state), (torchs, torchs_state) = run(ampwise.GradScaler), run(torch.amp.GradScaler)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)
    for one, other in zip(our_state, torchs_state, strict=True):
        assert one["step"] == other["step"] == 11
        torch.testing.assert_close(one["exp_avg"], other["exp_avg"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(one["exp_avg_sq"], other["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_inside_a_cuda_graph():
    def run(captured):
        model, optimizer = training(capturable=True)
        scaler = ampwise.GradScaler("cuda", init_scale=256.0, growth_interval=4)
        data = torch.zeros(16, 64, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16, cache_enabled=False):
                loss = model(data).square().mean()
            scaler.scale(loss).backward()
            scaler.clip_(optimizer, 0.01)
            scaler.step(optimizer)
            scaler.update()

        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(16, 64, generator=generator) for _ in range(14)]
        batches[8][0, 0] = math.inf
        torch.cuda.synchronize()  # the weights are made on another stream
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for batch in batches[:4]:
                data.copy_(batch)
                step()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        skips = []
        for batch in batches[4:]:
            data.copy_(batch)
            graph.replay() if captured else step()
            skips.append(scaler.skipped)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return weights, skips, scaler.get_scale(), scaler.applied_steps, scaler.census(model)["0.weight"]

    plain, replayed = run(False), run(True)
    torch.testing.assert_close(plain[0], replayed[0], rtol=1e-5, atol=1e-7)
    assert plain[1:4] == replayed[1:4]
    assert plain[1] == [batch == 4 for batch in range(10)]
    assert replayed[4].count == 64 * 128


def test_a_plain_optimizer_in_a_graph_is_refused_in_words():
    model, _ = training()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    scaler = ampwise.GradScaler("cuda", init_scale=256.0)
    one_step(model, optimizer, scaler)
    data = torch.randn(16, 64, device="cuda")
    scaler.scale(model(data).square().mean()).backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="fused=True, capturable=True"), torch.cuda.graph(graph):
        scaler.step(optimizer)
    torch.cuda.synchronize()


def test_collapse_is_reported_at_the_next_update_and_weights_are_safe():
    model, optimizer = training()
    scaler = ampwise.GradScaler("cuda", init_scale=2.0, min_scale=1.0)
    weights = copy.deepcopy(model.state_dict())
    for step in range(2):
        one_step(model, optimizer, scaler, bad=True, seed=step)
    with pytest.raises(
        ampwise.ScaleCollapsed,
        match=r"min_scale=1, for 2 steps in a row.* look at parameter 0 of group 0 or just after",
    ):
        one_step(model, optimizer, scaler, bad=True, seed=2)
    assert scaler.get_scale() == 1.0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


def test_gradients_with_gaps_sparse_ones_and_other_dtypes():
    embedding = nn.Embedding(50, 6, sparse=True).cuda()
    plain = nn.Linear(6, 4).cuda()
    double = nn.Parameter(torch.randn(4, dtype=torch.float64, device="cuda"))
    on_cpu = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([*embedding.parameters(), *plain.parameters(), double, on_cpu], lr=0.1)
    scaler = ampwise.GradScaler("cuda", init_scale=1024.0)
    loss = plain(embedding(torch.tensor([1, 1, 7], device="cuda"))).sum() + double.sum().float()
    scaler.scale(loss).backward()
    on_cpu.grad = torch.full((3,), 2 * 1024.0)
    base = torch.zeros(4, 12, device="cuda")
    base[:, ::2] = plain.weight.grad
    plain.weight.grad = base[:, ::2]
    expected = plain.weight.grad.clone() / 1024
    scaler.unscale_(optimizer)
    assert torch.equal(plain.weight.grad, expected)
    assert torch.equal(on_cpu.grad, torch.full((3,), 2.0))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.skipped
    assert scaler.census()["0.0"].count == 2 * 6
    assert list(scaler.census()) == ["0.0", "0.1", "0.2", "0.4"]  # all but FP64
